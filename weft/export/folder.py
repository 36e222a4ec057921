"""The folder of an export: a new one, or that of an earlier export with the same options, which is replaced."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError, check_writable

FACTS = "model.json"
MADE = {"model.onnx", "model.pt2", "model.safetensors", "config.json", FACTS, "agreement.json", "agreement.html"}


def check_free(folder: Path, run: Path, options: Mapping[str, Any]) -> None:
    """Raises unless `folder` can be made, is empty, or has an export of `run` with these options and nothing else."""
    earlier = _earlier_options(folder, run)
    if earlier is None:
        check_writable(folder)
        return
    if others := sorted(path.name for path in folder.iterdir() if path.name not in MADE):
        raise WeftError(f"{folder} has an export of this run, and {others[0]!r}, which would be lost; choose --out.")
    if differing := [name for name, value in as_written(options).items() if earlier.get(name) != value]:
        what = ", ".join(differing)
        raise WeftError(f"{folder} has an export of this run that differs in {what}; choose --out, or remove it.")


def as_written(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an export as its JSON has them; of settings the words, whether a shell or Python gave them."""
    settings = {key: str(value) for key, value in (options["settings"] or {}).items()}
    return json.loads(json.dumps({**options, "settings": settings}))


def _earlier_options(folder: Path, run: Path) -> dict[str, Any] | None:
    """Options of the export that lies there, if it is of the run's weights; other runs may have the same name."""
    try:
        made = json.loads((folder / FACTS).read_bytes())["provenance"]
        return dict(made["options"]) if made["weights_sha256"] == weights_hash(run) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def weights_hash(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def put(made: Path, folder: Path, run: Path, options: Mapping[str, Any]) -> None:
    """Moves what was made to its place, if that is still free; making it may have taken minutes.

    An earlier export is set aside beside it, and is back where that fails.
    """
    check_free(folder, run, options)
    if not folder.exists():
        made.rename(folder)  # fails where somebody was faster
        return
    folder.rename(aside := made.with_name("earlier"))
    try:
        made.rename(folder)
    except OSError:
        os.rename(aside, folder)
        raise
