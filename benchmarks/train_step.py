"""Does the loop keep the device busy? Pictures per second of whole training, data and all, against the bare step.

    python benchmarks/train_step.py DATA [--model cvt_13] [--recipe cvt-imagenet] [--batch 256] [--steps 100]

The bare step is forward, backward and optimiser on one batch that lies on the device, augmented, mixed and ready, and
is recorded and replayed where steps of training are. Both are measured in turns in one run; medians. On a GPU the goal
is a ratio of 0.97. Where pictures are kept on a GPU, it also says what a step's time goes into: each part is recorded
on its own, and what the loop takes beyond them is the host's.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import weft
from weft.config import Config, override
from weft.data.loader import Batch, DrawnPictures
from weft.engine.device import World, pick_device
from weft.engine.fit_machine import find_micro_batch
from weft.engine.kept import keep
from weft.engine.loop import GPU_DELAY, Trainer
from weft.engine.start import RunStart
from weft.engine.whole_step import RecordedStep
from weft.fast.replay import WARM_UPS
from weft.run.choose import choose_preprocessing, fill
from weft.run.data import open_data
from weft.run.recipes import find_recipe
from weft.run.session import RunSession

ROUNDS = 3
Step = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", nargs="+", default=["cvt_13"])
    parser.add_argument("--recipe", default="cvt-imagenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--img-size", type=int, default=0)
    parser.add_argument("--workers", type=int, default=-1)
    parser.add_argument("--keep", default="auto", help="data.keep")
    parser.add_argument("--policy", help="augment.policy, where the recipe's is not wanted")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="train_step", help="of the file of results")
    args = parser.parse_args()
    rows = []
    for model in args.model:
        settings = {"model.name": model, "run.batch": args.batch, "data.source": args.data, "run.compile": args.compile}
        settings |= {"augment.img_size": args.img_size, "data.workers": args.workers, "model.init": ""}
        settings |= {"data.keep": args.keep} | ({} if args.policy is None else {"augment.policy": args.policy})
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(Path(folder), override(Config(), {**find_recipe(args.recipe), **settings}))
            rows.append({"model": model, "keep": trainer.config.data.keep, **measure(trainer, args.steps)})
        row = rows[-1]
        print(
            f"{model:14} bare step {row['bare']:8,.0f}  loop {row['loop']:8,.0f} pictures/s  ratio {row['ratio']:.3f}"
            + "".join(f"  {part} {ms:.2f} ms" for part, ms in row["milliseconds"].items()),
            flush=True,
        )
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        facts = {"device": device, "torch": torch.__version__, "date": date.today().isoformat(), **vars(args)}
        text = json.dumps({**facts, "rows": rows}, indent=2, default=str)
        (args.out / f"{args.name}-{date.today().isoformat()}.json").write_text(text + "\n")


def make_trainer(folder: Path, config: Config) -> Trainer:
    world = World(pick_device(config.run.device))
    data = open_data(config, world, lambda line: None)
    config, _ = fill(config, {"augment.crop"}, data.report, len(data.split.train), world.device)
    preprocessing = choose_preprocessing(config, data.report, data.source, data.split.train)
    (folder / "state").mkdir()
    trainer = RunSession(folder, config, world, data, preprocessing, quiet=True, start=RunStart()).trainer
    trainer.progress.total_steps = 10**6
    keep(trainer.run)
    find_micro_batch(trainer)
    return trainer


def measure(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Pictures per second; readers are warm before the clock starts."""
    batches = trainer.batches()
    _, first = next(batches)
    trainer.model.train()
    trainer.set_learning_rate(0)
    count, bare_step = len(first.pictures), make_bare(trainer, *trainer.task.prepare(first, 0))
    bare, loop = [], []
    for turn in range(ROUNDS + 1):  # the first is to warm up
        bare.append(count / seconds_of(bare_step, steps if turn else 2 * WARM_UPS))
        for _ in range(5):  # what the readers made meanwhile
            next(batches)
        loop.append(time_loop(trainer, batches, steps if turn else 10))
    batches.close()
    values = {"bare": statistics.median(bare[1:]), "loop": statistics.median(loop[1:])}
    parts = time_parts(trainer, first, steps)
    if parts:
        whole = 1000 * count / values["loop"]
        parts |= {"passes": 1000 * count / values["bare"] - parts["optimiser"]}
        parts |= {"host": max(0.0, whole - sum(parts.values()))}
    ratio = values["loop"] / values["bare"]
    return {**values, "ratio": ratio, "micro_batch": trainer.progress.micro_batch, "milliseconds": parts}


def seconds_of(step: Step, times: int) -> float:
    """Seconds of one of so many steps."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def make_bare(trainer: Trainer, x: Tensor, y: Tensor) -> Step:
    """Nothing but forward, backward and optimiser."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        trainer.optimizer.zero_grad(set_to_none=True)
        totals = trainer.add_gradients(x, y, -(-len(x) // trainer.progress.micro_batch))
        trainer.optimizer.step()
        return totals

    if trainer.recorded is None:
        return lambda: step(x, y)
    recorded = RecordedStep(step, trainer.step_state)
    return lambda: recorded([x, y])


def time_parts(trainer: Trainer, batch: Batch, steps: int) -> dict[str, float]:
    """Milliseconds of augmentation, and of optimiser, clipping and weight average, each recorded on its own."""
    task = trainer.task
    if trainer.recorded is None or task.kept is None or not isinstance(batch.pictures, DrawnPictures):
        return {}
    prepare = RecordedStep(lambda *drawn: task.prepare(replace(batch, pictures=DrawnPictures(*drawn)), 0)[0], tuple)
    update = RecordedStep(lambda _: trainer.update(), trainer.step_state)
    index, rows = batch.pictures.to(trainer.device)
    found = {}
    for name, step in (("augmentation", lambda: prepare([index, rows])), ("optimiser", lambda: update([index]))):
        seconds_of(step, 2 * WARM_UPS)
        found[name] = 1000 * seconds_of(step, steps)
    return found


def time_loop(trainer: Trainer, batches: Generator[tuple[int, Batch]], steps: int) -> float:
    """Pictures per second of the loop as it is, with readers, augmentation, mixing and reports."""
    start, pictures = time.perf_counter(), 0
    for step in range(steps):
        _, batch = next(batches)
        trainer.train_step(step, batch)
        trainer.progress.step = step + 1
        trainer.read_reports(GPU_DELAY if trainer.device.type == "cuda" else 0)
        pictures += len(batch.pictures)
    trainer.read_reports()
    return pictures / (time.perf_counter() - start)


if __name__ == "__main__":
    print(f"weft {weft.__version__}, torch {torch.__version__}")
    main()
