"""Exported files on a CPU next to the models in torch, and next to timm's ResNet-50 and DeiT-S exported the same way.

    python benchmarks/export_speed.py PICTURES [--models cvt_13 resnet50] [--runs RUN ...] [--out benchmarks/results]

Each takes one decoded picture and gives probabilities: torch with Weft's preprocessing and the plain model, the file
with what it has inside. Every round times all of them in turn, the table has medians. Models by name have random
weights, which take the same time. `--runs` adds trained ones, with their metric before and after, of which eight bits
take something.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch

import weft
from weft.config import Config
from weft.data.given import GivenPictures
from weft.data.read import decode
from weft.errors import WeftError
from weft.export.classify import ClassifyForm
from weft.export.graph import OnnxFile, write_onnx
from weft.export.quantise import quantise
from weft.report.run import processor
from weft.run.predictor import Predictor, timms_preprocessing
from weft.tasks.registry import make_task
from weft.tasks.task import TaskFacts

MODELS = ["ceit_tiny", "vitae_tiny", "vt_resnet18", "cvt_13", "cetnet_tiny", "resnet50", "deit_small_patch16_224"]
CALIBRATION = 16  # pictures
PAUSE, IN_A_ROW = 0.2, 3  # seconds before the calls of one in a round, and their number
KINDS = ("torch", "fused", "onnx", "int8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", help="a folder of photographs")
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--runs", nargs="*", default=[], help="trained runs, for what eight bits lose")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--files", type=Path, help="folder where exported files stay, and are taken from the next time")
    parser.add_argument("--out", type=Path, help="folder for a JSON file with the numbers")
    args = parser.parse_args()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    found = GivenPictures(args.pictures)
    some = [
        decode(found.open(i), channels=3) for i in range(0, len(found.files), max(1, len(found.files) // CALIBRATION))
    ]
    result: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine(), "picture": some[0].shape[:2]}
    with tempfile.TemporaryDirectory() as folder:
        calls = {name: prepare(name, some, args.files or Path(folder)) for name in args.models}
        result["milliseconds"] = timed(calls, some[0], args.rounds)
        result["runs"] = {Path(run).name: points(run, Path(folder)) for run in args.runs}
    print(f"\none picture of {some[0].shape[0]} x {some[0].shape[1]}, milliseconds, medians of {args.rounds} rounds")
    print(f"{'':26}" + "".join(f"{kind:>8}" for kind in KINDS) + "   torch/onnx  onnx/int8")
    for name, row in result["milliseconds"].items():
        cells = "".join(f"{row[kind]:8.1f}" for kind in KINDS)
        print(f"{name:26}{cells}{row['torch'] / row['onnx']:10.2f} x{row['onnx'] / row['int8']:9.2f} x")
    for name, row in result["runs"].items():
        print(name, json.dumps(row))
    if args.out:
        path = args.out / f"export_speed-{result['date']}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nWrote {path}")


def prepare(name: str, pictures: list[np.ndarray], folder: Path) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """The ways to an answer, of which all but the last must agree."""
    torch.manual_seed(0)  # the weights of a file that is there already
    model = timm.create_model(name).eval()
    facts = TaskFacts([str(i) for i in range(1000)], timms_preprocessing(model), torch.device("cpu"))
    predictor = Predictor(model, make_task("classify", Config(), facts))
    form, file, small = ClassifyForm(predictor).eval(), folder / f"{name}.onnx", folder / f"{name}.int8.onnx"
    if not file.exists():
        write_onnx(form, file, None, {"weft": weft.__version__})
    if not small.exists():
        quantise(file, small, [picture[None] for picture in pictures])

    def by_torch(used: Predictor) -> Callable[[np.ndarray], np.ndarray]:
        return lambda picture: used.infer(used.preprocessing.picture(picture)[None]).softmax(1).numpy()

    def by_file(path: Path) -> Callable[[np.ndarray], np.ndarray]:
        session = OnnxFile(path, [*form.outputs])
        return lambda picture: session(picture[None])["probabilities"]

    calls = {"torch": by_torch(predictor), "fused": by_torch(Predictor(weft.fuse(model), predictor.task))}
    calls |= {"onnx": by_file(file), "int8": by_file(small)}
    answers = {kind: call(pictures[0]) for kind, call in calls.items()}
    for kind in KINDS[1:3]:
        assert np.abs(answers[kind] - answers["torch"]).max() < 1e-3, (name, kind)
    print(f"{name}: exported, agrees", flush=True)
    return calls


def timed(calls: dict[str, dict[str, Callable[..., Any]]], picture: np.ndarray, rounds: int) -> dict[str, Any]:
    """Medians of the calls of all rounds.

    Threads of onnxruntime and of OpenMP wait for their next work without rest, for a moment: whoever comes right after
    them has a core less. So each has its calls in a row, behind a pause and one call that does not count.
    """
    taken = {(name, kind): [] for name, kinds in calls.items() for kind in kinds}
    for _ in range(rounds):
        for (name, kind), times in taken.items():
            time.sleep(PAUSE)
            calls[name][kind](picture)
            for _ in range(IN_A_ROW):
                start = time.perf_counter()
                calls[name][kind](picture)
                times.append(1000 * (time.perf_counter() - start))
    return {n: {k: round(statistics.median(taken[n, k]), 2) for k in kinds} for n, kinds in calls.items()}


def points(run: str, folder: Path) -> dict[str, Any]:
    """A trained run in 32 and in eight bits: its metric, and what a picture takes."""
    rows: dict[str, Any] = {}
    for kind, int8 in (("onnx", False), ("int8", True)):
        try:
            found = weft.export(run, folder / f"{Path(run).name}-{kind}", int8=int8, pictures=1000, limit=100).agreement
        except WeftError as error:
            rows[kind] = str(error)
            continue
        rows[kind] = {found.metric: [found.before, found.after], "milliseconds": found.latency, "bytes": found.bytes}
    return rows


def machine() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "timm": timm.__version__, "onnxruntime": onnxruntime.__version__}
    busy = round(os.getloadavg()[0], 1)  # others that compute at the same time slow torch down more than the files
    return {
        "cpu": processor(),
        "load": busy,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    main()
