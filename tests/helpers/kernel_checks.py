"""Comparing kernels with their references: the kernel in the type at hand, the reference in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.fast.tape.tape import run_as_one_node
from weft.kernels.ops.op import Operation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# |kernel - reference| <= tolerance * largest |reference|: a few roundings of the type
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def by(operation: Operation, *rest: Any) -> Callable[..., Any]:
    """`operation(*tensors, *rest)` as a function of the tensors, of which some may be None; its gradient by a tape."""
    return lambda *tensors: run_as_one_node(lambda t, *values: t(operation, *values, *rest), *tensors)


def as_list(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else [value for value in values if value is not None]


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    assert found.isfinite().all(), f"{what} is not finite"
    error = (found.double() - wanted.double()).abs().max().item() if found.numel() else 0.0
    scale = max(wanted.abs().max().item(), 1e-3) if wanted.numel() else 1.0
    assert error <= tolerance * scale, f"{what} is off by {error:.2e} at values up to {scale:.2e}"


def _wide(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    return [None if t is None else t.detach().double() if t.is_floating_point() else t for t in tensors]


def check_values(
    kernel: Callable[..., Any], reference: Callable[..., Any], *tensors: Tensor | None, factor: float = 1.0
) -> None:
    """`kernel(*tensors)` equals `reference` of the same numbers in float64, up to `factor` roundings of its type."""
    first = next(t for t in tensors if t is not None)
    wanted = as_list(reference(*_wide(tensors)))
    for i, (found, right) in enumerate(zip(as_list(kernel(*tensors)), wanted, strict=True)):
        close(found, right, factor * TOLERANCE[first.dtype], f"output {i}")


def check_gradients(
    kernel: Callable[..., Any], reference: Callable[..., Any], *tensors: Tensor | None, factor: float = 2.0
) -> None:
    """The gradients of all floating-point `tensors`, for random gradients of all outputs, equal the reference's."""
    first = next(t for t in tensors if t is not None)
    given = [None if t is None else t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    wide = [None if t is None else t.requires_grad_(t.is_floating_point()) for t in _wide(tensors)]
    outputs, wanted = as_list(kernel(*given)), as_list(reference(*wide))
    upstream = [random(*out.shape, dtype=out.dtype, seed=i + 1) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, upstream)
    torch.autograd.backward(wanted, [grad.to(out.dtype) for grad, out in zip(upstream, wanted, strict=True)])
    for i, (found, right) in enumerate(zip(given, wide, strict=True)):
        if found is not None and right is not None and found.is_floating_point():
            assert found.grad is not None, f"no gradient of input {i}"
            assert right.grad is not None, f"the reference has no gradient of input {i}"
            close(found.grad, right.grad, factor * TOLERANCE[first.dtype], f"gradient of input {i}")
