"""Pictures with a few masks, for tests."""

from pathlib import Path

import numpy as np
from PIL import Image

INDEX = np.array([[0, 1, 1, 2, 0], [0, 1, 2, 2, 255], [0, 0, 2, 1, 1]], np.uint8)  # (3, 5)


def picture(path: Path, size: tuple[int, int] = (5, 3), **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "teal").save(path, **options)


def mask(path: Path, values: np.ndarray = INDEX, palette: list[int] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if palette is not None:
        image = Image.fromarray(values, "L").convert("P")
        image = Image.frombytes("P", image.size, values.tobytes())
        image.putpalette(palette)
    image.save(path)


def tree(root: Path, *pairs: str, values: np.ndarray = INDEX) -> Path:
    """Each pair is "images/a.jpg masks/a.png"."""
    for pair in pairs:
        first, second = pair.split()
        picture(root / first)
        mask(root / second, values)
    return root
