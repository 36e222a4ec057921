"""The result of a training: its folder and its metrics."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A finished or stopped run."""

    folder: Path
    metrics: dict[str, Any]  # of the pictures that it reports on, as `weft eval` gives them; empty where stopped
    stopped: bool = False
    interrupted: bool = False  # stopped by Ctrl-C

    def load(self) -> Any:
        """The trained model, ready for `.predict`."""
        from weft.run.predictor import load

        return load(self.folder)
