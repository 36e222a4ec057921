"""The folder of an export: a new one, or that of an earlier export of the same weights, which is replaced."""

import hashlib
import json
import os
from pathlib import Path

from weft.errors import WeftError, check_writable

FACTS = "model.json"
MADE = {"model.onnx", "model.pt2", "model.safetensors", "config.json", FACTS, "agreement.json", "agreement.html"}


def check_free(folder: Path, run: Path) -> None:
    """Raises unless `folder` can be made, is empty, or holds an export of `run` and nothing else."""
    if not is_export_of(folder, run):
        check_writable(folder)
        return
    if others := sorted(path.name for path in folder.iterdir() if path.name not in MADE):
        raise WeftError(f"{folder} has an export of this run, and {others[0]!r}, which would be lost; choose --out.")


def is_export_of(folder: Path, run: Path) -> bool:
    """Whether an export of the weights that the run has now lies there; other runs may have the same name."""
    try:
        facts = json.loads((folder / FACTS).read_bytes())
        return "weft" in facts and facts["provenance"]["weights_sha256"] == weights_hash(run)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def weights_hash(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def put(made: Path, folder: Path) -> None:
    """Moves what was made to its place; an earlier export is set aside beside it, and is back where that fails."""
    if not folder.exists():
        made.rename(folder)
        return
    folder.rename(aside := made.with_name("earlier"))
    try:
        made.rename(folder)
    except OSError:
        os.rename(aside, folder)
        raise
