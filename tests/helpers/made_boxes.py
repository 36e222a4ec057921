"""Data sets with a few boxes, for tests."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.helpers.places import DATA
from weft.data.boxes.coco import open_coco

SPLIT = ["train", "val"]
SQUARE = [1, 1, 5, 1, 5, 5, 1, 5]


def pictures(root: Path, *paths: str, size: tuple[int, int] = (20, 10)) -> Path:
    """Grey pictures of (width, height)."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size).save(root / path)
    return root


def thing(number: int, box: list, image: int = 1, category: int = 1, **more) -> dict:
    return {"id": number, "image_id": image, "category_id": category, "bbox": box, **more}


def coco(file: Path, *objects: dict, images: int = 1, categories: dict[int, str] | None = None) -> Path:
    """A JSON file with pictures 1.png, 2.png, ... of 20 x 10 pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "info": {"about": [1, {"images": []}]},
        "images": [{"id": i, "file_name": f"{i}.png", "width": 20, "height": 10} for i in range(1, images + 1)],
        "annotations": list(objects),
        "categories": [{"id": i, "name": name} for i, name in (categories or {1: "cat"}).items()],
    }
    file.write_text(json.dumps(content, indent=1))
    return file


def one(root: Path, *objects: dict, **more):
    """A set of one file beside its pictures."""
    pictures(root, *(f"{i}.png" for i in range(1, more.get("images", 1) + 1)))
    return open_coco(str(coco(root / "boxes.json", *objects, **more)))


def unpacked(tmp_path: Path, name: str, only: str = "*.zip") -> Path:
    """A real set from its zips, or skips."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; WEFT_DATA names the folder that holds {name}")
    for file in folder.glob(only):
        with zipfile.ZipFile(file) as packed:
            packed.extractall(tmp_path)
    for file in folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


def voc_xml(*objects: str, size: str = "<size><width>20</width><height>10</height></size>") -> str:
    return f"<annotation><filename>x.png</filename>{size}{''.join(objects)}</annotation>"


def voc_object(name: str, xmin, ymin, xmax, ymax, more: str = "") -> str:
    corners = zip(("xmin", "ymin", "xmax", "ymax"), (xmin, ymin, xmax, ymax), strict=True)
    box = "".join(f"<{side}>{value}</{side}>" for side, value in corners)
    part = "<part><name>head</name><bndbox><xmin>9</xmin></bndbox></part>"
    return f"<object><name>{name}</name>{more}{part}<bndbox>{box}</bndbox></object>"


def block(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    mask = np.zeros((10, 20), bool)
    mask[top:bottom, left:right] = True
    return mask
