"""Linear layers in a tape, with fewer and shorter passes over memory than autocast makes of them.

Torch casts every parameter and every gradient of one on its own, and its sum over rows, the gradient of a bias, takes
longer than the matrix products beside it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.fast.tape.tape import CastCache, Tape, TapeFunction, Var
from weft.kernels.ops.activation import activation_backward
from weft.kernels.ops.batch_norm import batch_norm_act_backward, batch_norm_act_forward
from weft.kernels.ops.linear_act import linear_act_forward

NO_OPTIONS = (None, False)
Recompute = tuple[Callable[..., Tensor], tuple[Tensor | None, ...]]  # a function that makes a tensor again, and of what


def linear(t: Tape, x: Var, layer: nn.Linear, recompute: Recompute | None = None, before_norm: bool = False) -> Var:
    """A linear layer; `recompute` spares it keeping its input, for one more pass over memory on the way back.

    `before_norm`: a BatchNorm behind it takes the mean of the batch off, its bias with it, which has no gradient then.
    """
    return t(Linears, t.casts, (recompute, before_norm), x, layer.weight, layer.bias)[0]


def linears(t: Tape, xs: Sequence[Var], layers: Sequence[nn.Linear]) -> tuple[Var, ...]:
    """Linear layers side by side, each with an input of its own, such as those of q, k and v."""
    return t(Linears, t.casts, NO_OPTIONS, *xs, *(layer.weight for layer in layers), *(layer.bias for layer in layers))


def mlp(t: Tape, x: Var, fc1: nn.Linear, act: str, fc2: nn.Linear) -> Var:
    """Two linear layers with biases and the activation called `act` between them."""
    return t(Mlp, t.casts, act, x, fc1.weight, fc1.bias, fc2.weight, fc2.bias)


def norm_linears(
    t: Tape, xs: Sequence[Var], moments: Sequence[Tensor], norms: Sequence[Any], act: str, layers: Sequence[nn.Linear],
    before_norm: bool = False,
) -> tuple[Var, ...]:  # fmt: skip
    """Linear layers side by side, each of act(bn(x)) with a map and a BatchNorm of its own, which is not kept."""
    gammas, betas = [bn.weight for bn in norms], [bn.bias for bn in norms]
    parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers]
    how = [bn.eps for bn in norms], act, before_norm
    return t(NormLinears, t.casts, how, *xs, *moments, *gammas, *betas, *parameters)


class Linears(TapeFunction):
    """Takes inputs, then weights, then biases, which may be None."""

    @staticmethod
    def forward(ctx: Any, casts: CastCache, how: tuple[Recompute | None, bool], *tensors: Any) -> tuple[Tensor, ...]:
        count, (recompute, ctx.before_norm) = len(tensors) // 3, how
        xs, parameters = [_cast(x, casts.dtype) for x in tensors[:count]], casts(tensors[count:])
        weights, biases = parameters[:count], parameters[count:]
        ctx.recompute, kept = recompute or (None, xs)
        ctx.save_for_backward(*weights, *kept)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        return tuple(F.linear(x, w, b) for x, w, b in zip(xs, weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, needed = len(grads), ctx.needs_input_grad[2:]
        weights, xs = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if ctx.recompute is not None:
            xs = [_cast(ctx.recompute(*xs), weights[0].dtype)]
        found: list[Tensor | None] = [None] * (3 * count)
        for i, (grad, x, weight) in enumerate(zip(grads, xs, weights, strict=True)):
            places = (i, count + i, 2 * count + i)
            of_x, of_weight, of_bias = (ctx.dtypes[place] if needed[place] else None for place in places)
            found[i], found[count + i], found[2 * count + i] = linear_gradients(
                grad, x, weight, of_x, of_weight, of_bias, ctx.before_norm
            )
        return None, None, *found


class Mlp(TapeFunction):
    @staticmethod
    def forward(ctx: Any, casts: CastCache, act: str, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.act, ctx.dtypes = act, [x.dtype, *(p.dtype for p in parameters)]
        x, (w1, b1, w2, b2) = _cast(x, casts.dtype), casts(parameters)
        active, hidden = linear_act_forward.run(x, w1, b1, act, any(ctx.needs_input_grad))
        ctx.save_for_backward(x, hidden, w1, w2)
        return F.linear(active, w2, b2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, hidden, w1, w2 = ctx.saved_tensors
        of_x, of_w1, of_b1, of_w2, of_b2 = (
            dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        )
        grad_active, _, grad_b2 = linear_gradients(grad, hidden, w2, hidden.dtype, None, of_b2)
        # What the activation gave is not kept: its own backward pass, which reads all that it takes, writes it again.
        grad_hidden, active = activation_backward.run(grad_active, hidden, ctx.act, of_w2 is not None)
        grad_w2 = None if of_w2 is None else linear_gradients(grad, active, w2, None, of_w2, None)[1]
        return None, None, *linear_gradients(grad_hidden, x, w1, of_x, of_w1, of_b1), grad_w2, grad_b2


class NormLinears(TapeFunction):
    """Takes inputs, the moments of each over the batch, gammas, betas, weights, biases.

    The input of a BatchNorm is kept for its own gradient, so that its output need not be kept for that of the weights:
    the backward pass of the norm comes first, and writes its output again while it passes over memory.
    """

    @staticmethod
    def forward(ctx: Any, casts: CastCache, how: tuple[list[float], str, bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        all_eps, act, ctx.before_norm = how
        count = len(all_eps)
        parameters = casts(tensors[4 * count :])
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(*tensors[: 4 * count], *weights)
        ctx.all_eps, ctx.act, ctx.dtypes = all_eps, act, [None if p is None else p.dtype for p in tensors[4 * count :]]
        ys = []
        for i, (eps, weight, bias) in enumerate(zip(all_eps, weights, biases, strict=True)):
            x, moments, gamma, beta = tensors[i : 4 * count : count]
            active = batch_norm_act_forward.run(x, moments, None, gamma, beta, None, None, eps, act)
            ys.append(F.linear(active, weight, bias))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, needed = len(grads), ctx.needs_input_grad[2:]
        found: list[Tensor | None] = [None] * (6 * count)
        for i, grad in enumerate(grads):
            x, moments, gamma, beta, weight = ctx.saved_tensors[i::count]
            of_weight, of_bias = (
                dtype if need else None
                for dtype, need in zip(ctx.dtypes[i::count], needed[4 * count + i :: count], strict=True)
            )
            grad_active, _, grad_bias = linear_gradients(grad, x, weight, x.dtype, None, of_bias, ctx.before_norm)
            grad_x, grad_gamma, grad_beta, _, active = batch_norm_act_backward.run(
                grad_active, x, moments, None, gamma, beta, None, None, ctx.all_eps[i], ctx.act, of_weight is not None
            )
            grad_weight = None
            if of_weight is not None:
                grad_weight = linear_gradients(grad, active, weight, None, of_weight, None)[1]
            found[i::count] = grad_x, None, grad_gamma, grad_beta, grad_weight, grad_bias
        return None, None, *found


def linear_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    of_x: torch.dtype | None,
    of_weight: torch.dtype | None,
    of_bias: torch.dtype | None,
    before_norm: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a linear layer in these types; None means that one is not needed."""
    rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, out), (N, in)
    grad_x = None if of_x is None else _cast(torch.mm(rows, weight).view(x.shape), of_x)
    grad_weight = None if of_weight is None else _product(rows.t(), columns, of_weight)
    if of_bias is None:
        return grad_x, grad_weight, None
    grad_bias = rows.new_zeros(rows.shape[1], dtype=of_bias) if before_norm else _cast(column_sums(rows), of_bias)
    return grad_x, grad_weight, grad_bias


def column_sums(x: Tensor) -> Tensor:
    """(N, C) -> (C,), at least in float32: the gradient of a bias."""
    if not x.is_cuda:
        return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
    from weft.kernels.triton import linear

    return linear.column_sums(x.contiguous())


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, stored as it was summed up: in float32 if `dtype` is that."""
    if dtype == torch.float32 != a.dtype and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return _cast(torch.mm(a, b), dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
