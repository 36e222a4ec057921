"""The sum at the end of a block, x + keep y, of a map and its class token: one pass over memory.

A branch gives back tokens, (B, [1 +] H*W, C) with the class token first, or a map and a class token.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from weft.kernels.op import define
from weft.kernels.switch import usable


def plain_add_branch(
    x: Tensor, cls: Optional[Tensor], y: Tensor, y_cls: Optional[Tensor], keep: Optional[Tensor]
) -> tuple[Tensor, Optional[Tensor]]:
    """The twin of `add_branch`."""
    y_map = y
    if cls is not None and y_cls is None:
        y_map, y_cls = y[:, 1:], y[:, :1]
    y_map = y_map.reshape(x.shape)
    if keep is not None:
        y_map = y_map * keep.to(y.dtype).view(-1, 1, 1, 1)
        y_cls = y_cls * keep.to(y.dtype).view(-1, 1, 1) if y_cls is not None else None
    return x + y_map, cls + y_cls if cls is not None and y_cls is not None else None


# The operators; what is not there comes out as an empty tensor ----------------------------------------------------


def _sums(x: Tensor, cls: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(0 if cls is None else cls.shape, dtype=dtype)


def _plain(
    x: Tensor, cls: Tensor | None, y: Tensor, y_cls: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    sums = _sums(x, cls, y)
    for room, value in zip(sums, plain_add_branch(x, cls, y, y_cls, keep), strict=True):
        if value is not None:
            room.copy_(value)
    return sums


def _launch(
    x: Tensor, cls: Tensor | None, y: Tensor, y_cls: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import residual

    sums = _sums(x, cls, y)
    if x.numel():
        cls, y_cls = (None if value is None else value.contiguous() for value in (cls, y_cls))
        residual.add(x.contiguous(), cls, y.contiguous(), y_cls, keep, *sums)
    return sums


def _gradients(
    grad: Tensor, grad_cls: Tensor | None, keep: Tensor | None, dtype: torch.dtype, joined: bool
) -> tuple[Tensor, Tensor]:
    batch, height, width, channels = grad.shape
    has_cls = grad_cls is not None
    shape = (batch, height * width + int(has_cls), channels) if joined else grad.shape
    cls_shape = (batch, 1, channels) if has_cls and not joined else 0
    return grad.new_empty(shape, dtype=dtype), grad.new_empty(cls_shape, dtype=dtype)


def _plain_backward(
    grad: Tensor, grad_cls: Tensor | None, keep: Tensor | None, dtype: torch.dtype, joined: bool
) -> tuple[Tensor, Tensor]:
    rooms = _gradients(grad, grad_cls, keep, dtype, joined)
    if keep is not None:
        grad = grad * keep.view(-1, 1, 1, 1)
        grad_cls = None if grad_cls is None else grad_cls * keep.view(-1, 1, 1)
    if joined:
        tokens = grad.flatten(1, 2)
        rooms[0].copy_(tokens if grad_cls is None else torch.cat([grad_cls, tokens], dim=1))
    else:
        rooms[0].copy_(grad)
        if grad_cls is not None:
            rooms[1].copy_(grad_cls)
    return rooms


def _launch_backward(
    grad: Tensor, grad_cls: Tensor | None, keep: Tensor | None, dtype: torch.dtype, joined: bool
) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import residual

    rooms = _gradients(grad, grad_cls, keep, dtype, joined)
    if grad.numel():
        grad_cls = None if grad_cls is None else grad_cls.contiguous()
        residual.branch_gradient(grad.contiguous(), grad_cls, keep, *rooms)
    return rooms


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, cls, y, y_cls, keep = inputs
    ctx.set_materialize_grads(False)
    ctx.has_cls, ctx.has_y_cls, ctx.joined = cls is not None, y_cls is not None, y.dim() == 3
    ctx.x_dtype, ctx.y_dtype, ctx.shape = x.dtype, y.dtype, x.shape
    ctx.save_for_backward(keep)


def _backward(ctx: Any, grad: Tensor | None, grad_cls: Tensor | None) -> tuple[Tensor | None, ...]:
    (keep,) = ctx.saved_tensors
    if grad is None and (grad_cls is None or not ctx.has_cls):
        return None, None, None, None, None
    some = grad if grad is not None else grad_cls
    assert some is not None
    grad = some.new_zeros(ctx.shape) if grad is None else grad
    if ctx.has_cls and grad_cls is None:
        grad_cls = grad.new_zeros(ctx.shape[0], 1, ctx.shape[3])
    grad_cls = grad_cls if ctx.has_cls else None
    grad_x, grad_x_cls = grad.to(ctx.x_dtype), None if grad_cls is None else grad_cls.to(ctx.x_dtype)
    if keep is None and grad.dtype == ctx.y_dtype and (grad_cls is None or not ctx.joined):
        grad_y = grad.flatten(1, 2) if ctx.joined else grad
        return grad_x, grad_x_cls, grad_y, grad_cls if ctx.has_y_cls else None, None
    grad_y, grad_y_cls = add_branch_backward(grad, grad_cls, keep, ctx.y_dtype, ctx.joined)
    return grad_x, grad_x_cls, grad_y, grad_y_cls if ctx.has_y_cls else None, None


add_branch_backward = define(
    "add_branch_backward(Tensor grad, Tensor? grad_cls, Tensor? keep, ScalarType dtype, bool joined)"
    " -> (Tensor, Tensor)",
    _plain_backward,
    _launch_backward,
    _gradients,
)
add_branch_forward = define(
    "add_branch(Tensor x, Tensor? cls, Tensor y, Tensor? y_cls, Tensor? keep) -> (Tensor, Tensor)",
    _plain,
    _launch,
    lambda x, cls, y, y_cls, keep: _sums(x, cls, y),
    _setup,
    _backward,
)


def add_branch(
    x: Tensor, cls: Optional[Tensor], y: Tensor, y_cls: Optional[Tensor], keep: Optional[Tensor]
) -> tuple[Tensor, Optional[Tensor]]:
    """x + keep y for a branch that gives tokens `y`, or a map `y` and a class token `y_cls`.

    `keep`, None or (B,), are the factors of stochastic depth.
    """
    if torch.jit.is_scripting():
        return plain_add_branch(x, cls, y, y_cls, keep)
    else:  # not compiled by TorchScript
        # Compilers fuse it with what stands around it, which an operator of its own would prevent.
        if torch.compiler.is_compiling() or not usable(x):
            return plain_add_branch(x, cls, y, y_cls, keep)
        total, total_cls = add_branch_forward(x, cls, y, y_cls, keep)
        return total, None if cls is None else total_cls
