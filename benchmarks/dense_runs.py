"""Segmentation and detection on real pictures: trains each row with `weft train`, tests it, writes a table.

    python benchmarks/dense_runs.py camvid ROOT --init resnet50_v1.safetensors --out benchmarks/results
    python benchmarks/dense_runs.py nuclei demo:nuclei --out benchmarks/results
    python benchmarks/dense_runs.py coco-mini instances_train2017.json --init resnet50_v1.safetensors

The last one trains without augmentation and tests on the training pictures: it shows that targets, anchors and losses
are right, and nothing else.

Rows run several at a time (`--together`), each in a process of its own, so their training speeds are not comparable;
`dense_speed.py` measures speed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from weft.report.run import processor


@dataclass(frozen=True)
class Row:
    model: str
    head: str
    recipe: str
    init: bool = False  # from the weights of --init
    settings: tuple[str, ...] = field(default=())


OVERFIT = (  # no augmentation, and the training pictures validate
    *("--augment.crop", "resize", "--augment.flip", "0", "--augment.photometric", "0", "--data.leaks", "ignore"),
    *("--img-size", "448", "--batch", "8", "--optim.lr_batch", "0", "--optim.lr", "2e-4", "--optim.weight_decay", "0"),
)
ROWS = {
    "camvid": [
        Row("resnet50_v1", "fpn", "camvid", init=True),
        Row("resnet50_v1", "vt-fpn", "camvid", init=True),
        Row("resnet50_v1", "upernet", "camvid", init=True),
        Row("cetnet_tiny", "fpn", "segment"),
        Row("cvt_13", "vt-fpn", "segment"),
        Row("ceit_tiny", "fpn", "segment"),
    ],
    "nuclei": [
        Row("cetnet_nano", "mask-rcnn", "detect"),
        Row("cetnet_tiny", "mask-rcnn", "detect"),
    ],
    "coco-mini": [
        Row("resnet50_v1", "mask-rcnn", "detect", init=True, settings=OVERFIT),
        Row("cetnet_tiny", "mask-rcnn", "detect", settings=OVERFIT),
    ],
}
SCORES = ("miou", "pixel_accuracy", "box_ap", "box_ap50", "mask_ap", "mask_ap50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=ROWS)
    parser.add_argument("data")
    parser.add_argument("--init", help="weights for the rows that start from some")
    parser.add_argument("--only", nargs="*", default=[], help="MODEL/HEAD of the rows to run; by default all")
    parser.add_argument("--minutes", type=float, default=0, help="a time budget for each row; by default --epochs")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--together", type=int, default=3)
    parser.add_argument("--split", default="", help="of the test: val, test; by default what `weft eval` takes")
    parser.add_argument("--set", dest="settings", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [row for row in ROWS[args.set] if not args.only or f"{row.model}/{row.head}" in args.only]
    with ThreadPoolExecutor(args.together) as pool:
        results = list(pool.map(lambda row: train_and_test(row, args), rows))
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
        facts = {
            "set": args.set,
            "minutes": args.minutes,
            "epochs": args.epochs,
            "together": args.together,
            "settings": args.settings,
        }
        facts |= {"device": device, "torch": torch.__version__, "date": date.today().isoformat()}
        name = f"dense_runs-{args.set}-{date.today().isoformat()}.json"
        (args.out / name).write_text(json.dumps({**facts, "rows": results}, indent=2) + "\n")


def train_and_test(row: Row, args: argparse.Namespace) -> dict:
    folder = args.runs / f"{args.set}-{row.model}-{row.head}"
    settings = [*row.settings, *(f"--{setting}" for setting in args.settings)]
    workers = max(1, (len(os.sched_getaffinity(0)) - 1) // args.together)
    options = ["--model", row.model, "--head", row.head, "--recipe", row.recipe]
    options += ["--minutes", str(args.minutes)] if args.minutes else ["--epochs", str(args.epochs)]
    options += ["--init", args.init] if row.init else []
    options += ["--val", args.data] if "--data.leaks" in row.settings else []
    start = time.perf_counter()
    weft("train", args.data, *options, "--out", str(folder), "--data.workers", str(workers), *settings)
    seconds = time.perf_counter() - start
    tested = json.loads(weft("eval", str(folder), "--json", *(["--split", args.split] if args.split else [])))
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = max((line["epoch"] for line in history if line["kind"] == "epoch"), default=0)
    result = {"model": row.model, "head": row.head, "init": row.init, "epochs": epochs, "seconds": round(seconds)}
    result |= {key: tested[key] for key in SCORES if tested.get(key) is not None}
    result |= {"n": tested["n"], "pictures": tested["pictures"], "per_class": tested["per_class"]}
    shown = "  ".join(f"{key} {result[key]:.3f}" for key in SCORES if key in result)
    print(f"{row.model:12} {row.head:10} {shown}  {epochs} epochs  {seconds:.0f} s", flush=True)
    return result


def weft(*arguments: str) -> str:
    """Runs the command; its output, or an end to everything with what it said."""
    done = subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"weft {' '.join(arguments)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
        done.check_returncode()
    return done.stdout


if __name__ == "__main__":
    main()
