"""The linear attention of the Performer, which torch computes in some twenty passes over float32 tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from weft.kernels.ops.op import define

WIDEST = 128  # channels of which a program can hold context and matrix
SPLITS = 4  # programs that share the tokens of a picture


def reference_performer(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The reference, over (B, N, 3C) tokens that hold k, q and v side by side; and v.

    y = phi(q) (sum_t phi(k_t)^T v_t) / (phi(q) sum_t phi(k_t) + 1e-8) with phi(u) = exp(w u - |u|^2 / 2) / sqrt(m) for
    a fixed (m, C) matrix w. Features may leave the range of float32, so all of them stay logarithms until a softmax.
    """
    wide = torch.promote_types(kqv.dtype, torch.float32)
    with torch.autocast(kqv.device.type, enabled=False):
        k, q, v = kqv.to(wide).chunk(3, dim=-1)
        matrix = w.to(wide).t().expand(len(kqv), -1, -1)  # (B, C, m)
        keys = torch.baddbmm(k.square().sum(2, keepdim=True), k, matrix, beta=-0.5)  # (B, N, m): log phi(k)
        shares = keys.log_softmax(1)  # of the tokens in each feature
        totals = keys[:, :1] - shares[:, :1]  # (B, 1, m): log sum_t phi(k_t)
        epsilon = q.square().sum(2, keepdim=True) / 2 + math.log(1e-8 * len(w))  # (B, N, 1): one feature more
        queries = torch.cat([torch.baddbmm(totals, q, matrix), epsilon], dim=2).softmax(2)  # (B, N, m + 1)
        y = queries[:, :, :-1] @ (shares.exp().transpose(1, 2) @ v)
    return y.to(kqv.dtype), kqv[:, :, 2 * w.shape[1] :]


def outputs(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for y, for v, and for what the kernels find out about the keys: shifts, totals and contexts."""
    (batch, tokens, _), (features, channels) = kqv.shape, w.shape
    y, v = (torch.empty(batch, tokens, channels, dtype=kqv.dtype, device=kqv.device) for _ in range(2))
    found = torch.empty(batch, SPLITS, features * (channels + 2), dtype=torch.float32, device=kqv.device)
    return y, v, found


def _reference(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, v = reference_performer(kqv, w)
    return y, v, torch.zeros_like(outputs(kqv, w)[2])  # its own gradient needs nothing of that


def _reference_backward(grad: Tensor, grad_v: Tensor, kqv: Tensor, w: Tensor, found: Tensor) -> Tensor:
    with torch.enable_grad():
        kqv = kqv.detach().requires_grad_()
        return torch.autograd.grad(reference_performer(kqv, w), kqv, (grad, grad_v))[0]


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs, output[2])


def _backward(ctx: Any, grad: Tensor, grad_v: Tensor, _: Tensor) -> tuple[Tensor, None]:
    performer_backward.disabled |= performer_forward.disabled  # whose reference gives it zeros for what kernels find
    return performer_backward.dispatch(grad, grad_v, *ctx.saved_tensors), None


performer_backward = define(
    "performer_backward(Tensor grad, Tensor grad_v, Tensor kqv, Tensor w, Tensor found) -> Tensor",
    _reference_backward,
    "performer.backward",
    lambda grad, grad_v, kqv, w, found: torch.empty(kqv.shape, dtype=kqv.dtype, device=kqv.device),
)
performer_forward = define(
    "performer(Tensor kqv, Tensor w) -> (Tensor, Tensor, Tensor)",
    _reference,
    "performer.forward",
    outputs,
    _setup,
    _backward,
)
