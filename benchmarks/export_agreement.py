"""Exported files next to their runs: every family, trained for an epoch here, and runs of other tasks.

    python benchmarks/export_agreement.py DATA [--runs RUN ...] [--to onnx torch] [--out benchmarks/results]

The table has what `weft export` reports: the largest difference over all batches and shapes, answers that changed, the
metric before and after.
"""

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import weft

FAMILIES = ["ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_nano", "cetnet_nano"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="pictures with labels")
    parser.add_argument("--runs", nargs="*", default=[], help="runs that are there, of any task")
    parser.add_argument("--to", nargs="+", default=["onnx"])
    parser.add_argument("--pictures", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the reports")
    args = parser.parse_args()
    result: dict[str, Any] = {"date": date.today().isoformat(), "weft": weft.__version__, "reports": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        trained = [
            weft.train(
                args.data, out=folder / name, model=name, recipe="quick", img_size=64, epochs=1, quiet=True
            ).folder
            for name in FAMILIES
        ]
        for run in [*trained, *map(Path, args.runs)]:
            for to in args.to:
                found = weft.export(run, folder / f"{run.name}-{to}", to=to, pictures=args.pictures).agreement
                result["reports"][f"{run.name} {to}"] = found.to_dict()
                largest = max(row.difference.largest for row in found.rows)
                changed, answers = (
                    sum(getattr(row.difference, k) for row in found.rows) for k in ("changed", "answers")
                )
                print(
                    f"{run.name:18} {to:6} largest {largest:.1e}  changed {changed} of {answers:,} {found.counted}"
                    f"  {found.metric} {100 * found.before:.2f} -> {100 * found.after:.2f} %",
                    flush=True,
                )
    if args.out:
        path = args.out / f"export_agreement-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
