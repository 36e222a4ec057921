"""Does the loop keep the device busy? Pictures per second of whole training, readers and all, against the bare step.

    python benchmarks/train_step.py DATA [--model cvt_13] [--recipe cvt-imagenet] [--batch 256] [--steps 100]

The bare step is the same forward, backward, mixing and optimiser on one batch that lies on the device already. Both
are measured in turns in one run; medians. On a GPU the goal is a ratio of 0.95.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

import weft
from weft.config import Config, override
from weft.engine import session
from weft.engine.choose import choose_preprocessing, fill
from weft.engine.device import join_world
from weft.engine.fit_machine import find_micro_batch
from weft.engine.loop import Trainer
from weft.engine.recipes import find_recipe

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
    world = join_world(config.run.device)
    data = session.open_data(config, world, lambda line: None)
    config, _ = fill(config, {"augment.crop"}, data.report, len(data.split.train), world.device)
    preprocessing = choose_preprocessing(config, data.report, data.source, data.split.train)
    (folder / "state").mkdir()
    trainer = session.Sitting(folder, config, world, data, preprocessing, quiet=True).trainer
    trainer.progress.total_steps = 10**6
    find_micro_batch(trainer)
    return trainer


def measure(trainer: Trainer, steps: int) -> dict[str, float]:
    """Pictures per second; readers are warm before the clock starts."""
    batches = trainer.batches()
    _, first = next(batches)
    trainer.model.train()
    for step in range(10):
        trainer.train_step(step, first)
    bare, loop = [], []
    for _ in range(ROUNDS):
        bare.append(timed(trainer, steps, lambda step: (step, first)))
        ready = [next(batches) for _ in range(2)]  # what the readers made while the bare step ran
        waiting = iter(ready)
        loop.append(timed(trainer, steps, lambda step, waiting=waiting: next(waiting, None) or next(batches)))
    batches.close()
    values = {"bare": statistics.median(bare), "loop": statistics.median(loop)}
    return {**values, "ratio": values["loop"] / values["bare"], "micro_batch": trainer.progress.micro_batch}


def timed(trainer: Trainer, steps: int, batch_of) -> float:
    trainer.read_reports()
    start, pictures = time.perf_counter(), 0
    for step in range(steps):
        _, batch = batch_of(step)
        trainer.train_step(step, batch)
        trainer.progress.step = step + 1
        trainer.read_reports(3 if trainer.device.type == "cuda" else 0)
        pictures += len(batch.pictures)
    trainer.read_reports()
    return pictures / (time.perf_counter() - start)


if __name__ == "__main__":
    print(f"weft {weft.__version__}, torch {torch.__version__}")
    main()
