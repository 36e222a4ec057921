"""The linear attention of the Performer, which torch computes in some twenty passes over float32 tokens."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.layers import register_notrace_function
from torch import Tensor

from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

WIDEST = 128  # channels of which a program can hold context and matrix
SPLITS = 4  # programs that share the tokens of a picture
NO_FEATURE = -1e30  # the logarithm of a feature that does not exist


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "meta":  # where MACs are counted; it knows no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@register_notrace_function
def performer_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Linear attention over (B, N, C) tokens by the positive random features of the Performer.

    phi(u) = exp(w u - |u|^2 / 2) / sqrt(m) with a fixed (m, C) matrix w, and

        y = phi(q) (sum_t phi(k_t)^T v_t) / (phi(q) sum_t phi(k_t) + 1e-8).

    Computed in float32, under autocast and in half-precision models, too. The features grow up to exp(m / 2) and shrink
    without limit, so float32 alone is not enough: numerator and denominator are both multiplied by a factor that makes
    the largest feature of the keys and of each query 1. The factor cancels, as the 1e-8 is multiplied by it as well.
    Beyond exp(60) the latter stays there: y is then zero but for 1e-14 of v, as it is zero without the factor.
    """
    if torch.jit.is_scripting():  # TorchScript knows no such context: under autocast the products are rounded there
        return _performer_attention(q, k, v, w)[0]
    else:
        with _without_autocast(q.device):
            return _performer_attention(q, k, v, w)[0]


def _performer_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, and of the keys: context (B, m, C), shift and total (B, m) of each feature."""
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    q, k, v, w = q.to(wide), k.to(wide), v.to(wide), w.to(wide)
    w_t = w.t().expand(q.shape[0], -1, -1)  # (B, C, m)
    log_k = torch.baddbmm(k.square().sum(2, keepdim=True), k, w_t, beta=-0.5)  # (B, N, m): w k - |k|^2 / 2
    log_q = torch.bmm(q, w_t)  # (B, N, m); |q|^2 / 2 cancels everywhere but beside the 1e-8
    # The result does not depend on the two shifts, so no gradient goes through them.
    shift_k = log_k.detach().amax(1, keepdim=True)  # (B, 1, m)
    log_q = log_q + shift_k
    shift_q = log_q.detach().amax(2, keepdim=True)  # (B, N, 1)
    phi_k, phi_q = (log_k - shift_k).exp(), (log_q - shift_q).exp()  # (B, N, m), at most 1
    log_factor = q.square().sum(2, keepdim=True) / 2 - shift_q
    epsilon = 1e-8 * w.shape[0] * log_factor.clamp(max=60.0).exp()  # (B, N, 1)
    context = phi_k.transpose(1, 2) @ v  # (B, m, C)
    total_k = phi_k.sum(1)  # (B, m)
    total = phi_q @ total_k.unsqueeze(2)  # (B, N, 1), at least 1
    return (phi_q @ context / (total + epsilon)).to(dtype), context, shift_k.squeeze(1), total_k


def plain_performer(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The twin: `performer_attention` over (B, N, 3C) tokens that hold k, q and v side by side; and v."""
    k, q, v = kqv.chunk(3, dim=-1)
    return performer_attention(q, k, v, w), v


def _outputs(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for y, for v, and for what the kernels find out about the keys: shifts, totals and contexts."""
    (batch, tokens, _), (features, channels) = kqv.shape, w.shape
    y, v = (torch.empty(batch, tokens, channels, dtype=kqv.dtype, device=kqv.device) for _ in range(2))
    found = torch.empty(batch, SPLITS, features * (channels + 2), dtype=torch.float32, device=kqv.device)
    return y, v, found


def _plain(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, q, v = kqv.chunk(3, dim=-1)
    with _without_autocast(kqv.device):
        y, context, shift, total = _performer_attention(q, k, v, w)
    found = kqv.new_zeros(len(kqv), SPLITS, w.numel() + 2 * len(w), dtype=torch.float32)
    found[:, 0] = torch.cat([context.flatten(1), shift, total], dim=1)
    found[:, 1:, w.numel() : -len(w)] = NO_FEATURE  # one split had all the keys
    return y, v.contiguous(), found


def _plain_backward(grad: Tensor, grad_v: Tensor, kqv: Tensor, w: Tensor, found: Tensor) -> Tensor:
    with torch.enable_grad():
        kqv = kqv.detach().requires_grad_()
        return torch.autograd.grad(plain_performer(kqv, w), kqv, (grad, grad_v))[0]


def _launch(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from weft.kernels.gpu import performer

    return performer.forward(kqv.contiguous(), w.contiguous(), _outputs(kqv, w))


def _launch_backward(grad: Tensor, grad_v: Tensor, kqv: Tensor, w: Tensor, found: Tensor) -> Tensor:
    from weft.kernels.gpu import performer

    return performer.backward(grad.contiguous(), grad_v.contiguous(), kqv.contiguous(), w.contiguous(), found)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*inputs, output[2])


def _backward(ctx: Any, grad: Tensor, grad_v: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return performer_backward(grad, grad_v, *ctx.saved_tensors), None


performer_backward = define(
    "performer_backward(Tensor grad, Tensor grad_v, Tensor kqv, Tensor w, Tensor found) -> Tensor",
    _plain_backward,
    _launch_backward,
    lambda grad, grad_v, kqv, w, found: torch.empty(kqv.shape, dtype=kqv.dtype, device=kqv.device),
)
performer_forward = define(
    "performer(Tensor kqv, Tensor w) -> (Tensor, Tensor, Tensor)", _plain, _launch, _outputs, _setup, _backward
)


@register_notrace_function
def performer(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """`performer_attention` over (B, N, 3C) tokens that hold k, q and v side by side; and v."""
    if torch.jit.is_scripting():
        return plain_performer(kqv, w)
    else:  # not compiled by TorchScript
        if not usable(kqv) or w.shape[1] > WIDEST:
            return plain_performer(kqv, w)
        y, v, _ = performer_forward(kqv.to(amp_dtype(kqv)), w)
        return y, v


def cases() -> list[Case]:
    """The reduction cells of vitae_tiny, and the first of vitae_small, whose second is too wide."""
    result: list[Case] = []
    for tokens, channels in ((56**2, 64), (28**2, 64), (56**2, 96)):
        result += [_case(False, 256, tokens, channels), _case(False, 128, tokens, channels)]
        result.append(_case(True, 128, tokens, channels))
    return result


def _case(gradient: bool, batch: int, tokens: int, channels: int) -> Case:
    features = channels // 2

    def inputs(device: torch.device) -> tuple[Any, ...]:
        kqv = torch.randn(batch, tokens, 3 * channels, device=device, dtype=torch.bfloat16) / 2
        w = torch.nn.init.orthogonal_(torch.empty(features, channels, device=device)) * features**0.5
        grad, grad_v = (torch.randn(batch, tokens, channels, device=device, dtype=torch.bfloat16) for _ in range(2))
        return kqv, w, grad, grad_v, performer_forward(kqv, w)[2]

    def kernel(kqv: Tensor, w: Tensor, grad: Tensor, grad_v: Tensor, found: Tensor) -> Any:
        return performer_backward(grad, grad_v, kqv, w, found) if gradient else performer_forward(kqv, w)[:2]

    def plain(kqv: Tensor, w: Tensor, grad: Tensor, grad_v: Tensor, found: Tensor) -> Any:
        return _plain_backward(grad, grad_v, kqv, w, found) if gradient else plain_performer(kqv, w)

    return Case(
        "performer_backward" if gradient else "performer",
        dict(batch=batch, tokens=tokens, channels=channels),
        inputs,
        kernel,
        plain,
        bytes=batch * tokens * channels * 2 * (8 if gradient else 5),
        flops=2 * batch * tokens * channels * features * (14 if gradient else 6),
        candidates=[
            dict(rows=rows, num_warps=warps, num_stages=stages)
            for rows, warps, stages in ((64, 4, 2), (64, 4, 1), (32, 4, 2), (32, 8, 2), (32, 8, 1), (128, 8, 2))
        ],
    )
