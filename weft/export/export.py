"""From a run to a folder that needs neither torch nor Weft: the file, what there is to know about it, and proof.

A file is kept only if it answers as the run does: everything is made under another name, compared, and renamed.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from weft.data.given import Progress
from weft.data.read import BadPicture, decode
from weft.data.sources.source import Source
from weft.documents import to_json
from weft.errors import WeftError, check_choice, check_positive
from weft.export.agreement import Agreement, File, Limits, as_input, cut, measure
from weft.export.classify import ClassifyForm
from weft.export.detect import DetectForm
from weft.export.folder import FACTS, as_written, check_free, put, weights_hash
from weft.export.form import ExportForm
from weft.export.graph import OPSET, OnnxFile, TorchFile, onnx_library, write_onnx, write_torch
from weft.export.page import write_page
from weft.export.quantise import quantise
from weft.export.segment import SegmentForm
from weft.export.weights import WeightsFile, write_weights
from weft.files import errors_name, write_text
from weft.report.overlay import palette
from weft.run.evaluate import find_pictures, in_models_classes
from weft.run.predictor import Predictor, load
from weft.version import __version__

Shape = tuple[int, int, int]  # batch, height and width that are fixed
Format = Literal["onnx", "torch", "safetensors"]
PICTURES = 200  # of the run's own that both are shown
CALIBRATION = 64  # that eight bits are fitted to

FORMS: dict[str, type[ExportForm]] = {"classify": ClassifyForm, "segment": SegmentForm, "detect": DetectForm}


@dataclass(frozen=True)
class Exported:
    """A folder with an exported model, and how well it agrees with the run."""

    folder: Path
    file: Path
    agreement: Agreement


@dataclass(frozen=True)
class _Kind:
    name: str  # of the file
    write: Callable[[ExportForm, Path, Shape | None, dict[str, Any]], None] | None  # None: the run's own weights
    open: Callable[[Path, ExportForm], File]
    least: int = 1  # the shortest side of a picture that it takes


KINDS: dict[str, _Kind] = {
    "onnx": _Kind("model.onnx", write_onnx, lambda path, form: OnnxFile(path, [*form.outputs])),
    "torch": _Kind("model.pt2", write_torch, lambda path, form: TorchFile(path, [*form.outputs]), 33),
    "safetensors": _Kind("model.safetensors", None, WeightsFile),
}


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] = "",
    *,
    to: Format = "onnx",
    int8: bool = False,
    fixed: bool = False,
    size: tuple[int, int] | None = None,
    batch: int = 1,
    data: str = "",
    pictures: int = PICTURES,
    limit: float | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Writes a trained model as a file that answers for itself, and compares its answers with the run's.

    Args:
        run: the folder of a run, or of a model.
        out: the folder to make; by default export-RUN here. An earlier export of the same weights with the same `to`,
            `int8`, `fixed`, `size`, `batch` and `settings` is replaced, and nothing else that lies there.
        to: onnx, torch (a package of torch.export) or safetensors (weights and config.json, for Weft and timm).
        int8: ONNX with products in eight bits.
        fixed: for pictures of one size, and so many at once; else of any size, any number.
        size: with `fixed`, height and width; by default those that most pictures of the run have.
        batch: with `fixed`, how many at once.
        data: pictures to compare with; by default those that the run reports on.
        pictures: how many of them.
        limit: points of the metric, in per cent, that may be lost; by default 0.5, in eight bits 1.
        settings: of how the model is used, such as {"test.score": 0.3}.
        progress: is told how many pictures have been compared, of how many.

    Raises:
        WeftError: among others where the file does not agree; it is not kept.
    """
    run, check = Path(run), {"batch": batch, "pictures": pictures}
    check_choice("to", to, tuple(KINDS))
    check_positive(**check)
    if int8 and to != "onnx":
        raise WeftError("int8 is for ONNX; leave it out, or choose --to onnx.")
    if fixed and to == "safetensors":
        raise WeftError("Weights have no size to fix; leave --fixed out, or choose --to onnx or torch.")
    if to == "onnx":
        onnx_library()
    folder = Path(out) if out else Path(f"export-{run.resolve().name}")
    options = dict(to=to, int8=int8, fixed=fixed, size=size, batch=batch, settings=settings)
    check_free(folder, run, options)
    predictor = load(run, "cpu", settings)
    predictor.task.dtype = torch.float32
    source, indices = _compared(predictor, run, data, pictures)
    form = FORMS[predictor.task.name](predictor).eval()
    shape = (batch, *(size or _usual_size(source, indices, form))) if fixed else None
    kind, limits = KINDS[to], Limits() if limit is None else Limits(points=limit)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with errors_name(folder), tempfile.TemporaryDirectory(dir=folder.parent, prefix=".exporting-") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        facts = describe(form, run, kind.name, shape, options)
        path = made / kind.name
        if kind.write is None:
            write_weights(run, path)
        else:
            kind.write(form, path, shape, facts)
        if int8:
            limits = Limits(largest=1.0, part=1.0, points=1.0 if limit is None else limit)
            _in_eight_bits(path, form, *_calibration(run, data, source, indices), shape)
        file, shown = kind.open(path, form), {"fixed": shape, "least": kind.least}
        found = measure(form, path, file, source, indices, **shown, limits=limits, progress=progress)
        if faults := found.faults():
            raise Disagreement(
                f"{kind.name} does not answer as {run} does, and is not kept: {'; '.join(faults)}.", found
            )
        write_text(made / FACTS, to_json(facts, indent=1) + "\n")
        write_text(made / "agreement.json", to_json(found.to_dict(), indent=1) + "\n")
        write_page(made / "agreement.html", found, facts)
        put(made, folder, run, options)
    return Exported(folder, folder / kind.name, found)


class Disagreement(WeftError):
    """A file that does not answer as the run does."""

    def __init__(self, line: str, agreement: Agreement):
        super().__init__(line)
        self.agreement = agreement


def describe(form: ExportForm, run: Path, name: str, fixed: Shape | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that whoever uses the file must know, ready for JSON."""
    predictor, rules = form.predictor, form.preprocessing.rules
    batch, height, width = fixed or ("batch", "height", "width")
    return {
        "weft": __version__,
        "task": predictor.task.name,
        "file": name,
        "input": {
            "name": "pictures",
            "type": "uint8" if rules.depth == 8 else "float32, from 0 to 1",
            "shape": [batch, height, width, rules.channels],
            "channels": {1: "grey", 3: "red, green, blue"}.get(rules.channels, "as in training"),
        },
        "outputs": dict(form.outputs),
        "classes": list(predictor.classes),
        "colours": ["#" + bytes(colour).hex() for colour in palette(predictor.classes).tolist()],
        "several_labels": predictor.multilabel,
        "thresholds": form.thresholds(),
        "preprocessing": rules.to_dict(),
        "provenance": {
            "run": run.resolve().name,
            "weights_sha256": weights_hash(run),
            "architecture": predictor.subject().name,
            "options": as_written(options),
            "exported": date.today().isoformat(),
            "torch": torch.__version__,
            **({"opset": OPSET} if name == KINDS["onnx"].name else {}),
        },
    }


def _compared(predictor: Predictor, run: Path, data: str, most: int) -> tuple[Source, np.ndarray]:
    """Pictures that both are shown, evenly taken from those that the run reports on."""
    if not data and not (run / "split.json").is_file():
        raise WeftError(f"{run} has no data of its own to compare its answers on; say which: --data DATA.")
    source, indices, _ = find_pictures(run, data)
    source, indices, _ = in_models_classes(predictor, source, indices, {})
    chosen = np.unique(np.linspace(0, len(indices) - 1, min(most, len(indices))).round().astype(int))
    return source, indices[chosen]


def _calibration(run: Path, data: str, source: Source, indices: np.ndarray) -> tuple[Source, np.ndarray]:
    """Pictures that eight bits are fitted to: of the run's own those that it trained on, which nobody is judged by."""
    if not data:
        source, indices, _ = find_pictures(run, split="train")
    every = max(1, len(indices) // CALIBRATION)  # those of one class lie side by side
    return source, indices[::every][:CALIBRATION]


def _usual_size(source: Source, indices: np.ndarray, form: ExportForm) -> tuple[int, int]:
    """The height and width that most of the pictures have."""
    sizes = [picture.shape[:2] for picture in _decoded(source, indices, form)]
    return max(set(sizes), key=lambda size: (sizes.count(size), size))


def _decoded(source: Source, indices: np.ndarray, form: ExportForm) -> list[np.ndarray]:
    found = []
    for index in indices.tolist():
        try:
            found.append(decode(source.open(index), channels=form.preprocessing.rules.channels))
        except BadPicture:
            continue
    if not found:
        raise WeftError(f"{source.root}: none of {len(indices)} pictures can be read.")
    return found


def _in_eight_bits(path: Path, form: ExportForm, source: Source, indices: np.ndarray, fixed: Shape | None) -> None:
    """Replaces an ONNX file by one in eight bits."""
    depth, given = form.preprocessing.rules.depth, []
    for picture in _decoded(source, indices, form):
        picture = as_input(cut(picture, fixed[1:]) if fixed else picture, depth)
        given.append(np.ascontiguousarray(np.stack([picture] * (fixed[0] if fixed else 1))))
    whole = path.with_name("whole.onnx")
    path.rename(whole)
    quantise(whole, path, given)
    whole.unlink()
