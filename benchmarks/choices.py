"""What models reach after so many pictures, and how fast they train here: the table that `weft train` chooses from.

    python benchmarks/choices.py cifar --kind small --seen 12800 51200
    python benchmarks/choices.py imagenette --kind photo --seen 6400 25600 --models vt_resnet_nano:stem_stride=4@96

Each point is a training of its own, by `weft train` with the recipe auto, ended by its own schedule. The rows go into
weft/catalog/measured.json, next to those that are there; points and speeds that were measured again are replaced.
"""

import argparse
import json
import statistics
import tempfile
from datetime import date
from pathlib import Path

import torch

import weft
from weft.config import split_model
from weft.engine.log import read_rows
from weft.files import write_text

TABLE = Path(weft.__file__).with_name("catalog") / "measured.json"
NANO = ["vt_resnet_nano", "ceit_nano", "vitae_nano", "cvt_nano", "cetnet_nano"]
CANDIDATES = {
    "small": [f"{name}@32" for name in NANO] + ["vt_resnet_nano:stem_stride=2@32"],
    "photo": ["vt_resnet_nano:stem_stride=4@96", "vt_resnet_nano:stem_stride=4@128", "vt_resnet_nano:stem_stride=2@64"]
    + [f"{name}@64" for name in NANO[1:]],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="what `weft train` takes")
    parser.add_argument("--kind", choices=CANDIDATES, required=True)
    parser.add_argument("--seen", type=int, nargs="+", required=True, help="pictures that a training sees")
    parser.add_argument("--models", nargs="+", help="NAME:key=value@SIZE; by default the candidates of the kind")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--name", help="what the table calls the data; by default the folder's name")
    parser.add_argument("--out", type=Path, default=TABLE)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for candidate in args.models or CANDIDATES[args.kind]:
        network, _, size = candidate.rpartition("@")
        model, options = split_model(network)
        points, speeds = [], []
        for seen in sorted(args.seen):
            reached, speed = train(args.data, model, options, int(size), seen, args.batch)
            points.append([seen, round(reached, 4)])
            speeds.append(speed)
            print(f"{candidate:42} {seen:9,} pictures  top-1 {reached:7.2%}  {speed:9,.0f} pictures/s", flush=True)
        row = dict(
            kind=args.kind,
            model=model,
            args=options,
            size=int(size),
            speed={device: round(statistics.median(speeds), 1)},
        )
        store(args.out, {**row, "curve": points, "data": args.name or Path(args.data).name}, device)


def train(data: str, model: str, options: dict, size: int, seen: int, batch: int) -> tuple[float, float]:
    """Top-1 on the validation pictures, and training pictures a second."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {f"model__args__{key}": value for key, value in options.items()}
        run = weft.train(
            data,
            recipe="auto",
            init="scratch",
            model=model,
            img_size=size,
            batch=batch,
            run__steps=-(-seen // batch),
            run__report=False,
            out=Path(folder) / "run",
            quiet=True,
            **settings,
        )
        rows = read_rows(run.folder / "metrics.jsonl")
    speeds = [row["pictures_per_second"] for row in rows if row["kind"] == "step" and row["pictures_per_second"]]
    return [row["val_top1"] for row in rows if "val_top1" in row][-1], statistics.median(speeds)


def store(file: Path, new: dict, device: str) -> None:
    """Puts a row into the table, over what it says of the same model, size and data."""
    table = json.loads(file.read_text()) if file.exists() else {"machines": {}, "rows": []}
    key = ("kind", "model", "args", "size", "data")
    old = next((row for row in table["rows"] if all(row[k] == new[k] for k in key)), None)
    if old is None:
        table["rows"].append(new)
    else:
        old["speed"] |= new["speed"]
        old["curve"] = sorted(map(list, {**dict(map(tuple, old["curve"])), **dict(map(tuple, new["curve"]))}.items()))
    table["machines"][device] = f"{machine(device)}, torch {torch.__version__}, {date.today().isoformat()}"
    write_text(file, json.dumps(table, indent=1) + "\n")


def machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} cores, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    main()
