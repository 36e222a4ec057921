"""Runs that take a second: a folder of made-up pictures, settings for a very small model, processes to be killed."""

import io
import json
import multiprocessing
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import weft
from weft.cli.app import main
from weft.engine.lock import STATE
from weft.engine.state import RunProgress, write_state

CVT = dict(embed_dims=[8, 16, 16], depths=[1, 1, 1], num_heads=[1, 2, 2])
TINY: dict[str, Any] = dict(
    recipe="quick",
    model="cvt_nano",
    model__args=CVT,
    img_size=16,
    batch=8,
    epochs=3,
    minutes=0,
    data__workers=0,
    device="cpu",
    quiet=True,
)
EVERYTHING_RANDOM = dict(
    augment__crop="random-resized",
    augment__policy="rand-m9-mstd0.5-inc1",
    augment__mixup=0.8,
    augment__cutmix=1.0,
    augment__erase=0.25,
    augment__repeats=2,
    model__drop_path=0.2,
    run__ema=0.9,
    run__micro_batch=3,
    loss__smoothing=0.1,
)


def make_pictures(folder: Path, classes: int = 3, each: int = 12, side: int = 16, seed: int = 0) -> Path:
    """Class folders of noise; each class has its own colour, so there is something to learn."""
    rng = np.random.default_rng(seed)
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True)
        colour = np.eye(3)[label % 3] * 120
        for number in range(each):
            pixels = rng.integers(0, 130, (side, side, 3)) + colour
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"class {label}" / f"{number}.png")
    return folder


def tiny_run(data: Path | str, out: Path, **settings: Any) -> weft.Run:
    return weft.train(data, out=out, **{**TINY, **settings})


def state_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "state" / "last.safetensors")


def differences(one: Path, other: Path) -> list[str]:
    """The tensors in which the final states of two runs differ by a single bit, and files of weights likewise."""
    found = []
    for read in (state_of, lambda run: load_file(run / "model.safetensors")):
        a, b = read(one), read(other)
        assert a.keys() == b.keys()
        found += [key for key in a if not torch.equal(a[key], b[key])]
    return found


# The command ---------------------------------------------------------------------------------------------------------


def command(*args: object) -> tuple[int, str, str]:
    """Runs `weft` here; returns exit code, standard output and standard error."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGPIPE)  # which the command sets for its own process
    with mock.patch.object(sys, "argv", ["weft", *map(str, args)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, handler)
    return code, out.getvalue(), err.getvalue()


def refused(answer: tuple[int, str, str], *words: str) -> None:
    """Exit code 2 and one line on standard error with all `words`."""
    code, _, err = answer
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert err.startswith("weft: ")
    assert all(word in err for word in words), err


# In processes of their own ----------------------------------------------------------------------------------------


def processes() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have everything imported, so they start at once; see conftest.py."""
    return multiprocessing.get_context("forkserver")


def start_or_resume(pictures: Path, run: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if (run / STATE).exists():
        weft.train(resume=run, quiet=True)
        return
    tiny_run(pictures, run, **settings)


def save_for_ever(folder: Path, has_saved: Any) -> None:
    for step in range(1_000_000):
        write_state(folder, {"numbers": torch.full((200_000,), float(step))}, RunProgress(step=step), {})
        has_saved.set()


# Masks and boxes ----------------------------------------------------------------------------------------------------


COLOURS = {"red": (230, 40, 40), "green": (40, 200, 60)}
SMALL_HEADS: dict[str, dict[str, Any]] = {
    "fpn": dict(channels=16, head_channels=16),
    "vt-fpn": dict(channels=16, head_channels=16, token_dim=32),
    "upernet": dict(channels=16, aux_channels=8),
    "faster-rcnn": dict(channels=16, box_width=32, proposals=40, roi_samples=32, anchor_sizes=[12, 16, 20, 24, 32]),
}
SMALL_HEADS["mask-rcnn"] = SMALL_HEADS["faster-rcnn"]


def dense(head: str, **settings: Any) -> dict[str, Any]:
    """Settings of a very small model with this head, for pictures of `make_squares`; nothing in them is random."""
    common = dict(TINY, model__drop_path=0.0, recipe="detect" if "rcnn" in head else "segment", img_size=48, head=head)
    common |= dict(model__head_args=SMALL_HEADS[head], run__ema=0.0, lr=3e-3, optim__lr_batch=0, augment__photometric=0)
    common |= dict(augment__crop="resize") if "rcnn" in head else dict(augment__rescale=[1.0, 1.0])
    return common | settings


DENSE_RANDOM = dict(
    augment__crop="random",
    augment__rescale=[0.7, 1.4],
    augment__photometric=1.0,
    augment__vflip=0.5,
    model__drop_path=0.2,
    run__ema=0.9,
    run__micro_batch=3,
)


def draw_squares(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]:
    """A noisy picture with a square of each colour, its mask, and (class, left, top, right, bottom) of the squares."""
    picture, mask, found = rng.integers(0, 60, (side, side, 3)), np.zeros((side, side), np.uint8), []
    for half, label in enumerate(rng.permutation(len(COLOURS)).tolist()):  # one to the left, one to the right
        size = int(rng.integers(side // 3, side // 2))
        left = half * side // 2 + int(rng.integers(0, side // 2 - size))
        top = int(rng.integers(0, side - size))
        inside = slice(top, top + size), slice(left, left + size)
        picture[inside] = picture[inside] // 4 + np.array(list(COLOURS.values())[label]) * 3 // 4
        mask[inside] = label + 1
        found.append((label, left, top, left + size, top + size))
    return picture.astype(np.uint8), mask, found


def make_squares(root: Path, layout: str = "masks", count: int = 12, side: int = 48, seed: int = 0) -> Path:
    """Pictures with coloured squares in a layout that people have: masks, coco, yolo or voc."""
    rng, images, objects = np.random.default_rng(seed), [], []
    folders = {"masks": ("images", "masks"), "yolo": ("images", "labels"), "voc": ("JPEGImages", "Annotations")}
    pictures, answers = (root / folder for folder in folders.get(layout, ("train2017", "annotations")))
    for folder in (pictures, answers):
        folder.mkdir(parents=True)
    for number in range(count):
        picture, mask, found = draw_squares(rng, side)
        Image.fromarray(picture).save(pictures / f"{number}.png")
        images.append({"id": number + 1, "file_name": f"{number}.png", "width": side, "height": side})
        objects += [(number + 1, *square) for square in found]
        if layout == "masks":
            Image.fromarray(mask).save(answers / f"{number}.png")
        elif layout == "yolo":
            rows = [(c, (x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0) for c, x0, y0, x1, y1 in found]
            lines = [" ".join(map(str, (c, *(value / side for value in box)))) for c, *box in rows]
            (answers / f"{number}.txt").write_text("\n".join(lines))
        elif layout == "voc":
            (answers / f"{number}.xml").write_text(_voc(found, side))
    if layout == "yolo":
        (root / "data.yaml").write_text(f"names: [{', '.join(COLOURS)}]")
    if layout == "coco":
        content = {"images": images, "annotations": [_coco(i, *row) for i, row in enumerate(objects)]}
        content["categories"] = [{"id": i, "name": name} for i, name in enumerate(COLOURS, start=1)]
        (answers / "instances_train2017.json").write_text(json.dumps(content))
    return root


def _coco(number: int, image: int, label: int, left: int, top: int, right: int, bottom: int) -> dict[str, Any]:
    box = [left, top, right - left, bottom - top]
    shape = [[left, top, right, top, right, bottom, left, bottom]]
    common = {"id": number + 1, "image_id": image, "category_id": label + 1, "iscrowd": 0}
    return {**common, "bbox": box, "area": box[2] * box[3], "segmentation": shape}


def _voc(found: list[tuple[int, ...]], side: int) -> str:
    """VOC counts pixels from 1, and the last one belongs to the box."""
    names = list(COLOURS)
    boxes = [
        f"<object><name>{names[label]}</name><bndbox><xmin>{left + 1}</xmin><ymin>{top + 1}</ymin>"
        f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for label, left, top, right, bottom in found
    ]
    size = f"<size><width>{side}</width><height>{side}</height></size>"
    return f"<annotation>{size}{''.join(boxes)}</annotation>"
