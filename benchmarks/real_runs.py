"""Every family on real pictures: trains each model with `weft train` for a few minutes and writes a table.

    python benchmarks/real_runs.py DATA --models ceit_nano cvt_nano ... --minutes 2 --out benchmarks/results

DATA is anything `weft train` takes. `--cifar FOLDER` first makes shards of the mosaics of CIFAR-10 in FOLDER.
"""

import argparse
import io
import json
import tarfile
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import weft
from weft.report.run import processor

FAMILIES = ["ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_nano", "cetnet_nano"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--models", nargs="+", default=FAMILIES)
    parser.add_argument("--recipe", default="small-data")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--runs", type=Path, help="where the run folders go; by default nowhere")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.cifar:
        make_shards(args.cifar, Path(args.data))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for model in args.models:
            start = time.perf_counter()
            settings = dict(setting.split("=", 1) for setting in args.set)
            folder = (args.runs or Path(temporary)) / model
            run = weft.train(
                args.data, recipe=args.recipe, model=model, minutes=args.minutes, out=folder, quiet=True, **settings
            )
            rows.append(describe(run, model, time.perf_counter() - start))
            print(
                "{model:16} top-1 {top1:.2%}  top-5 {top5:.2%}  {epochs} epochs  {seconds:.0f} s"
                "  {pictures_per_second:,.0f} pictures/s".format(**rows[-1]),
                flush=True,
            )
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
        facts = {"data": Path(args.data).name, "recipe": args.recipe, "minutes": args.minutes, "settings": args.set}
        facts |= {"device": device, "torch": torch.__version__, "date": date.today().isoformat()}
        name = f"real_runs-{Path(args.data).name}-{date.today().isoformat()}.json"
        (args.out / name).write_text(json.dumps({**facts, "rows": rows}, indent=2) + "\n")


def describe(run: weft.Run, model: str, seconds: float) -> dict:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["pictures_per_second"] for row in rows if row["kind"] == "step" and row["pictures_per_second"]]
    metrics = {key: run.metrics[key] for key in ("n", "top1", "top1_interval", "top5", "loss", "ece")}
    epochs = max(row["epoch"] for row in rows if row["kind"] == "epoch")
    speed = float(np.median(speeds)) if speeds else 0.0
    return {"model": model, **metrics, "epochs": epochs, "seconds": seconds, "pictures_per_second": speed}


def make_shards(mosaics: Path, folder: Path) -> None:
    """CIFAR-10, kept as mosaics of 100 x 100 pictures and labels.json, as train and val shards of PNG files."""
    labels = json.loads((mosaics / "labels.json").read_text())
    folder.mkdir(parents=True)
    (folder / "classes.txt").write_text("\n".join(labels["classes"]) + "\n")
    parts = {"val-0": ("test.webp", labels["test"])}
    for k in range(len(list(mosaics.glob("train_*.jpg")))):  # of which there are five
        parts[f"train-{k}"] = f"train_{k}.jpg", labels["train"][10_000 * k : 10_000 * (k + 1)]
    for shard, (file, classes) in parts.items():
        mosaic = np.asarray(Image.open(mosaics / file).convert("RGB"))
        tiles = mosaic.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number, (tile, label) in enumerate(zip(tiles, classes, strict=True)):
                encoded = io.BytesIO()
                Image.fromarray(tile).save(encoded, "PNG", compress_level=1)
                add(tar, f"{number:05}.png", encoded.getvalue())
                add(tar, f"{number:05}.cls", str(label).encode())


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main()
