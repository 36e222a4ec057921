"""What `weft train DATA --minutes M` reaches, with nothing else said: the number that users buy.

    python benchmarks/minutes.py imagenette --minutes 2 5 --seeds 3 --out benchmarks/results
    python benchmarks/minutes.py imagenette --minutes 5 -- --model vt_resnet50 --init host:resnet50.safetensors
    python benchmarks/minutes.py cifar --minutes 2 --plain resnet18      # next to a plain loop over this model

Runs the command as anybody would, in a process of its own, and reads what it wrote: the score of the report, what was
chosen, and how long it took from Enter to the end next to what was asked for.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
import yaml
from plain_loop import plain_row

from weft.files import write_text
from weft.report.run import processor

SCORES = ("top1", "map", "miou", "mask_ap", "box_ap")
CHOSEN = ("model.name", "model.args", "augment.img_size", "run.batch", "optim.lr", "augment.policy")


def main() -> None:
    own, _, options = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="what `weft train` takes")
    parser.add_argument("--minutes", type=float, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plain", default="", metavar="MODEL", help="timm's, which a plain loop trains as long")
    parser.add_argument("--plain-batch", type=int, default=64)
    parser.add_argument("--out", type=Path, help="folder for a JSON file")
    args = parser.parse_args(own.split())
    rows = []
    for minutes, seed in itertools.product(args.minutes, range(args.seeds)):
        rows.append(train(args.data, minutes, seed, options.split()))
        if args.plain:
            size = rows[-1]["chosen"]["augment.img_size"]
            plain = plain_row(args.data, minutes, args.plain, size, args.plain_batch, seed)
            rows[-1]["plain"] = plain
            print(
                f"{'':16}a plain loop over {args.plain}: {plain['value']:.4f}  {plain['epochs']:g} epochs", flush=True
            )
    if args.out:
        device = (
            torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else f"{processor()}, {torch.get_num_threads()} threads"
        )
        facts = dict(device=device, torch=torch.__version__, date=date.today().isoformat(), data=args.data)
        name = f"minutes-{Path(args.data).name.replace(':', '-')}-{facts['date']}.json"
        write_text(args.out / name, json.dumps({**facts, "options": options, "rows": rows}, indent=1) + "\n")


def train(data: str, minutes: float, seed: int, options: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "weft", "train", data, "--minutes", f"{minutes:g}", "--seed", str(seed)]
        begin = time.monotonic()
        subprocess.run([*command, "--out", str(run), *options], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - begin
        result = json.loads((run / "evaluation.json").read_text())
        config = yaml.safe_load((run / "config.yaml").read_text())
        epochs = [row for line in (run / "metrics.jsonl").open() if (row := json.loads(line))["kind"] == "epoch"]
    score = next(name for name in SCORES if name in result)
    chosen = {key: config[key.split(".")[0]][key.split(".")[1]] for key in CHOSEN}
    row = dict(minutes=minutes, seed=seed, score=score, value=result[score], n=result["n"], seconds=round(seconds, 1))
    print(
        f"{minutes:5g} min  seed {seed}  {score} {result[score]:.4f}  {len(epochs):4d} epochs"
        f"  {seconds:7.1f} s, {seconds / 60 / minutes:.1%} of what was asked  {chosen['model.name']}"
        f" at {chosen['augment.img_size']}",
        flush=True,
    )
    return {**row, "epochs": len(epochs), "chosen": chosen}


if __name__ == "__main__":
    main()
