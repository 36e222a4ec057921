"""Runs that take a second: a folder of made-up pictures, settings for a very small model, processes to be killed."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import weft
from weft.engine.state import STATE, Progress, write_state

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


# In processes of their own ----------------------------------------------------------------------------------------


def processes() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have everything imported, so they start at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.small_runs", "weft.engine.session", "timm", "torch.distributed.fsdp", "pytest"]
    )
    return context


def start_or_resume(pictures: Path, run: Path, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if (run / STATE).exists():
        weft.train(resume=run, quiet=True)
        return
    tiny_run(pictures, run, **settings)


def save_for_ever(folder: Path) -> None:
    for step in range(1_000_000):
        write_state(folder, {"numbers": torch.full((200_000,), float(step))}, Progress(step=step), {})
