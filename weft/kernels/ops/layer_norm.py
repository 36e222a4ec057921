"""LayerNorm, together with the residual sum before it and the joining of map and class token behind it, as one pass.

Torch's LayerNorm is several times off the limit of the memory and, under autocast, works in float32 with conversions
before and behind; sum, stochastic depth and joining would be passes of their own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define

Pair = tuple[Tensor, Tensor | None]  # a (B, H, W, C) map and, where there is one, a (B, 1, C) class token


def _add(x: Tensor, cls: Tensor | None, y: Tensor, keep: Tensor | None) -> Pair:
    """x + keep * y, where y are (B, [1 +] H*W, C) tokens, and keep None or (B,) factors."""
    if keep is not None:
        y = y * keep.to(y.dtype).view(-1, 1, 1)
    if cls is None:
        return x + y.view(x.shape), None
    return x + y[:, 1:].view(x.shape), cls + y[:, :1]


def _normed(x: Tensor, cls: Tensor | None, weight: Tensor, bias: Tensor, eps: float, joined: bool) -> Pair:
    """The norm as a map and a class token; as tokens and None if `joined`."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    weight, bias = weight.to(wide), bias.to(wide)
    normed = F.layer_norm(x.to(wide), weight.shape, weight, bias, eps)
    normed_cls = None if cls is None else F.layer_norm(cls.to(wide), weight.shape, weight, bias, eps)
    if not joined:
        return normed, normed_cls
    tokens = normed.flatten(1, 2)
    return tokens if normed_cls is None else torch.cat([normed_cls, tokens], dim=1), None


def reference_residual_norm(
    x: Tensor, cls: Tensor | None, y: Tensor | None, keep: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype, joined: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """The reference: the sum and its class token; then its norm in `dtype`, tokens if `joined`.

    Without a y the sum is x. Whoever goes on with that, and not with x, has its gradient added in the same pass.
    """
    if y is not None:
        x, cls = _add(x, cls, y, keep)
    normed, normed_cls = _normed(x, cls, weight, bias, eps, joined)
    return x, cls, normed.to(dtype), None if normed_cls is None else normed_cls.to(dtype)


def _reference_backward(
    grad: Tensor, grad_cls: Tensor | None, grad_sum: Tensor | None, grad_sum_cls: Tensor | None,
    x: Tensor, cls: Tensor | None, keep: Tensor | None, weight: Tensor, eps: float,
    x_dtype: torch.dtype, y_dtype: torch.dtype | None, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, cls, y, weight and bias; x and cls are those that were normalised."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (x, weight, torch.zeros_like(weight))]
        leaves += [] if cls is None else [cls.detach().requires_grad_()]
        x, weight, bias, *rest = leaves
        outputs = _normed(x, rest[0] if rest else None, weight, bias, eps, joined)
        pairs = [
            (out, up.to(out.dtype))
            for out, up in zip(outputs, (grad, grad_cls), strict=True)
            if out is not None and up is not None
        ]
        found = torch.autograd.grad([out for out, _ in pairs], leaves, [up for _, up in pairs])
    grad_x = found[0] if grad_sum is None else found[0] + grad_sum
    tokens, grad_x_cls, grad_y = grad_x.flatten(1, 2), None, None
    if cls is not None:
        grad_x_cls = found[3] if grad_sum_cls is None else found[3] + grad_sum_cls
        tokens = torch.cat([grad_x_cls, tokens], dim=1)
        grad_x_cls = grad_x_cls.to(x_dtype)
    if y_dtype is not None:
        grad_y = (tokens if keep is None else tokens * keep.view(-1, 1, 1)).to(y_dtype)
    return grad_x.to(x_dtype), grad_x_cls, grad_y, *found[1:3]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    x, _, y, keep, weight, _, ctx.eps, _, ctx.joined = inputs
    ctx.x_dtype, ctx.y_dtype = x.dtype, None if y is None else y.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[:2], keep, weight)


def as_tokens(x: Tensor, cls: Tensor | None) -> tuple[int, int, int]:
    """The shape of a map and its class token as tokens."""
    batch, height, width, channels = x.shape
    return batch, height * width + (0 if cls is None else 1), channels


def _backward(
    ctx: Any, grad_sum: Tensor | None, grad_sum_cls: Tensor | None, grad: Tensor | None, grad_cls: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, cls, keep, weight = ctx.saved_tensors
    if grad is None:
        grad = x.new_zeros(as_tokens(x, cls) if ctx.joined else x.shape)
    if cls is not None and not ctx.joined and grad_cls is None:
        grad_cls = torch.zeros_like(cls)
    if grad_sum is not None or grad_sum_cls is not None:
        grad_sum = torch.zeros_like(x) if grad_sum is None else grad_sum
        grad_sum_cls = torch.zeros_like(cls) if cls is not None and grad_sum_cls is None else grad_sum_cls
    same = cls is None and keep is None and ctx.x_dtype == ctx.y_dtype  # one gradient for x and y
    grad_x, grad_x_cls, grad_y, grad_weight, grad_bias = residual_norm_backward.run(
        grad, grad_cls, grad_sum, grad_sum_cls, x, cls, keep, weight, ctx.eps, ctx.x_dtype,
        None if same else ctx.y_dtype, ctx.joined,
    )  # fmt: skip
    if same:
        grad_y = grad_x.view(as_tokens(x, cls))
    return grad_x, grad_x_cls, grad_y, None, grad_weight, grad_bias, None, None, None


residual_norm_backward = define("residual_norm_backward", _reference_backward, "layer_norm.backward")
residual_norm_forward = define(
    "residual_norm", reference_residual_norm, "layer_norm.forward", setup=_setup, backward=_backward
)
