"""GELU, SiLU, QuickGELU and ReLU as one pass. Torch's GELU waits for arithmetic, and its QuickGELU is three passes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "gelu": F.gelu,
    "silu": F.silu,
    "quick_gelu": lambda x: F.silu(1.702 * x) / 1.702,  # x sigmoid(1.702 x), with one map less to keep
    "relu": F.relu,
}
KINDS = tuple(kind for kind in FUNCTIONS if kind != "none")


def reference_activation(x: Tensor, kind: str) -> Tensor:
    """The activation called `kind`; "none" leaves x as it is."""
    return FUNCTIONS[kind](x)


def _reference_backward(grad: Tensor, x: Tensor, kind: str, with_output: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and the activation once more `with_output`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = reference_activation(x, kind)
        return torch.autograd.grad(y, x, grad)[0], y.detach() if with_output else None


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return activation_backward.run(grad, x, ctx.kind, False)[0], None


activation_backward = define("activation_backward", _reference_backward, "activation.backward")
activation_forward = define("activation", reference_activation, "activation.forward", setup=_setup, backward=_backward)
