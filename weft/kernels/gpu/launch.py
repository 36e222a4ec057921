"""Launching kernels quickly: in eager mode a model launches hundreds, and the GPU should not wait for Python."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from weft.kernels.switch import interpreted

MOST = 10_000  # kernels that are remembered; more mean that sizes differ at every call

_compiled: dict[tuple[Any, ...], Any] = {}
# Whether this thread's kernels are compiled and not launched, see `weft.kernels.ahead`.
rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
_device, _stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
    """`kernel[grid](*args, **options)` that asks Triton only once what to run for the same types and numbers."""
    if interpreted():
        kernel[grid](*args, **options)
        return
    device = _device()
    key = (
        id(kernel),
        device,
        *options.values(),
        # Triton compiles another kernel for tensors that are not aligned, and for some numbers.
        *[(value.dtype, value.data_ptr() & 15) if isinstance(value, Tensor) else value for value in args],
    )
    found = _compiled.get(key)
    if rehearsing.get():
        if found is None:
            kernel.warmup(*args, grid=grid, **options)
    elif found is None:
        if len(_compiled) >= MOST:
            _compiled.clear()
        found = _compiled[key] = kernel[grid](*args, **options)
        found.run  # noqa: B018  loads it
    else:
        x, y, z = (*grid, 1, 1)[:3]
        found.run(x, y, z, _stream(device), found.function, found.packed_metadata, None, None, None, *args)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels and takes microseconds."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
