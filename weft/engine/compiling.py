"""torch.compile, with a fix for one fault of older versions of torch."""

import importlib
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

FIXED_IN = "2.15"  # the torch that is known not to have the fault


def compile_model(model: nn.Module, **options: Any) -> Any:
    """`torch.compile(model, **options)`."""
    if TorchVersion(torch.__version__) < FIXED_IN:
        with suppress(ImportError):  # a private name, which may move
            add_defaults(importlib.import_module("torch._inductor.codegen.simd"))
    return torch.compile(model, **options)


def add_defaults(simd: Any) -> None:
    """Gives the arguments of one of the compiler's exceptions defaults, where it is there and has none.

    The compiler of torch 2.11 raises it without its arguments, and so fails, in the training of CeiT and CvT on a GPU,
    instead of trying something else as it meant to.
    """
    init = getattr(getattr(simd, "CantSplit", None), "__init__", None)
    code = getattr(init, "__code__", None)
    if init is not None and code is not None and code.co_argcount == 3 and not init.__defaults__:
        init.__defaults__ = (None, None)
