"""Seconds from Enter to the first training step of `weft train`, and what they went into.

    python benchmarks/start.py [--model cvt_nano] [--pictures 60000] [--out benchmarks/results] [-- OPTIONS OF TRAIN]

Makes a folder of class folders with that many PNGs of 32 x 32 pixels, then runs the command twice in processes of their
own: with an empty cache of kernels, as on a machine that never trained this model, and again. What a run logs of its
own start is told: a phase may go on beside another, as the look at the pictures does while torch is imported, and so
they do not add up. The quick check is measured once more by itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 10
SIDE = 32
TESTED = 6  # one picture of so many is a test picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=60_000)
    parser.add_argument("--model", default="cvt_nano")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="of weft train, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        begin = time.perf_counter()
        make_pictures(root / "pictures", args.pictures)
        print(f"{args.pictures:,} pictures made in {time.perf_counter() - begin:.1f} s", flush=True)
        check = time_check(root / "pictures")
        print("quick check of {looked_at:,} by itself {seconds:.2f} s, on {cores} cores".format(**check), flush=True)
        runs = {name: start(root, name, args) for name in ("first run", "second run")}
    print_table(runs)
    if args.out:
        facts = {"date": date.today().isoformat(), **machine(), "pictures": args.pictures, "model": args.model}
        facts |= {"options": args.options, "check": check, "runs": runs}
        (args.out / f"start-{facts['date']}.json").write_text(json.dumps(facts, indent=2) + "\n")


def make_pictures(folder: Path, pictures: int) -> None:
    parts = [
        (folder / side / f"class {label}", count // CLASSES, seed * CLASSES + label)
        for seed, (side, count) in enumerate(
            {"train": pictures - pictures // TESTED, "test": pictures // TESTED}.items()
        )
        for label in range(CLASSES)
    ]
    with ProcessPoolExecutor() as pool:
        list(pool.map(make_class, *zip(*parts, strict=True)))


def make_class(folder: Path, count: int, seed: int) -> None:
    """Noise of a colour that the class has for itself: no two files are equal, and there is something to learn."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    colour = np.random.default_rng(seed % CLASSES).integers(0, 128, 3)
    for number in range(count):
        pixels = (draw.integers(0, 128, (SIDE, SIDE, 3)) + colour).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:05}.png", compress_level=1)


def time_check(pictures: Path) -> dict[str, float]:
    """Seconds of listing the pictures and of the quick check, in a process that has done nothing else."""
    script = (
        "import sys, time\n"
        "from weft.data.sources.open import open_source\n"
        "from weft.data.check.check import check\n"
        "begin = time.perf_counter()\n"
        "source = open_source(sys.argv[1])\n"
        "listed = time.perf_counter()\n"
        "report = check(source, None, quick=True)\n"
        "print(listed - begin, time.perf_counter() - listed, report.looked_at)\n"
    )
    told = subprocess.run([sys.executable, "-c", script, pictures], check=True, stdout=subprocess.PIPE, text=True)
    listing, seconds, looked_at = told.stdout.split()
    cores = len(os.sched_getaffinity(0))
    return {"listing": float(listing), "seconds": float(seconds), "looked_at": int(looked_at), "cores": cores}


def start(root: Path, name: str, args: argparse.Namespace) -> dict:
    """The row `start` of a run that makes a few steps; nothing of it is validated twice, and no report is written."""
    command = [sys.executable, "-m", "weft", "train", str(root / "pictures"), "--out", str(root / name)]
    command += [
        "--model",
        args.model,
        "--run.steps",
        str(args.steps),
        "--run.report",
        "no",
        "--optim.warmup_epochs",
        "0",
    ]
    command += args.options
    environment = {**os.environ, "TRITON_CACHE_DIR": str(root / "kernels")}
    begin = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    rows = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    (row,) = (row for row in rows if row["kind"] == "start")
    phases = {phase: round(to - since, 3) for phase, (since, to) in row["phases"].items()}
    last = max(to for _, to in row["phases"].values())
    phases = {**phases, "first step": round(row["seconds"] - last, 3)}
    return {"seconds": row["seconds"], "phases": phases, "timeline": row["phases"], "all": time.perf_counter() - begin}


def print_table(runs: dict[str, dict]) -> None:
    print(f"{'':24}" + "".join(f"{name:>12}" for name in runs))
    for phase in next(iter(runs.values()))["phases"]:
        print(f"{phase:24}" + "".join(f"{run['phases'].get(phase, 0.0):12.2f}" for run in runs.values()))
    print(f"{'Enter to first step':24}" + "".join(f"{run['seconds']:12.2f}" for run in runs.values()))


def machine() -> dict[str, str]:
    import torch

    from weft.report.run import processor

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "processor": processor(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
