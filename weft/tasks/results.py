"""The folder that `weft predict --out` makes: files named after the pictures, overlays, predictions.json."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from weft.data.given import GivenPictures
from weft.data.preprocessing import Preprocessing
from weft.documents import to_json
from weft.errors import check_writable
from weft.files import write_atomic, write_text
from weft.report.overlay import read_visible

LONGEST = 200  # bytes of a file's name, so that endings fit in


class ResultFolder:
    """A new folder for what was predicted about pictures."""

    def __init__(self, folder: Path, found: GivenPictures, preprocessing: Preprocessing):
        check_writable(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.found, self.preprocessing = folder, found, preprocessing
        self.names = file_names(found.names)

    def file(self, index: int, ending: str) -> Path:
        return self.folder / f"{self.names[index]}{ending}"

    def picture(self, index: int) -> np.ndarray:
        """(H, W, 1 or 3) uint8: the picture at its own size, to be painted over."""
        return read_visible(self.found.open(index), self.preprocessing)

    def write_overlay(self, index: int, painted: np.ndarray) -> None:
        from PIL import Image

        image = Image.fromarray(painted)
        write_atomic(self.file(index, ".overlay.jpg"), lambda path: image.save(path, "JPEG", quality=92))

    def write_json(self, content: Any) -> None:
        write_text(self.folder / "predictions.json", to_json(content, indent=1) + "\n")


def file_names(names: Sequence[str]) -> list[str]:
    """A name without ending for each picture, all different, also where capitals do not count.

    Equal ones get the folders before them, then the ending, and at last a number.
    """
    paths = [PurePath(name) for name in names]
    depth = max((len(path.parts) for path in paths), default=1)
    stages = [lambda path, n=n: "_".join([*path.parts[-1 - n : -1], path.stem]) for n in range(depth)]
    chosen: dict[int, str] = {}
    for stage in [*stages, lambda path: f"{path.stem}_{path.suffix[1:]}"]:
        wanted = {i: _short(stage(path)) for i, path in enumerate(paths) if i not in chosen}
        seen = Counter(name.casefold() for name in [*wanted.values(), *chosen.values()])
        chosen |= {i: name for i, name in wanted.items() if seen[name.casefold()] == 1}
    taken = {name.casefold() for name in chosen.values()}
    for i in sorted(set(range(len(paths))) - chosen.keys()):
        tries = (f"{_short(paths[i].stem)}_{n}" for n in range(1, len(paths) + 1))
        chosen[i] = next(name for name in tries if name.casefold() not in taken)
        taken.add(chosen[i].casefold())
    return [chosen[i] for i in range(len(paths))]


def _short(name: str) -> str:
    return name.replace("/", "").replace("\\", "").encode()[-LONGEST:].decode(errors="ignore") or "picture"
