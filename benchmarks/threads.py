"""Training steps on a CPU while other jobs run or do not: how torch's threads wait for each other.

    python benchmarks/threads.py [--jobs 0 1 2] [--model vt_resnet_nano:stem_stride=2@28] [--out benchmarks/results]

For each number of other jobs, which do nothing but take a core, and each way of waiting a process of its own per round:
the median milliseconds of its steps, of which the table shows the median and the range. Ways go round in turn, so that
a slow moment of the machine hits all of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from weft.cli.app import SPINS

WAYS = {
    "as OpenMP has it": {},
    f"GOMP_SPINCOUNT={SPINS}, as the command": {"GOMP_SPINCOUNT": SPINS},
    "GOMP_SPINCOUNT=300": {"GOMP_SPINCOUNT": "300"},
    "GOMP_SPINCOUNT=30000": {"GOMP_SPINCOUNT": "30000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
BATCH, SECONDS = 50, 3.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vt_resnet_nano:stem_stride=2@28", help="NAME:key=value@SIZE")
    parser.add_argument("--jobs", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for a JSON file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return print(step_milliseconds(args.model))
    rows = [measure(args, jobs) for jobs in args.jobs]
    print(f"{'milliseconds of a step':36}" + "".join(f"{jobs:>15} other jobs" for jobs in args.jobs))
    for way in WAYS:
        print(f"{way:36}" + "".join(f"{_spread(row[way]):>26}" for row in rows))
    if args.out:
        facts = {"date": date.today().isoformat(), "cores": os.cpu_count(), "model": args.model, "batch": BATCH}
        found = {**facts, "milliseconds": dict(zip(map(str, args.jobs), rows, strict=True))}
        (args.out / f"threads-{facts['date']}.json").write_text(json.dumps(found, indent=1) + "\n")


def measure(args: argparse.Namespace, jobs: int) -> dict[str, list[float]]:
    """The rounds of each way, the fastest first."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(jobs)]
    command = [sys.executable, __file__, "--one", "--model", args.model]
    try:
        found = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, settings in WAYS.items():
                told = subprocess.run(command, env={**os.environ, **settings}, stdout=subprocess.PIPE, check=True)
                found[way].append(float(told.stdout))
    finally:
        for other in others:
            other.kill()
    return {way: sorted(round(time, 1) for time in times) for way, times in found.items()}


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times):.1f} ({times[0]:.0f} to {times[-1]:.0f})"


def step_milliseconds(what: str) -> float:
    import timm
    import torch
    import torch.nn.functional as F

    import weft  # noqa: F401  the models
    from weft.config import split_model

    network, _, size = what.rpartition("@")
    name, options = split_model(network)
    model = timm.create_model(name, num_classes=10, img_size=int(size), **options).train()
    x, y = torch.randn(BATCH, 3, int(size), int(size)), torch.randint(0, 10, (BATCH,))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    times = []
    while sum(times) < SECONDS or len(times) < 6:
        begin = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[3:])


if __name__ == "__main__":
    main()
