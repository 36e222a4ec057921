"""Launching kernels quickly: in eager mode a model launches hundreds, and the GPU should not wait for Python."""

from typing import Any

import torch
from torch import Tensor

from weft.kernels.switch import interpreted

MOST = 10_000  # kernels that are remembered; more mean that sizes differ at every call

_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
    """`kernel[grid](*args, **options)` that asks Triton only once what to run for the same types and numbers."""
    if interpreted():
        kernel[grid](*args, **options)
        return
    key: list[Any] = [id(kernel), torch.cuda.current_device(), *options.values()]
    for value in args:
        if isinstance(value, Tensor):
            key.append(value.dtype)
            key.append(value.data_ptr() & 15)  # Triton compiles another kernel for what is not aligned
        else:
            key.append(value)
    found = _compiled.get(tuple(key))
    if found is None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[tuple(key)] = kernel[grid](*args, **options)
    else:
        found[(*grid, 1, 1)](*args)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels and takes microseconds."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
