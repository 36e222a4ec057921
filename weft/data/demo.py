"""The pictures that come with the package."""

import json
from importlib.resources import as_file, files
from typing import Literal

import numpy as np
from PIL import Image

TILE = 28


def fashion_mnist(split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """An excerpt of Fashion-MNIST: (N, 28, 28) uint8 pictures, (N,) labels, and the ten class names."""
    folder = files("weft.data") / "fashion-mnist-mini"
    labels = json.loads((folder / "labels.json").read_text())
    with as_file(folder / f"{split}.webp") as path, Image.open(path) as image:
        mosaic = np.asarray(image.convert("L"))
    return _tiles(mosaic, TILE), np.array(labels[split]), labels["classes"]


def nuclei() -> tuple[np.ndarray, np.ndarray]:
    """Cell nuclei: (16, 256, 256) uint8 pictures, and masks with 0 for the background and 1, 2, ... for the nuclei."""
    folder = files("weft.data") / "nuclei-mini"
    mosaics = []
    for name in ("pictures.webp", "nuclei.png"):
        with as_file(folder / name) as path, Image.open(path) as image:
            mosaics.append(_tiles(np.asarray(image.convert("L")), 256))
    return mosaics[0], mosaics[1]


def _tiles(mosaic: np.ndarray, side: int) -> np.ndarray:
    """The square pictures of a mosaic, row by row."""
    rows, columns = mosaic.shape[0] // side, mosaic.shape[1] // side
    return mosaic.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side, side)
