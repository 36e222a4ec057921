"""Training and inference of segmentation and detection: pictures per second and memory, on made-up pictures.

    python benchmarks/dense_speed.py --out benchmarks/results

A training step is forward, backward and optimiser on a batch that lies on the device; medians of steps after a
warm-up, bf16 on a GPU. Peak memory is that of the training step. MACs are those of the picture size given.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import timm
import torch

import weft  # noqa: F401  registers the models
from weft.catalog.cost import count_macs
from weft.config import Config, override
from weft.data.preprocessing import Preprocessing
from weft.engine.optim import make_optimizer
from weft.heads.folder import DenseSpec, build_dense
from weft.report.run import processor
from weft.tasks.registry import make_task
from weft.tasks.task import TaskFacts

SEGMENT = [
    (model, head, 512, 8)
    for model in ("resnet50_v1", "cetnet_tiny", "cvt_13", "vt_resnet50", "vitae_tiny", "ceit_tiny")
    for head in ("fpn", "vt-fpn", "upernet")
]
DETECT = [(model, "mask-rcnn", 800, 2) for model in ("resnet50_v1", "cetnet_tiny", "cvt_13", "ceit_tiny")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", default=[], help="MODEL/HEAD; by default all")
    parser.add_argument("--size", type=int, default=0, help="another size of all pictures")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for model, head, size, batch in SEGMENT + DETECT:
        if args.rows and f"{model}/{head}" not in args.rows:
            continue
        rows.append(measure(model, head, args.size or size, batch, args.steps, device))
        print(
            "{model:12} {head:10} {size} px, batch {batch}: training {training:7.1f} pictures/s, {gib:5.1f} GiB;"
            " inference {inference:7.1f} pictures/s; {parameters:.1f} M, {macs} G".format(**rows[-1]),
            flush=True,
        )
    if args.out:
        name = torch.cuda.get_device_name() if device.type == "cuda" else processor()
        facts = {"device": name, "torch": torch.__version__, "date": date.today().isoformat()}
        path = args.out / f"dense_speed-{date.today().isoformat()}.json"
        path.write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


def measure(name: str, head: str, size: int, batch: int, steps: int, device: torch.device) -> dict:
    detect = head.endswith("rcnn")
    classes = [str(i) for i in range(80 if detect else 150)]
    config = override(Config(), {"augment.img_size": size, "augment.long_side": size, "model.head": head})
    preprocessing = Preprocessing((size, size), 3, 8, (0.5,) * 3, (0.25,) * 3, "bilinear", 1.0, "fit", 2**30)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    facts = TaskFacts(classes, preprocessing, device, dtype)
    task = make_task("detect" if detect else "segment", config, facts)
    torch.manual_seed(0)
    spec = DenseSpec(task.name, name, {}, 3, head, {}, classes)
    model = build_dense(spec, config).to(device)
    optimizer = make_optimizer(model, config.optim, batch)
    made = task.dummy_batch(batch)
    x, y = task.prepare(made, 0)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        task.loss(model, x, y, batch)[0].backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            task.infer(model, made.pictures)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = batch / median_time(train, steps, device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    model.eval()
    inference = batch / median_time(infer, steps, device)
    return {
        "model": name,
        "head": head,
        "size": size,
        "batch": batch,
        "training": training,
        "inference": inference,
        "gib": peak / 2**30,
        "parameters": sum(p.numel() for p in model.parameters()) / 1e6,
        "macs": None if detect else round(dense_macs(spec, config, size) / 1e9, 1),
    }


def median_time(step, steps: int, device: torch.device) -> float:
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


def dense_macs(spec: DenseSpec, config: Config, size: int) -> int:
    with torch.device("meta"):
        backbone = timm.create_model(spec.name, num_classes=0)
        return count_macs(build_dense(spec, config, backbone), (3, size, size))


if __name__ == "__main__":
    main()
