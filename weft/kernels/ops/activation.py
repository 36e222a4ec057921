"""GELU, SiLU, QuickGELU and ReLU as one pass. Torch's GELU waits for arithmetic, and its QuickGELU is three passes."""

from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.op import define
from weft.models.layers import activate as plain_activation

KINDS = ("gelu", "silu", "quick_gelu", "relu")


def _plain_backward(grad: Tensor, x: Tensor, kind: str, again: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and the activation once more if it is wanted `again`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = plain_activation(x, kind)
        return torch.autograd.grad(y, x, grad)[0], y.detach() if again else None


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return activation_backward.run(grad, x, ctx.kind, False)[0], None


activation_backward = define("activation_backward", _plain_backward, "activation.backward")
activation_forward = define("activation", plain_activation, "activation.forward", setup=_setup, backward=_backward)
