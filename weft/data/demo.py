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
    rows, columns = mosaic.shape[0] // TILE, mosaic.shape[1] // TILE
    tiles = mosaic.reshape(rows, TILE, columns, TILE).swapaxes(1, 2).reshape(-1, TILE, TILE)
    return tiles, np.array(labels[split]), labels["classes"]
