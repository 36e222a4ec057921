"""Layers behind a BatchNorm in training, which do not keep what it gave: its backward pass makes that again.

The input and the statistics of a BatchNorm are kept for its own gradient, so that its output need not be kept for the
gradient of the next layer's weights. To make it again costs little where memory is passed over anyway: a depth-wise
convolution normalises what it reads, and BatchNorm's own backward pass, which comes first then, writes its output.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.kernels.batch_norm import batch_norm_act_backward, batch_norm_act_forward, batch_norm_statistics
from weft.kernels.conv_norm import conv_qkv, convolve, is_batch_norm, is_depthwise, norm_act
from weft.kernels.linear import cast_together, linear_gradients, linears, parameters_of, trains
from weft.kernels.norm_depthwise import norm_depthwise
from weft.kernels.qkv import qkv_depthwise
from weft.kernels.switch import amp_dtype


def norm_conv(x: Tensor, bn: Any, act: str, conv: nn.Conv2d) -> Tensor:
    """conv(act(bn(x))) of a (B, H, W, C) map."""
    if not (is_depthwise(conv) and _can_be_made_again(x, bn)):
        return convolve(norm_act(x, bn, act), conv)
    return norm_depthwise(x, _moments(x, bn), bn.weight, bn.bias, bn.eps, act, conv.weight, conv.bias, conv.stride[0])


def norm_linears(xs: Sequence[Tensor], norms: Sequence[Any], act: str, layers: Sequence[Any]) -> tuple[Tensor, ...]:
    """Linear layers side by side, each of act(bn(x)) with a (B, H, W, C) map and a norm of its own."""
    parameters = parameters_of(layers)
    alone = parameters and trains(*xs, *parameters)
    if not alone or not all(_can_be_made_again(x, bn) for x, bn in zip(xs, norms, strict=True)):
        return linears([norm_act(x, bn, act) for x, bn in zip(xs, norms, strict=True)], layers)
    moments = [_moments(x, bn) for x, bn in zip(xs, norms, strict=True)]
    gammas, betas = [bn.weight for bn in norms], [bn.bias for bn in norms]
    return _NormLinears.apply([bn.eps for bn in norms], act, *xs, *moments, *gammas, *betas, *parameters)


def qkv_linears(x: Tensor, branches: Sequence[Any], layers: Sequence[Any]) -> tuple[Tensor, ...]:
    """Linear layers behind the depth-wise `ConvNorm`s of q, k and v, which `fit_together`; (B, H, W, C) maps."""
    norms = [branch.bn for branch in branches]
    if not norms[0].training or not is_batch_norm(norms[0]):
        return linears([y.view(x.shape) for y in conv_qkv(x, None, *branches)], layers)
    weights, biases = [branch.conv.weight for branch in branches], [branch.conv.bias for branch in branches]
    maps = qkv_depthwise(x, None, weights, biases, None, None, 1)
    return norm_linears([y.view(x.shape) for y in maps], norms, "none", layers)


def _can_be_made_again(x: Tensor, bn: Any) -> bool:
    """Whether `bn` normalises this map by its own statistics (one row has none), in the type that layers compute in."""
    return is_batch_norm(bn) and bn.training and x.numel() > x.shape[-1] and x.dtype == amp_dtype(x)


def _moments(x: Tensor, bn: Any) -> Tensor:
    return batch_norm_statistics(x.detach(), bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, all_eps: list[float], act: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(all_eps)
        parameters = cast_together(tensors[4 * count :], tensors[0].dtype)
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(*tensors[: 4 * count], *weights)
        ctx.all_eps, ctx.act, ctx.dtypes = all_eps, act, [p.dtype for p in tensors[4 * count :]]
        ys = []
        for i, (eps, weight, bias) in enumerate(zip(all_eps, weights, biases, strict=True)):
            x, moments, gamma, beta = tensors[i : 4 * count : count]
            active = batch_norm_act_forward(x, moments, None, gamma, beta, None, None, eps, act)
            ys.append(F.linear(active, weight, bias))
        return tuple(ys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, needed = len(grads), ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # checkpointing gives them once
        found: list[Tensor | None] = [None] * (6 * count)
        for i, grad in enumerate(grads):
            x, moments, gamma, beta, weight = saved[i::count]
            of_weight, of_bias = (
                dtype if need else None
                for dtype, need in zip(ctx.dtypes[i::count], needed[4 * count + i :: count], strict=True)
            )
            grad_active, _, grad_bias = linear_gradients(grad, x, weight, x.dtype, None, of_bias)
            grad_x, grad_gamma, grad_beta, _, active = batch_norm_act_backward(
                grad_active, x, moments, None, gamma, beta, None, None, ctx.all_eps[i], ctx.act, of_weight is not None
            )
            grad_weight = None
            if of_weight is not None:
                grad_weight = linear_gradients(grad, active, weight, None, of_weight, None)[1]
            found[i::count] = grad_x, None, grad_gamma, grad_beta, grad_weight, grad_bias
        return None, None, *found
