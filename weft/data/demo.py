"""The pictures that come with the package."""

import hashlib
import json
from functools import cache
from importlib.resources import as_file, files
from typing import Literal

import numpy as np
from PIL import Image

from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import area_of, extent
from weft.data.sources.source import Names, Pixels, Source
from weft.errors import WeftError, did_you_mean

FASHION, NUCLEI = "fashion-mnist-mini", "nuclei-mini"  # folders


def fashion_mnist(split: Literal["train", "test"]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """An excerpt of Fashion-MNIST: (N, 28, 28) uint8 pictures, (N,) labels, and the ten class names."""
    labels = json.loads((files("weft.data") / FASHION / "labels.json").read_text())
    return _tiles(FASHION, f"{split}.webp", 28), np.array(labels[split]), labels["classes"]


def nuclei(split: Literal["train", "val"]) -> tuple[np.ndarray, np.ndarray]:
    """Cell nuclei: (N, 256, 256) uint8 pictures, and masks with 0 for the background and 1, 2, ... for the nuclei."""
    return _tiles(NUCLEI, f"{split}.webp", 256), _tiles(NUCLEI, f"{split}-nuclei.webp", 256)


def open_demo(name: str) -> Source:
    """`demo:NAME`, where pictures have labels."""
    if name == "nuclei":
        raise WeftError("demo:nuclei has masks and objects, but no labels; demo:fashion has labels.")
    if name != "fashion":
        hint = did_you_mean(name, ["fashion", "nuclei"])
        raise WeftError(f"demo:{name} does not exist; there are demo:fashion and demo:nuclei.{hint}")
    train, train_labels, classes = fashion_mnist("train")
    test, test_labels, _ = fashion_mnist("test")
    sizes = [len(train), len(test)]
    return Source(
        root="demo:fashion",
        layout="an excerpt of Fashion-MNIST that comes with Weft",
        classes=classes,
        names=Names(f"{split}/{i}" for split, n in zip(("train", "val"), sizes, strict=True) for i in range(n)),
        labels=np.concatenate([train_labels, test_labels]).astype(np.int64),
        reader=Pixels(np.concatenate([train, test])),
        splits=np.repeat(["train", "val"], sizes),
    )


def open_nuclei(task: Literal["segment", "detect"] = "segment") -> Source:
    """`demo:nuclei`, to tell nuclei from the background or one nucleus from the other."""
    train, val = nuclei("train"), nuclei("val")
    sizes = [len(train[0]), len(val[0])]
    pictures, instances = (np.concatenate(both) for both in zip(train, val, strict=True))
    as_masks = task == "segment"
    return Source(
        root="demo:nuclei",
        layout="cell nuclei of the Data Science Bowl 2018 that come with Weft",
        classes=["background", "nucleus"] if as_masks else ["nucleus"],
        names=Names(f"{split}/{i}" for split, n in zip(("train", "val"), sizes, strict=True) for i in range(n)),
        labels=np.zeros(len(pictures), np.int64) if as_masks else (instances.max(axis=(1, 2)) > 0)[:, None],
        reader=Pixels(pictures),
        splits=np.repeat(["train", "val"], sizes),
        multilabel=not as_masks,
        task=task,
        targets=NucleusMasks(instances) if as_masks else NucleusObjects(instances),
    )


class NucleusMaps:
    """Maps (N, H, W) of the nuclei's numbers, 0 where there is none."""

    def __init__(self, instances: np.ndarray) -> None:
        self.instances = instances

    def sizes(self, positions: range) -> bytes:
        chosen = self.instances[positions.start : positions.stop : positions.step]
        return hashlib.blake2b(chosen.tobytes(), digest_size=16).digest()


class NucleusMasks(NucleusMaps):
    """Reads masks, 1 where a nucleus is."""

    def __call__(self, index: int) -> np.ndarray:
        return (self.instances[index] > 0).astype(np.uint8)


class NucleusObjects(NucleusMaps):
    """Reads objects, one for each nucleus."""

    has_shapes = True

    def __call__(self, index: int) -> Objects:
        return _objects(self.instances[index])


def _objects(numbers: np.ndarray) -> Objects:
    """From a map (H, W) of the nuclei's numbers."""
    flat = numbers.T.ravel()  # down one column after the other
    edges = np.concatenate([[0], np.flatnonzero(flat[1:] != flat[:-1]) + 1, [flat.size]])
    runs, number = np.stack([edges[:-1], edges[1:]], axis=1), flat[edges[:-1]]  # (runs, 2) from, to; and whose it is
    shapes = []
    for nucleus in range(1, int(numbers.max()) + 1):
        counts = np.diff(runs[number == nucleus].ravel(), prepend=0, append=flat.size)
        shapes.append({"size": list(numbers.shape), "counts": counts.tolist()})
    return Objects(
        boxes=np.array([extent(shape) for shape in shapes], np.float32).reshape(-1, 4),
        labels=np.zeros(len(shapes), np.int64),
        crowd=np.zeros(len(shapes), bool),
        area=np.array([area_of(shape) for shape in shapes], np.float32),
        shapes=shapes,
        size=(numbers.shape[0], numbers.shape[1]),
    )


def _tiles(folder: str, name: str, side: int) -> np.ndarray:
    """The square grey pictures of a mosaic, row by row: (N, side, side) uint8."""
    mosaic = _mosaic(folder, name)
    rows, columns = mosaic.shape[0] // side, mosaic.shape[1] // side
    return mosaic.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side, side)  # a copy


@cache
def _mosaic(folder: str, name: str) -> np.ndarray:
    with as_file(files("weft.data") / folder / name) as path, Image.open(path) as image:
        return np.asarray(image.convert("L"))
