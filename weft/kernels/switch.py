"""Whether the Triton kernels are used."""

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from weft.errors import WeftError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST_GPU = (8, 0)  # compute capability: bfloat16 in the matrix units
OLDEST_TRITON = (3, 6)  # the oldest that they were tried with

WORDS = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}


def parse_switch(word: str) -> bool:
    """The value of the environment's WEFT_KERNELS, on or off, as a bool."""
    if word.lower() not in WORDS:
        raise WeftError(f"WEFT_KERNELS={word!r} is neither on nor off.")
    return WORDS[word.lower()]


_on = parse_switch(os.environ.get("WEFT_KERNELS") or "on")


def kernels_are_on() -> bool:
    return _on


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """Kernels on or off inside a `with`; WEFT_KERNELS=off turns them off for good."""
    global _on
    before, _on = _on, on
    try:
        yield
    finally:
        _on = before


@cache
def has_triton() -> bool:
    """Whether a Triton is installed that can run the kernels. Nothing is imported where there is none."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        import triton

        major, minor = re.findall(r"\d+", triton.__version__)[:2]  # of 3.6rc1, too
    except Exception:  # a Triton for another machine fails in many ways, and each means: without
        return False
    return (int(major), int(minor)) >= OLDEST_TRITON


@cache
def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _gpu_is_new_enough(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= OLDEST_GPU


def runs_on(device: torch.device) -> bool:
    """Whether kernels may be launched on a device, where nothing forbids it at the moment: see `usable`."""
    if device.type != "cuda" or not (_on and has_triton() and torch.cuda.is_available()):
        return False
    return _gpu_is_new_enough(device.index or 0)


def usable(x: Tensor) -> bool:
    """Whether kernels may be launched on `x`: switched on, a type they know, a GPU and a Triton they run on.

    Never in an exported program, which must load where there is no Weft, nor in torch.fx or torch.func.
    """
    return isinstance(x, Tensor) and not is_transformed() and _usable(x)


def is_transformed() -> bool:
    """Whether torch.func is at work, which takes no gradients that are written by hand."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def _usable(x: Tensor) -> bool:
    if not (_on and x.is_cuda and x.dtype in DTYPES) or torch.jit.is_tracing():
        return False
    return _machine_can(x.device.index or 0)


@torch.compiler.assume_constant_result  # asked, not compiled: the compiler of torch 2.11 takes itself for an export
def _machine_can(index: int) -> bool:
    return not torch.compiler.is_exporting() and has_triton() and _gpu_is_new_enough(index)


def amp_dtype(x: Tensor) -> torch.dtype:
    """The type that a convolution would compute `x` in: autocast's, where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
