"""torch.compile, where one fault of an older torch is mended."""

from typing import Any

import torch
from torch import nn


def compile_model(model: nn.Module, **options: Any) -> Any:
    """`torch.compile(model, **options)`.

    The compiler of torch 2.11 raises an exception of its own without the arguments that it has, and so fails, in the
    training of CeiT and CvT on a GPU, instead of trying something else as it meant to.
    """
    from torch._inductor.codegen import simd

    if not simd.CantSplit.__init__.__defaults__:
        simd.CantSplit.__init__.__defaults__ = (None, None)  # pyright: ignore[reportFunctionMemberAccess]
    return torch.compile(model, **options)
