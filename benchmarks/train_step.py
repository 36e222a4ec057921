"""Does the loop keep the device busy? Pictures per second of whole training, readers and all, against the bare step.

    python benchmarks/train_step.py DATA [--model cvt_13] [--recipe cvt-imagenet] [--batch 256] [--steps 100]

The bare step is forward, backward and optimiser on one batch that lies on the device, augmented, mixed and ready. Both
are measured in turns in one run; medians. On a GPU the goal is a ratio of 0.95.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Generator
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft.config import Config, override
from weft.data.loader import Batch
from weft.engine.device import World, pick_device
from weft.engine.fit_machine import find_micro_batch
from weft.engine.loop import GPU_DELAY, Trainer
from weft.run.choose import choose_preprocessing, fill
from weft.run.data import open_data
from weft.run.recipes import find_recipe
from weft.run.session import RunSession

ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", nargs="+", default=["cvt_13"])
    parser.add_argument("--recipe", default="cvt-imagenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--img-size", type=int, default=0)
    parser.add_argument("--workers", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for model in args.model:
        settings = {"model.name": model, "run.batch": args.batch, "data.source": args.data, "run.compile": args.compile}
        settings |= {"augment.img_size": args.img_size, "data.workers": args.workers, "model.init": ""}
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(Path(folder), override(Config(), {**find_recipe(args.recipe), **settings}))
            rows.append({"model": model, **measure(trainer, args.steps)})
        row = rows[-1]
        print(
            f"{model:14} bare step {row['bare']:8,.0f}  loop {row['loop']:8,.0f} pictures/s  ratio {row['ratio']:.3f}"
        )
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        facts = {"device": device, "torch": torch.__version__, "date": date.today().isoformat(), **vars(args)}
        text = json.dumps({**facts, "rows": rows}, indent=2, default=str)
        (args.out / f"train_step-{date.today().isoformat()}.json").write_text(text + "\n")


def make_trainer(folder: Path, config: Config) -> Trainer:
    world = World(pick_device(config.run.device))
    data = open_data(config, world, lambda line: None)
    config, _ = fill(config, {"augment.crop"}, data.report, len(data.split.train), world.device)
    preprocessing = choose_preprocessing(config, data.report, data.source, data.split.train)
    (folder / "state").mkdir()
    trainer = RunSession(folder, config, world, data, preprocessing, quiet=True).trainer
    trainer.progress.total_steps = 10**6
    find_micro_batch(trainer)
    return trainer


def measure(trainer: Trainer, steps: int) -> dict[str, float]:
    """Pictures per second; readers are warm before the clock starts."""
    batches = trainer.batches()
    _, first = next(batches)
    trainer.model.train()
    ready = trainer.task.prepare(first, 0)
    bare, loop = [], []
    for turn in range(ROUNDS + 1):  # the first is to warm up
        bare.append(time_bare(trainer, *ready, steps if turn else 10))
        for _ in range(5):  # what the readers made meanwhile
            next(batches)
        loop.append(time_loop(trainer, batches, steps if turn else 10))
    batches.close()
    values = {"bare": statistics.median(bare[1:]), "loop": statistics.median(loop[1:])}
    return {**values, "ratio": values["loop"] / values["bare"], "micro_batch": trainer.progress.micro_batch}


def time_bare(trainer: Trainer, x: Tensor, y: Tensor, steps: int) -> float:
    """Pictures per second of nothing but forward, backward and optimiser."""
    start = time.perf_counter()
    for _ in range(steps):
        trainer.optimizer.zero_grad()
        with torch.autocast(x.device.type, trainer.run.dtype, enabled=trainer.run.dtype != torch.float32):
            logits = trainer.forward(x)
        F.cross_entropy(logits.float(), y).backward()
        trainer.optimizer.step()
    if x.is_cuda:
        torch.cuda.synchronize()
    return steps * len(x) / (time.perf_counter() - start)


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
