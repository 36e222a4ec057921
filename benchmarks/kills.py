"""Does a run that is killed arrive where one arrives that is not? On this machine, by SIGKILL.

    python benchmarks/kills.py DATA [--kills 3] [--model cvt_nano] [-- --epochs 6 --run.save_minutes 0.05]

The same `weft train` runs to its end twice, to see whether this machine repeats itself, and once with SIGKILLs at
times drawn between --seconds after the first step, each followed by --resume. What is compared is every tensor of the
last state and of the model: how many differ by a bit, and by how much.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weft.engine.log import METRICS, read_rows
from weft.engine.state import read_header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model", nargs="+", default=["cvt_nano"])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs=2, default=(1.0, 4.0))
    parser.add_argument("--out", type=Path)
    given, _, options = " ".join(sys.argv[1:]).partition(" -- ")  # what stands behind -- is for weft train
    args = parser.parse_args(given.split(), argparse.Namespace(options=options.split()))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.model:
            rows.append(compare(Path(folder) / model, args, model))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        facts = {"date": date.today().isoformat(), "device": device, "torch": torch.__version__, **vars(args)}
        text = json.dumps({**facts, "rows": rows}, indent=2, default=str)
        (args.out / f"kills-{date.today().isoformat()}.json").write_text(text + "\n")


def compare(folder: Path, args: Any, model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "weft", "train", args.data, "--model", model, "--run.report", "no", "--quiet"]
    whole, again, killed = (folder / name for name in ("whole", "again", "killed"))
    for run in (whole, again):
        subprocess.run([*command, *args.options, "--out", str(run)], check=True)
    rng, steps = random.Random(0), []
    process = subprocess.Popen([*command, *args.options, "--out", str(killed)])
    for _ in range(args.kills):
        wait_for_step(process, killed, 1 + (steps[-1] if steps else 0))
        time.sleep(rng.uniform(*args.seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps.append(read_header(killed)["progress"].step)
        process = subprocess.Popen([sys.executable, "-m", "weft", "train", "--resume", str(killed), "--quiet"])
    if process.wait():
        raise SystemExit(f"weft train --resume ended with {process.returncode}")
    found = {"model": model, "resumed_at": steps, "steps": read_header(killed)["progress"].step}
    return found | {"killed": differences(whole, killed), "repeated": differences(whole, again)}


def wait_for_step(process: subprocess.Popen[bytes], run: Path, step: int) -> None:
    """Until the log has a step behind `step`, or the run is over."""
    while process.poll() is None:
        if (run / METRICS).exists() and any(row["step"] > step for row in read_rows(run / METRICS)):
            return
        time.sleep(0.05)


def differences(one: Path, other: Path) -> dict[str, Any]:
    """Tensors that are not equal bit by bit, of all; the largest difference, in parts of the largest value."""
    count, different, largest = 0, 0, 0.0
    for file in ("state/last.safetensors", "model.safetensors"):
        a, b = load_file(one / file), load_file(other / file)
        for key in a:
            count += 1
            if not torch.equal(a[key], b[key]):
                different += 1
                off = (a[key].double() - b[key].double()).abs().max() / a[key].double().abs().max().clamp(min=1e-30)
                largest = max(largest, off.item())
    return {"tensors": count, "different": different, "largest": largest}


if __name__ == "__main__":
    main()
