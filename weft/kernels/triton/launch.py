"""Launching kernels quickly: in eager mode a model launches hundreds, and the GPU should not wait for Python."""

from contextvars import ContextVar
from typing import Any

import torch
import triton.language as tl

from weft.kernels.switch import interpreted

MOST_KERNELS = 10_000  # kernels that are remembered; more mean that sizes differ at every call

SCALARS = frozenset((int, bool, float, type(None), tl.dtype))  # and what else is no tensor

_compiled: dict[tuple[Any, ...], Any] = {}
# In a thread whose kernels are compiled and not launched, see `weft.kernels.tuning.ahead`: those that it had so far.
dry_run_keys: ContextVar[dict[tuple[Any, ...], Any] | None] = ContextVar("dry_run_keys", default=None)
_device, _stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: int) -> None:
    """`kernel[grid](*args, **options)` that asks Triton only once what to run for the same types and numbers."""
    if interpreted():
        kernel[grid](*args, **options)
        return
    device, unaligned, values = _device(), 0, []
    kinds: list[Any] = [id(kernel), device, *options.values()]
    for value in args:
        if type(value) in SCALARS:
            values.append(value)
            kinds.append(value)
        else:
            pointer = value.data_ptr()  # a number, of which the launcher need not ask the driver what it is
            unaligned |= pointer
            values.append(pointer)
            kinds.append(value.dtype)
    if unaligned & 15:  # Triton compiles another kernel for tensors that are not aligned; most are
        kinds += [value.data_ptr() & 15 for value in args if type(value) not in SCALARS]
    key = tuple(kinds)
    found, compiled_ahead = _compiled.get(key), dry_run_keys.get()
    if found is not None and compiled_ahead is None:
        x, y, z = (*grid, 1, 1)[:3]
        found.run(x, y, z, _stream(device), found.function, found.packed_metadata, None, None, None, *values)
    elif compiled_ahead is None:
        if len(_compiled) >= MOST_KERNELS:
            _compiled.clear()
        found = _compiled[key] = kernel[grid](*args, **options)
        found.run  # noqa: B018  loads it
    elif found is None and key not in compiled_ahead:
        compiled_ahead[key] = kernel
        kernel.warmup(*args, grid=grid, **options)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own is made for kernels and takes microseconds."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()
