"""Linear layers in training, with fewer and shorter passes over memory than autocast makes of them.

Torch casts every parameter and every gradient of one on its own, and its sum over rows, the gradient of a bias, takes
longer than the matrix products beside it. In inference and for compilers a linear layer is torch's.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from weft.kernels.activation import activation, activation_backward
from weft.kernels.linear_act import linear_act_forward
from weft.kernels.op import nobody_looks
from weft.kernels.switch import amp_dtype, usable
from weft.kernels.watch import bare


class Linear(nn.Linear):
    """A linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return F.linear(input, self.weight, self.bias)
        else:  # not compiled by TorchScript
            if self.bias is not None and trains(input, self.weight, self.bias):
                return _Linears.apply(amp_dtype(input), how_again(input), input, self.weight, self.bias)[0]
            return F.linear(input, self.weight, self.bias)


def linears(xs: Sequence[Tensor], layers: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Linear layers side by side, each with an input of its own, such as those of q, k and v."""
    parameters = parameters_of(layers)
    if parameters and trains(*xs, *parameters):
        return _Linears.apply(amp_dtype(xs[0]), None, *xs, *parameters)
    return tuple(layer(x) for x, layer in zip(xs, layers, strict=True))


def mlp(x: Tensor, fc1: nn.Linear, kind: str, fc2: nn.Linear) -> Tensor:
    """Two linear layers and the activation called `kind` between them."""
    parameters = parameters_of((fc1, fc2))
    if parameters and trains(x, *parameters):
        w1, w2, b1, b2 = parameters
        return _Mlp.apply(amp_dtype(x), kind, x, w1, b1, w2, b2)
    return fc2(activation(fc1(x), kind))


def trains(x: Tensor, *others: Tensor) -> bool:
    """Whether this is training in eager mode, by kernels, in types that torch's linear layers would take as well."""
    if not (torch.is_grad_enabled() and usable(x) and nobody_looks((x, *others))):
        return False
    return torch.is_autocast_enabled(x.device.type) or all(other.dtype == x.dtype for other in others)


def parameters_of(layers: Sequence[Any]) -> list[Tensor]:
    """The weights and then the biases of these layers; nothing where one is watched, replaced or has no bias."""
    known = all(getattr(type(layer), "forward", None) in (Linear.forward, nn.Linear.forward) for layer in layers)
    if not known or not bare(*layers) or any(layer.bias is None for layer in layers):
        return []
    return [layer.weight for layer in layers] + [layer.bias for layer in layers]


# By the tensor, as long as there is one: an attribute of it would be saved with it.
_again: MutableMapping[Any, Any] = WeakTensorKeyDictionary()
NEVER: Any = (None, None, ())


def make_again(x: Tensor, make: Callable[..., Tensor], *tensors: Tensor | None) -> None:
    """Tells the `Linear` that gets `x` to keep these tensors, which are kept anyway, and to make(*tensors) x of them.

    That is one more pass over memory in the backward pass, for one map less that is kept.
    """
    tensors = tuple(None if t is None else t.detach() for t in tensors)
    _again[x] = x._version, make, tensors


def how_again(x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor | None, ...]] | None:
    """What `make_again` said about x, unless somebody has changed it since."""
    version, make, tensors = _again.get(x, NEVER)
    return (make, tensors) if version == x._version else None


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, again: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) // 3
        xs, parameters = [x.to(dtype) for x in tensors[:count]], cast_together(tensors[count:], dtype)
        weights, biases = parameters[:count], parameters[count:]
        ctx.make, kept = again or (None, xs)
        ctx.save_for_backward(*weights, *kept)
        ctx.dtypes = [t.dtype for t in tensors]
        return tuple(F.linear(x, w, b) for x, w, b in zip(xs, weights, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        count, needed = len(grads), ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # checkpointing gives them once
        weights, xs = saved[:count], saved[count:]
        if ctx.make is not None:
            xs = [ctx.make(*xs).to(weights[0].dtype)]
        found: list[Tensor | None] = [None] * (3 * count)
        for i, (grad, x, weight) in enumerate(zip(grads, xs, weights, strict=True)):
            places = (i, count + i, 2 * count + i)
            wanted = [ctx.dtypes[place] if needed[place] else None for place in places]
            found[i], found[count + i], found[2 * count + i] = linear_gradients(grad, x, weight, *wanted)
        return None, None, *found


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, kind: str, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.kind, ctx.dtypes = kind, [x.dtype, *(p.dtype for p in parameters)]
        x, (w1, b1, w2, b2) = x.to(dtype), cast_together(parameters, dtype)
        active, hidden = linear_act_forward(x, w1, b1, kind, True)
        ctx.save_for_backward(x, hidden, w1, w2)
        return F.linear(active, w2, b2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, hidden, w1, w2 = ctx.saved_tensors
        of_x, of_w1, of_b1, of_w2, of_b2 = (
            dtype if needed else None for dtype, needed in zip(ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        )
        grad_active, _, grad_b2 = linear_gradients(grad, hidden, w2, hidden.dtype, None, of_b2)
        # What the activation gave is not kept: its own backward pass, which reads all that it takes, writes it again.
        grad_hidden, active = activation_backward(grad_active, hidden, ctx.kind, of_w2 is not None)
        grad_w2 = None if of_w2 is None else linear_gradients(grad, active, w2, None, of_w2, None)[1]
        return None, None, *linear_gradients(grad_hidden, x, w1, of_x, of_w1, of_b1), grad_w2, grad_b2


def linear_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    of_x: torch.dtype | None,
    of_weight: torch.dtype | None,
    of_bias: torch.dtype | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a linear layer in these types; None means that one is not needed."""
    rows, columns = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, out), (N, in)
    grad_x = None if of_x is None else torch.mm(rows, weight).view(x.shape).to(of_x)
    grad_weight = None if of_weight is None else _product(rows.t(), columns, of_weight)
    return grad_x, grad_weight, None if of_bias is None else column_sums(rows).to(of_bias)


def column_sums(x: Tensor) -> Tensor:
    """(N, C) -> (C,) in float32: the gradient of a bias."""
    if not x.is_cuda:
        return x.sum(0, dtype=torch.float32)
    from weft.kernels.gpu import linear

    return linear.column_sums(x.contiguous())


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, stored as it was summed up: in float32 if `dtype` is that."""
    if dtype == torch.float32 != a.dtype and a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)


def cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All of them in one kernel."""
    if all(t.dtype == dtype for t in tensors):
        return list(tensors)
    cast = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(cast, list(tensors))
    return cast
