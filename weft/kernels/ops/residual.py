"""The sum at the end of a block, x + keep y, of a map and its class token: one pass over memory.

A branch gives back tokens, (B, [1 +] H*W, C) with the class token first, or a map and a class token.
"""

from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.op import define

Pair = tuple[Tensor, Tensor | None]  # a (B, H, W, C) map and, where there is one, a (B, 1, C) class token


def reference_add_branch(x: Tensor, cls: Tensor | None, y: Tensor, y_cls: Tensor | None, keep: Tensor | None) -> Pair:
    """x + keep y; y are tokens, or a map beside the class token `y_cls`."""
    y_map = y
    if cls is not None and y_cls is None:
        y_map, y_cls = y[:, 1:], y[:, :1]
    y_map = y_map.reshape(x.shape)
    if keep is not None:
        y_map = y_map * keep.to(y.dtype).view(-1, 1, 1, 1)
        y_cls = y_cls * keep.to(y.dtype).view(-1, 1, 1) if y_cls is not None else None
    return x + y_map, cls + y_cls if cls is not None and y_cls is not None else None


def _reference_backward(
    grad: Tensor, grad_cls: Tensor | None, keep: Tensor | None, dtype: torch.dtype, joined: bool
) -> Pair:
    """The gradients of y and y_cls; that of tokens if they were `joined`."""
    if keep is not None:
        grad = grad * keep.view(-1, 1, 1, 1)
        grad_cls = None if grad_cls is None else grad_cls * keep.view(-1, 1, 1)
    if joined:
        tokens = grad.flatten(1, 2)
        grad, grad_cls = tokens if grad_cls is None else torch.cat([grad_cls, tokens], dim=1), None
    return grad.to(dtype), None if grad_cls is None else grad_cls.to(dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    x, cls, y, y_cls, keep = inputs
    ctx.set_materialize_grads(False)
    ctx.has_cls, ctx.has_y_cls, ctx.joined = cls is not None, y_cls is not None, y.dim() == 3
    ctx.x_dtype, ctx.y_dtype, ctx.shape = x.dtype, y.dtype, x.shape
    ctx.save_for_backward(keep)


def _backward(ctx: Any, grad: Tensor | None, grad_cls: Tensor | None) -> tuple[Tensor | None, ...]:
    (keep,) = ctx.saved_tensors
    some = grad if grad is not None else grad_cls
    assert some is not None
    grad = some.new_zeros(ctx.shape) if grad is None else grad
    if ctx.has_cls and grad_cls is None:
        grad_cls = grad.new_zeros(ctx.shape[0], 1, ctx.shape[3])
    grad_x, grad_x_cls = grad.to(ctx.x_dtype), None if grad_cls is None else grad_cls.to(ctx.x_dtype)
    if keep is None and grad.dtype == ctx.y_dtype and (grad_cls is None or not ctx.joined):
        grad_y = grad.flatten(1, 2) if ctx.joined else grad
        return grad_x, grad_x_cls, grad_y, grad_cls if ctx.has_y_cls else None, None
    return grad_x, grad_x_cls, *add_branch_backward.run(grad, grad_cls, keep, ctx.y_dtype, ctx.joined), None


add_branch_backward = define("add_branch_backward", _reference_backward, "residual.branch_gradient")
add_branch_forward = define("add_branch", reference_add_branch, "residual.add", setup=_setup, backward=_backward)
