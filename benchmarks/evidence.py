"""The papers' claims on real pictures: trains what benchmarks/evidence.yaml plans, and keeps what came of it.

    python benchmarks/evidence.py --prepare PACKED --data data     # the sets, out of their mosaics and archives
    python benchmarks/evidence.py --list                           # the plan, with what it costs on a GPU
    python benchmarks/evidence.py E1 E9 --data data --seeds 3 --jobs 6 --minutes 9
    python -m tools.evidence                                       # writes docs/evidence.md

    python benchmarks/evidence.py few --data data --device cpu --jobs 2          # what a CPU can do, too

Names are those of claims or of studies. What a file of results has already from this machine is not trained again, nor
a seed that another machine has of all rows, and of what checks compare them with: rows are compared on one machine
alone. A cell that was stopped goes on from its last state, where --work is still there. Results are written after each
cell, and failures, into a file of the call in --out; files from other machines lie beside it, as evidence-*.json of any
name. Cells that share a GPU are faster with `nvidia-cuda-mps-control -d` started before.
"""

import argparse
import json
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime
from functools import cache
from itertools import groupby
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from evidence_design import WEIGHTS, Design, Place, Study, read_design
from real_runs import make_shards

from weft.catalog.measured import measured
from weft.config import Config, override, read_yaml
from weft.documents import read_json
from weft.engine.device import pick_device
from weft.engine.lock import locked
from weft.engine.state import versions
from weft.files import write_text
from weft.report.run import processor
from weft.report.text import SCORES, columns
from weft.study.ablate.costs import Cost, count_cost, count_network
from weft.study.ablate.run import may_start_until
from weft.study.ablate.tables import Network
from weft.study.cells.cell import Cell, Result, cell_folder, read_result
from weft.study.cells.workers import MayStart, run_cells

CALL = datetime.now().strftime("%Y-%m-%d-%H%M%S")
RESULTS = Path(__file__).with_name("results")
START = 6.0  # seconds of a cell beside its steps on a GPU, estimated
STEP = 3e-3  # seconds of a step at least, however small the network: 3.2 and 3.4 of two were measured
FLOPS = 10e12  # a second in training, of the slowest network measured at 32 pixels; for those not measured
ARCHIVES = {  # the sets that come as archives: where each is unpacked
    "imagenette-subset": {"train": "imagenette-subset/train", "val": "imagenette-subset/val"},
    "camvid": {part: f"camvid/{part}" for part in ("train", "val", "test")},
}


class TimeUp(Exception):
    """Ends all trainings; what they were at is on the disk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="claims or studies; by default all, the most telling first")
    parser.add_argument("--list", action="store_true", help="print the plan, train nothing")
    parser.add_argument("--prepare", type=Path, metavar="PACKED", help="make the sets in --data from these")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where the runs go")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=0, help="cells at once; 0: one for each GPU")
    parser.add_argument("--minutes", type=float, default=0, help="end all after so long; 0: when all is done")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--beside", default="", help="what else the machine does meanwhile: its seconds tell nothing then"
    )
    args = parser.parse_args()
    design = read_design()
    rows = [row for folder in {RESULTS, args.out} for row in read_rows(folder)]
    done = finished(design, rows, machine(args.device), args.seeds)
    studies = design.chosen(args.names)
    if args.prepare:
        prepare(args.prepare, args.data, {design.data[study.data].source for study in studies})
    elif args.list:
        print_plan(design, studies, args.seeds, done)
    else:
        run(design, studies, done, args)


# Results ----------------------------------------------------------------------------------------------------------


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files of results, the oldest first."""
    return [row for file in sorted(folder.glob("evidence-*.json")) for row in read_json(file)["rows"]]


def store(folder: Path, row: dict[str, Any]) -> None:
    """Adds a row to the file of its call, whose name no other machine's has."""
    file = folder / f"evidence-{row['call']}.json"
    rows = read_json(file)["rows"] if file.exists() else []
    content = {"what": "benchmarks/evidence.py: a row for each training", "rows": [*rows, row]}
    write_text(file, json.dumps(content, indent=1) + "\n")


def machine(device: str) -> str:
    """What a training is on: seeds are compared where this is the same."""
    first = pick_device(device)
    return torch.cuda.get_device_name(first) if first.type == "cuda" else f"CPU, {processor()}"


def finished(design: Design, rows: Iterable[Mapping[str, Any]], machine: str, seeds: int) -> set[Place]:
    """What is not to be trained here: what has a result from here, and what one machine has with all beside it."""
    trained: dict[str, set[str]] = {machine: set()}
    for row in rows:
        if "error" not in row:
            trained.setdefault(row["device"], set()).add(row["key"])
    keys = {place: key for key, places in design.places_by_key(seeds).items() for place in places}
    wanting: set[Place] = set()  # whose comparison no machine has whole
    for places in design.comparisons(seeds):
        if not any(found >= {keys[place] for place in places} for found in trained.values()):
            wanting |= {*places}
    return {place for place, key in keys.items() if place not in wanting or key in trained[machine]}


def identify(design: Design, place: Place, args: argparse.Namespace) -> dict[str, Any]:
    """What each row begins with: which training, where, with what and when."""
    today = {"versions": versions(), "date": date.today().isoformat(), "call": CALL}
    today |= {"beside": args.beside} if args.beside else {}
    return {"key": design.key(place), **vars(place), "device": machine(args.device), **today}


def describe(design: Design, place: Place, result: Result, run: Path, jobs: int) -> dict[str, Any]:
    """What is kept of a training."""
    last, score = result.curve[-1], f"val_{score_name(result)}"
    parameters, macs = costs(design, place, run)
    return {
        **{"score": score_name(result), "value": result.score},
        **{"parameters": parameters, "macs": macs, "steps": last["step"], "epochs": result.cell.settings["run.epochs"]},
        "curve": [[row["step"], row[score]] for row in result.curve if row.get(score) is not None],
        "seconds": round(max(result.seconds, last["seconds"]), 1),  # the latter of all calls, where it was stopped
        **{"pictures_per_second": result.speed, "memory": result.memory, "jobs": jobs},
    }


def score_name(result: Result) -> str:
    return next(name for name in SCORES if result.metrics.get(name) is not None)


def costs(design: Design, place: Place, run: Path) -> tuple[int, int]:
    """Parameters and MACs of the network that the run made of the cell."""
    config = override(Config(), read_yaml(run / "config.yaml"))
    dense = config.model.head not in ("auto", "linear", "")
    head: dict[str, Any] = dict(head=config.model.head, head_args=config.model.head_args) if dense else {}
    classes = design.data[design.studies[place.study].data].classes
    return count_network(
        Network(config.model.name, config.model.args, **head), config.augment.img_size, classes, config.data.channels
    )


# Training ---------------------------------------------------------------------------------------------------------


def run(design: Design, studies: Sequence[Study], done: set[Place], args: argparse.Namespace) -> None:
    """Trains what has no result yet, in the order of the plan, until all is done or the time is up."""
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        with locked(args.work):
            for places in waves(design, studies, done, args):
                alone = design.studies[places[0].study].alone
                run_wave(design, places, 1 if alone else args.jobs, end, args)
    except TimeUp:
        print("The time is up; the same command goes on.", flush=True)
    except KeyboardInterrupt:
        sys.exit("Stopped; the same command goes on.")


def waves(
    design: Design, studies: Sequence[Study], done: set[Place], args: argparse.Namespace
) -> Iterator[list[Place]]:
    """Groups of cells that may run beside each other, none twice; weights come before what begins with them."""
    trained: set[str] = set()
    for (_, _), group in groupby(studies, key=lambda study: (study.alone, study.init)):
        places = [place for study in group for place in study.places(args.seeds) if place not in done]
        sources = dict.fromkeys(design.source(place) for place in places if design.studies[place.study].init)
        missing = [place for place in sources if not has_weights(design, place, args)]
        for wave in (missing, places):
            cells = {design.key(place): place for place in reversed(wave)}  # the first of equal ones
            yield from filter(None, [[place for key, place in reversed(cells.items()) if key not in trained]])
            trained |= cells.keys()


def on_machine(design: Design, place: Place, args: argparse.Namespace) -> Cell:
    return design.resolved(place, args.data, args.work, pick_device(args.device).type == "cuda")


def has_weights(design: Design, place: Place, args: argparse.Namespace) -> bool:
    return (cell_folder(args.work, on_machine(design, place, args)) / "run" / WEIGHTS).exists()


def run_wave(design: Design, places: Sequence[Place], jobs: int, end: float, args: argparse.Namespace) -> None:
    """Trains cells beside each other and stores each that is over, or why it failed."""
    cells = {place: on_machine(design, place, args) for place in places}
    stored: set[Place] = set()

    def keep(place: Place, error: str = "") -> None:
        result = None if error or place in stored else read_result(args.work, cells[place])
        text = f"{place.study} / {place.row} / {place.part:g}, seed {place.seed}"
        if result is not None:
            row = describe(design, place, result, cell_folder(args.work, cells[place]) / "run", jobs)
            text = f"{text:60} {row['score']} {row['value']:7.2%}  {row['seconds']:6.0f} s"
        elif error and place not in stored:
            row, text = {"error": error}, f"{text}: {error}"
        else:
            return
        stored.add(place)
        store(args.out, identify(design, place, args) | row)
        print(text, flush=True)

    def watch(states: dict[str, str]) -> None:
        for place, cell in cells.items():
            if states[cell.key] == "done":
                keep(place)
            elif states[cell.key].startswith("failed: "):
                keep(place, states[cell.key].removeprefix("failed: "))
        if time.monotonic() > end:
            raise TimeUp

    try:
        run_cells(args.work, list(cells.values()), jobs=jobs, device=args.device, watch=watch, may_start=until(end))
    finally:
        for place in places:  # those that ended while others were stopped
            keep(place)


def until(end: float) -> MayStart:
    """Whether a cell is over by `end`, as far as its row's earlier seeds tell; none begins after it."""
    in_time = may_start_until(end)

    def may_start(cell: Cell, done: Sequence[Result]) -> bool:
        return time.monotonic() < end and in_time(cell, done)

    return may_start


# The plan ---------------------------------------------------------------------------------------------------------


def print_plan(design: Design, studies: Sequence[Study], seeds: int, done: set[Place]) -> None:
    """A line for each study: cells, and estimated minutes of one GPU if nothing shared it."""
    rows, total, counted = [["study", "claims", "cells", "done", "GPU minutes", "what"]], 0.0, set[str]()
    for study in studies:
        places = list(study.places(seeds))
        over = sum(place in done for place in places)
        new = {design.key(place): place for place in places if place not in done}
        minutes = sum(estimate(design, place) for key, place in new.items() if key not in counted) / 60
        counted |= new.keys()
        total += minutes
        parts = ", ".join(f"{part:.0%}" for part in study.lengths)
        what = f"{len(study.trained)} rows of {study.table}, {study.data} at {study.img_size}: {parts}"
        what += ", alone" if study.alone else ""
        rows.append([study.name, " ".join(study.claims), str(len(places)), str(over), f"{minutes:.1f}", what])
    for line in columns(rows, right=(2, 3, 4)):
        print(line)
    print(f"In all {total:.0f} minutes of an H200 with one cell at a time: estimated from measured speeds and MACs.")


def estimate(design: Design, place: Place) -> float:
    """Seconds of a cell on a GPU of its own."""
    study, cell = design.studies[place.study], design.studies[place.study].cell(place)
    data = design.data[study.data]
    seen = cell.settings["run.epochs"] * cell.settings["data.fraction"] * data.pictures
    return START + seen / speed(cell, study.img_size, data.classes)


def speed(cell: Cell, img_size: int, classes: int) -> float:
    """Training pictures a second on an H200: measured for this model, in proportion to MACs; or what they suggest."""
    fastest = cell.settings["run.batch"] / STEP
    cost = count_once(as_text(Network(cell.model, cell.switches)), img_size, classes)
    if cost is None:
        return float("nan")
    for row in measured():
        if (row.model, row.size) == (cell.model, img_size) and "cuda" in row.speed:
            usual = count_once(as_text(Network(row.model, row.args)), img_size, classes)
            return min(fastest, row.speed["cuda"] * (usual or cost).macs / cost.macs)
    return min(fastest, FLOPS / (6e9 * cost.macs))


@cache
def count_once(network: str, img_size: int, classes: int) -> Cost | None:
    return count_cost(Network(**json.loads(network)), img_size, classes)


def as_text(network: Network) -> str:
    return json.dumps(
        {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(network).items()}
    )


# The sets ---------------------------------------------------------------------------------------------------------


def prepare(packed: Path, data: Path, wanted: set[str]) -> None:
    """Makes shards of CIFAR-10's mosaics and folders of the archives, where they are not there yet."""
    data.mkdir(parents=True, exist_ok=True)
    if "cifar10" in wanted and not (data / "cifar10").exists():
        make_shards(packed / "cifar10", data / "cifar10")
    for name, parts in ARCHIVES.items():
        for archive, folder in parts.items():
            if any(source.endswith(name) for source in wanted) and not (data / folder).exists():
                with zipfile.ZipFile(packed / name / f"{archive}.zip") as file:
                    file.extractall(data / folder)
    weights = packed / "resnet50-imagenet" / "resnet50_v1_fp16.safetensors"
    if "camvid:camvid" in wanted and not (data / weights.name).exists():
        copyfile(weights, data / weights.name)


if __name__ == "__main__":
    main()
