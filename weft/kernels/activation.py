"""GELU, SiLU, QuickGELU and ReLU as one pass. Torch's GELU waits for arithmetic, and its QuickGELU is three passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

KINDS = ("gelu", "silu", "quick_gelu", "relu")


def plain_activation(x: Tensor, kind: str) -> Tensor:
    """The twin: the activation called `kind`; "none" leaves x as it is."""
    if kind == "gelu":
        return F.gelu(x)
    if kind == "silu":
        return F.silu(x)
    if kind == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if kind == "relu":
        return F.relu(x)
    return x


def plain_backward(grad: Tensor, x: Tensor, kind: str, again: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of x, and the activation once more if it is wanted `again`."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = plain_activation(x, kind)
        return torch.autograd.grad(y, x, grad)[0], y.detach() if again else None


def _launch(x: Tensor, kind: str) -> Tensor:
    from weft.kernels.gpu import activation

    return activation.forward(x.contiguous(), kind)


def _launch_backward(grad: Tensor, x: Tensor, kind: str, again: bool) -> tuple[Tensor, Tensor | None]:
    from weft.kernels.gpu import activation

    return activation.backward(grad.contiguous(), x.contiguous(), kind, again)


def _fake(x: Tensor, kind: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return activation_backward(grad, x, ctx.kind, False)[0], None


activation_backward = define(
    "activation_backward(Tensor grad, Tensor x, str kind, bool again) -> (Tensor, Tensor)",
    plain_backward,
    _launch_backward,
    lambda grad, x, kind, again: (_fake(x, kind), _fake(x, kind) if again else None),
)
activation_forward = define(
    "activation(Tensor x, str kind) -> Tensor", plain_activation, _launch, _fake, _setup, _backward
)


def activation(x: Tensor, kind: str) -> Tensor:
    """The activation called `kind`, or "none", of a tensor of any shape."""
    if torch.jit.is_scripting():
        return plain_activation(x, kind)
    else:  # not compiled by TorchScript
        # Compilers fuse it with what stands around it, which an operator of its own would prevent.
        if kind == "none" or torch.compiler.is_compiling() or not usable(x):
            return plain_activation(x, kind)
        return activation_forward(x.to(amp_dtype(x)), kind)
