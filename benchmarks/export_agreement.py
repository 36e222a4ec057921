"""Exported files next to their runs: every family, trained for a moment here on each task's data, and other runs.

    python benchmarks/export_agreement.py PICTURES [--masks DATA] [--boxes DATA] [--runs RUN ...] [--out FOLDER]

The table has what `weft export` reports: the largest difference over all batches and shapes, answers that changed, the
metric before and after. A file that does not agree is no row, but an error.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from datetime import date
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import onnxruntime
import torch

import weft
from weft.export.agreement import Agreement

FAMILIES = ("ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_nano", "cetnet_nano")
COMMON: dict[str, Any] = dict(run__report=False, quiet=True)
CLASSES: dict[str, Any] = dict(COMMON, recipe="quick", img_size=64, epochs=1)
MASKS: dict[str, Any] = dict(COMMON, recipe="segment", img_size=96, epochs=1)
BOXES: dict[str, Any] = dict(COMMON, recipe="detect", img_size=128, epochs=2)
NARROW: dict[str, dict[str, Any]] = {  # heads that a CPU is done with in a moment
    "fpn": dict(channels=32, head_channels=32),
    "vt-fpn": dict(channels=32, head_channels=32),
    "upernet": dict(channels=32, aux_channels=16),
    "mask-rcnn": dict(channels=32, box_width=64, proposals=100),
    "faster-rcnn": dict(channels=32, box_width=64, proposals=100),
}
SEGMENTERS, DETECTORS = ("fpn", "vt-fpn", "upernet"), ("mask-rcnn", "faster-rcnn")  # taken in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="pictures with labels")
    parser.add_argument("--masks", help="pictures with masks")
    parser.add_argument("--boxes", help="pictures with objects")
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--runs", nargs="*", default=[], help="runs that are there, of any task")
    parser.add_argument("--to", nargs="+", default=["onnx"])
    parser.add_argument("--pictures", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the reports")
    args = parser.parse_args()
    result: dict[str, Any] = {"date": date.today().isoformat(), "weft": weft.__version__, "torch": torch.__version__}
    result |= {"onnxruntime": onnxruntime.__version__, "reports": (reports := {})}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for run in chain(trained(args, folder), map(Path, args.runs)):
            for to in args.to:
                found = weft.export(run, folder / f"{run.name}-{to}", to=to, pictures=args.pictures).agreement
                reports[f"{run.name} {to}"] = found.to_dict()
                print(f"{run.name:28} {to:6} {words(found)}", flush=True)
                if args.out:  # what is there already is not lost where a later one fails
                    path = args.out / f"export_agreement-{result['date']}.json"
                    path.write_text(json.dumps(result, indent=1) + "\n")


def trained(args: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """A run of each family on all the data that were given."""
    plans = [(args.data, CLASSES, [""]), (args.masks, MASKS, SEGMENTERS), (args.boxes, BOXES, DETECTORS)]
    for data, settings, heads in plans:
        for model, head in zip(args.families, cycle(heads), strict=False):
            if data:
                own = {**settings, "model": model, **({"head": head, "model__head_args": NARROW[head]} if head else {})}
                yield weft.train(data, out=folder / f"{model} {head}".strip(), **own).folder


def words(found: Agreement) -> str:
    largest = max(row.difference.largest for row in found.rows)
    moved = max(row.difference.moved for row in found.rows)
    changed, answers = (sum(getattr(row.difference, k) for row in found.rows) for k in ("changed", "answers"))
    metric = f"{found.metric} {100 * (found.before or 0):.2f} -> {100 * (found.after or 0):.2f} %"
    return f"largest {largest:.1e}  moved {moved:.3f}  changed {changed} of {answers:,} {found.counted}  {metric}"


if __name__ == "__main__":
    main()
