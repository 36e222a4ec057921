"""BatchNorm with what follows it, y = act(keep * bn(x) + residual): two passes (in inference one), and two back.

Torch takes as many for BatchNorm alone, three times as long, and one more pass for each of the others.
"""

from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.activation import reference_activation
from weft.kernels.ops.op import define

# The statistics; the running ones are changed ---------------------------------------------------------------------


def _reference_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    """Mean and biased variance of each channel, (2, C)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(wide), dim=list(range(x.dim() - 1)), correction=0)
    rows = x.numel() // x.shape[-1]
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (rows / (rows - 1))).to(running_var.dtype), momentum)
    if batches is not None:
        batches.add_(1)
    return torch.stack([mean, var])


batch_norm_statistics = define("batch_norm_statistics", _reference_statistics, "batch_norm.statistics")


# The rest, with a gradient ----------------------------------------------------------------------------------------
# With a var, mean and var are fixed; without, `mean` is (2, C), mean and variance of this batch, which depend on x.


def _finish(y: Tensor, act: str, residual: Tensor | None, keep: Tensor | None) -> Tensor:
    if keep is not None:
        y = y * keep.to(y.dtype).view(-1, 1, 1, 1)
    if residual is not None:
        y = residual + y
    return reference_activation(y, act)


def reference_norm_act(
    x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """act(keep * bn(x) + residual)."""
    if var is None:
        mean, var = mean.unbind(0)
    wide = torch.promote_types(x.dtype, mean.dtype)
    y = (x.to(wide) - mean) * ((var + eps).rsqrt() * weight) + bias
    return _finish(y, act, residual, keep).to(output_dtype(x, residual), copy=True)


def output_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _reference_backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, with_output: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, weight, bias and residual, and y once more `with_output`."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
        leaves += [residual.detach().requires_grad_()] if residual is not None and act != "none" else []
        x, weight, bias, *rest = leaves
        if var is None:
            var, mean = torch.var_mean(x.to(mean.dtype), dim=list(range(x.dim() - 1)), correction=0)
        y = reference_norm_act(x, mean, var, weight, bias, rest[0] if rest else residual, keep, eps, act)
        found = torch.autograd.grad(y, leaves, grad.to(y.dtype))
    return *found[:3], found[3] if rest else None, y.detach() if with_output else None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, residual, keep, ctx.eps, ctx.act = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, mean, var, weight, bias, None if ctx.act == "none" else residual, keep)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = batch_norm_act_backward.run(grad, *ctx.saved_tensors, ctx.eps, ctx.act, False)
    grad_x, grad_weight, grad_bias, grad_residual, _ = found
    if ctx.residual_dtype is not None and ctx.act == "none":
        grad_residual = grad if grad.dtype == ctx.residual_dtype else grad.to(ctx.residual_dtype)
    return grad_x, None, None, grad_weight, grad_bias, grad_residual, None, None, None


# Behind a class token -----------------------------------------------------------------------------------------------


def reference_norm_behind_token(
    x: Tensor, cls: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """bn(x) as (B, 1 + N, C) tokens behind the class token, (B, 1, C); x is a map, or its tokens."""
    y = reference_norm_act(x, mean, var, weight, bias, None, None, eps, "none")
    return torch.cat([cls.to(y.dtype), y.flatten(1, -2)], dim=1)


def _setup_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cls, mean, var, weight, bias, ctx.eps = inputs
    ctx.cls_dtype = cls.dtype
    ctx.save_for_backward(x, mean, var, weight, bias)


def _backward_tokens(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, *norm = ctx.saved_tensors
    behind = grad[:, 1:].unflatten(1, x.shape[1:-1])  # read where it is
    grad_x, grad_weight, grad_bias, *_ = batch_norm_act_backward.run(
        behind, x, *norm, None, None, ctx.eps, "none", False
    )
    return grad_x, grad[:, :1].to(ctx.cls_dtype), None, None, grad_weight, grad_bias, None


batch_norm_act_backward = define("batch_norm_act_backward", _reference_backward, "batch_norm.backward")
batch_norm_act_forward = define(
    "batch_norm_act", reference_norm_act, "batch_norm.apply", setup=_setup, backward=_backward
)
norm_behind_token = define(
    "norm_behind_token",
    reference_norm_behind_token,
    "batch_norm.apply_behind_token",
    setup=_setup_tokens,
    backward=_backward_tokens,
)
