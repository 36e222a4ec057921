"""Augmentation of batches that stay on the GPU: milliseconds of drawing and of kernels, launched and replayed.

    python benchmarks/augment.py [--rounds 50] [--out FILE]
    python benchmarks/augment.py --check       # whether the kernels do what plain PyTorch does on the CPU

RandAugment, then normalising, erasing and mixing, at 32 pixels in batches of 256 and at 224 pixels in batches of 128.
"draw" is processor time of the host, "launched" and "replayed" are medians of the GPU's time from event to event.
Beside them the policy for pictures that come from readers, which draws picture by picture and groups. --check ends with
an error where a value is off by more than rounding, or where a replayed step is not the one that was launched. It also
compares pictures with masks that are kept on the device with what readers make of them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.batch_policy import BatchJitter, BatchPolicy
from weft.data.augment.device_policy import DevicePolicy
from weft.data.augment.kept_pairs import KeptMasks
from weft.data.augment.mix import BatchAugmentation
from weft.data.augment.pairs import SegmentAugmentation
from weft.data.keep import KeptPictures
from weft.data.preprocessing import Preprocessing
from weft.data.read import MAX_PIXELS
from weft.kernels.ops.augment import BICUBIC, BILINEAR, NEAREST, Code, augment_step
from weft.kernels.ops.mix import Mix, mix_pictures

POLICY, CLASSES = "rand-m9-mstd0.5-inc1", 10
BATCHES = ((32, 256), (224, 128))  # side, pictures
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where Triton's interpreter can check, but nothing is measured
ODD = ((1, 1), (2, 3), (17, 31), (33, 64), (65, 127))
MOST_OFF = 1e-3  # part of values that interpolation may have one off
FILL = (124, 116, 104)
CONFIG = AugmentConfig(policy=POLICY, interpolation="random", erase=0.25, mixup=0.8, cutmix=1.0, color_jitter=0.4)


def preprocessing(side: int) -> Preprocessing:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return Preprocessing((side, side), 3, 8, mean, std, "bicubic", 1.0, "center", MAX_PIXELS)


def pixels(*shape: int, seed: int = 0, top: int = 256) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, top, shape, dtype=np.uint8))


# Speed ----------------------------------------------------------------------------------------------------------


def host_ms(call: Callable[[], Any], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def device_ms(call: Callable[[], Any], rounds: int) -> float:
    """The GPU's time for a call, the median; it waits for the host where that is slower."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def recorded(call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """The call as a CUDA graph: what replays it, and its outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    return graph.replay, outputs


def measure(side: int, count: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each part: milliseconds of drawing, and on the device."""
    before, generator = preprocessing(side), np.random.default_rng(0)
    policy, mixing = BatchPolicy(CONFIG, before), BatchAugmentation(CONFIG, 0.1, CLASSES, False)
    jitter, grouped = BatchJitter(CONFIG, before), DevicePolicy(CONFIG, before)
    pictures, labels = pixels(count, 3, side, side).to(DEVICE), (torch.arange(count) % CLASSES).to(DEVICE)

    def draw_mix() -> np.ndarray:
        return mixing.draw_rows(generator, count, side, side)

    steps, colours, mixed = (
        torch.from_numpy(rows).to(DEVICE)
        for rows in (policy.draw(generator, count), jitter.draw(generator, count), draw_mix())
    )
    parts: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "policy": (lambda: policy.draw(generator, count), lambda: policy(pictures, steps)),
        "colour jitter": (lambda: jitter.draw(generator, count), lambda: jitter(pictures, colours)),
        "erase and mix": (draw_mix, lambda: mixing.finish(pictures, labels, mixed, before)),
        "the same, plain": (draw_mix, lambda: mixing.apply(before.normalise(pictures), labels, mixed)),
        "policy, erase and mix": (
            lambda: (policy.draw(generator, count), draw_mix()),
            lambda: mixing.finish(policy(pictures, steps), labels, mixed, before),
        ),
    }
    for name, (draw, run) in parts.items():
        launched, (replay, _) = device_ms(run, rounds), recorded(run)
        times = dict(draw=host_ms(draw, rounds), launched=launched, replayed=device_ms(replay, rounds))
        yield dict(side=side, pictures=count, part=name, **times)
    drawn = host_ms(lambda: grouped.draw(count, 0), rounds)
    launched = device_ms(lambda: grouped(pictures, 0), rounds)
    yield dict(side=side, pictures=count, part="policy for readers (draws, too)", draw=drawn, launched=launched)


def show_speed(rounds: int, out: Path | None) -> None:
    rows = []
    print(f"{'side':>4} {'pictures':>8}  {'part':34}{'draw':>9}{'launched':>10}{'replayed':>10}   milliseconds")
    for side, count in BATCHES:
        for row in measure(side, count, rounds):
            rows.append(row)
            times = f"{row['draw']:9.3f}{row['launched']:10.3f}"
            replayed = f"{row['replayed']:10.3f}" if "replayed" in row else f"{'-':>10}"
            print(f"{side:4} {count:8}  {row['part']:34}{times}{replayed}", flush=True)
    if out:
        machine = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, triton=triton.__version__)
        out.write_text(json.dumps(dict(machine=machine, policy=POLICY, rows=rows), indent=1))


# Whether they are right -----------------------------------------------------------------------------------------


def steps_with(code: Code, mode: int, seed: int, count: int = 6) -> Tensor:
    """(count, 4): the operation with arguments from the whole range."""
    generator = np.random.default_rng(seed)
    ranges = {Code.POSTERIZE: (0, 9), Code.SOLARIZE: (0, 257), Code.SOLARIZE_ADD: (0, 129)}
    by = generator.uniform(-0.45, 0.45, count) if code >= Code.SHEAR_X else generator.uniform(0.1, 1.9, count)
    by = generator.integers(*ranges[code], count) if code in ranges else by
    angle = generator.uniform(-0.55, 0.55, count) if code == Code.ROTATE else np.zeros(count)
    by = np.cos(angle) if code == Code.ROTATE else by
    columns = [np.full(count, float(code)), by, np.sin(angle), np.full(count, float(mode))]
    return torch.from_numpy(np.stack(columns, axis=1)).float()


def check_step(code: Code, seeds: int) -> tuple[int, float]:
    """The largest difference between kernel and reference, and the part of values that differ."""
    largest, different, values = 0, 0, 0
    modes = (NEAREST, BILINEAR, BICUBIC) if code >= Code.SHEAR_X else (BICUBIC,)
    for seed in range(seeds):
        for height, width in ODD:
            for channels, mode in ((channels, mode) for channels in (1, 3) for mode in modes):
                rows = steps_with(code, mode, seed)
                pictures = pixels(len(rows), channels, height, width, seed=seed, top=(256, 90, 3)[seed % 3])
                found = augment_step.launch(pictures.to(DEVICE), rows.to(DEVICE), 0, FILL[:channels]).cpu()
                wanted = augment_step.reference(pictures, rows, 0, FILL[:channels])
                difference = (found.int() - wanted.int()).abs()
                largest, different = max(largest, int(difference.max())), different + int((difference > 0).sum())
                values += difference.numel()
    return largest, different / values


def check_mix(seeds: int) -> float:
    """The largest difference between kernel and reference."""
    largest, before = 0.0, preprocessing(32)
    for seed in range(3 * seeds):
        mixing = BatchAugmentation(AugmentConfig(erase=0.5, mixup=0.8, cutmix=1.0), 0.0, CLASSES, False)
        for height, width in ODD:
            rows = torch.from_numpy(mixing.draw_rows(np.random.default_rng(seed), 7, height, width))
            pictures, noise = pixels(7, 3, height, width, seed=seed), torch.randn(7, 3, height, width)
            tensors = [pictures, rows, *before.statistics(torch.device("cpu")), noise]
            found = mix_pictures.launch(*(tensor.to(DEVICE) for tensor in tensors), True).cpu()
            largest = max(largest, (found - mix_pictures.reference(*tensors, True)).abs().max().item())
    return largest


def check_replay() -> bool:
    """Whether a graph, recorded with other rows, does what the rows of the moment say, and erases with new noise."""
    before, generator = preprocessing(32), np.random.default_rng(0)
    policy, mixing = BatchPolicy(CONFIG, before), BatchAugmentation(CONFIG, 0.1, CLASSES, False)
    pictures, labels = pixels(64, 3, 32, 32).to(DEVICE), (torch.arange(64) % CLASSES).to(DEVICE)

    def draw() -> Tensor:
        return torch.from_numpy(
            np.concatenate([policy.draw(generator, 64), mixing.draw_rows(generator, 64, 32, 32)], 1)
        )

    rows = draw().to(DEVICE)  # both in one tensor, as a training step has them

    def run() -> tuple[Tensor, Tensor]:
        changed = policy(pictures, rows[:, : policy.columns])
        return mixing.finish(changed, labels, rows[:, policy.columns :], before)

    replay, outputs = recorded(run)
    same = True
    for _ in range(5):
        fresh = draw()
        fresh[:, policy.columns + Mix.ERASED : policy.columns + Mix.KEPT] = 0  # noise is never the same
        rows.copy_(fresh)
        replay()
        same &= all(torch.equal(mine, wanted) for mine, wanted in zip(outputs, run(), strict=True))
    rows[:, policy.columns + 1], rows[:, policy.columns + 3] = 9, 9
    replay()
    first = outputs[0].clone()
    replay()
    return same and not torch.equal(first, outputs[0])


def check_pairs(seeds: int) -> tuple[float, float, bool]:
    """Kept pictures with masks next to the readers': mean difference, part of values that differ, if masks are equal.

    On a GPU the launches are recorded with the rows of the first seed and replayed with those of the others.
    """
    config = AugmentConfig(img_size=96, rescale=[0.4, 2.2], class_limit=0.75, photometric=1.0, interpolation="random")
    readers = SegmentAugmentation(config, replace(preprocessing(0), crop_mode="fit"), (96, 96))
    files = [pixels(*size, 3).numpy() for size in ((120, 160), (96, 96), (40, 200), (333, 70))]
    masks = [pixels(*file.shape[:2], top=9).numpy() for file in files]
    pairs = KeptMasks(readers)
    decoded = [pairs.decode(file, mask) for file, mask in zip(files, masks, strict=True)]
    shapes = np.array([picture.shape[1:] for picture in decoded])
    starts = torch.tensor([0, *(picture.numel() for picture in decoded[:-1])]).cumsum(0)
    places = starts.to(DEVICE), torch.from_numpy(shapes).to(DEVICE)
    flat = torch.cat([picture.flatten() for picture in decoded]).to(DEVICE)
    pairs.keep(KeptPictures(flat, *places, shapes, 4, np.arange(len(files)), []), np.empty(0))
    index = torch.arange(len(files), device=DEVICE)
    rows = torch.stack([pairs.pair(*pair, 0)[0] for pair in zip(files, masks, strict=True)]).to(DEVICE)

    def run() -> tuple[Tensor, Tensor]:
        return pairs.augmented(index, rows), pairs.masks(index, rows)

    replay, outputs = recorded(run) if DEVICE == "cuda" else (None, run())
    differences, equal = [], True
    for seed in range(10 * seeds):
        rows.copy_(torch.stack([pairs.pair(*pair, seed)[0] for pair in zip(files, masks, strict=True)]))
        found, shown = (replay(), outputs)[1] if replay else run()
        for i, pair in enumerate(zip(files, masks, strict=True)):
            picture, mask = readers.pair(*pair, seed)
            differences.append((found[i].cpu().int() - picture.int()).abs().float().flatten())
            equal &= torch.equal(shown[i].cpu(), mask)
    off = torch.cat(differences)
    return off.mean().item(), (off > 0).float().mean().item(), equal


def check(seeds: int) -> bool:
    """Prints a line for each operation; whether all are right."""
    right = True
    for code in Code:
        largest, different = check_step(code, seeds)
        fine = largest <= (code >= Code.SHEAR_X) and different <= MOST_OFF
        right &= fine
        print(
            f"{code.name:15} off by at most {largest}, {different:.2e} of values{'' if fine else '   WRONG'}",
            flush=True,
        )
    error = check_mix(seeds)
    right &= error < 1e-5
    print(f"{'erase and mix':15} off by at most {error:.1e}{'' if error < 1e-5 else '   WRONG'}")
    mean, different, equal = check_pairs(seeds)
    fine = equal and mean < 0.05 and different < 0.05
    right &= fine
    masks = "equal" if equal else "not"
    print(f"{'with masks':15} off by {mean:.1e} on average, masks {masks}{'' if fine else '   WRONG'}")
    if DEVICE == "cuda":
        same = check_replay()
        right &= same
        print(f"{'replayed':15} {'as launched' if same else 'WRONG'}")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    parser.add_argument("--check", action="store_true", help="compare with plain PyTorch on the CPU, measure nothing")
    parser.add_argument("--seeds", type=int, default=6, help="of --check")
    args = parser.parse_args()
    if args.check:
        sys.exit(not check(args.seeds))
    if DEVICE != "cuda":
        sys.exit("This needs an NVIDIA GPU.")
    show_speed(args.rounds, args.out)


if __name__ == "__main__":
    main()
