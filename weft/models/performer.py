"""The step that T2T-ViT and ViTAE share: tokens of another width by linear attention, and T2T-ViT's soft split."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import Mlp, register_notrace_function
from torch import Tensor, nn

from weft.models.layers import pad_to_multiple


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
        return _performer_attention(q, k, v, w)
    else:
        with _without_autocast(q.device):
            return _performer_attention(q, k, v, w)


def _performer_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
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
    total = phi_q @ phi_k.sum(1).unsqueeze(2)  # (B, N, 1), at least 1
    return (phi_q @ context / (total + epsilon)).to(dtype)


class PerformerAttention(nn.Module):
    """`performer_attention` and its matrix: orthogonal rows, never trained, and so a buffer."""

    def __init__(self, dim: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.w = nn.Buffer(torch.empty(dim // 2, dim, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        features, _ = self.w.shape
        rows = nn.init.orthogonal_(torch.empty_like(self.w, dtype=torch.float32))  # half precision has no QR
        self.w.copy_(rows * math.sqrt(features))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return performer_attention(q, k, v, self.w)


class SoftmaxAttention(nn.Module):
    """Ordinary attention with one head over (B, N, C) tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)


class SoftSplit(nn.Module):
    """Overlapping windows as tokens: (B, H, W, C) -> (B, H / stride, W / stride, C * kernel ** 2), channel-major.

    Writing every pixel into all its windows is the one copy that the method asks for.
    """

    def __init__(self, kernel: int, stride: int):
        super().__init__()
        self.kernel = kernel
        self.stride = stride
        self.padding = (kernel - stride + 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to_multiple(x, self.stride)
        x = F.pad(x, (0, 0, self.padding, self.padding, self.padding, self.padding))
        windows = x.unfold(1, self.kernel, self.stride).unfold(2, self.kernel, self.stride)
        return windows.flatten(3)  # (B, h, w, C, kernel, kernel) -> (B, h, w, C * kernel ** 2)


class TokenTransformer(nn.Module):
    """T2T-ViT's token transformer, (B, H, W, C_in) -> (B, H, W, C): as the width changes, the shortcut is v.

    `local`, a map of the new width, joins behind the attention, in front of the MLP.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int,
        attention: nn.Module,
        drop: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.norm1 = nn.LayerNorm(in_dim, device=device, dtype=dtype)
        self.kqv = nn.Linear(in_dim, 3 * dim, device=device, dtype=dtype)
        self.attention = attention
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.norm2 = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.mlp = Mlp(dim, dim, drop=(0.0, drop), device=device, dtype=dtype)

    def forward(self, x: Tensor, local: Optional[Tensor] = None) -> Tensor:
        batch, height, width, _ = x.shape
        k, q, v = self.kqv(self.norm1(x)).flatten(1, 2).chunk(3, dim=-1)  # (B, H*W, C) each
        y = v + self.drop(self.proj(self.attention(q, k, v)))
        y = y.view(batch, height, width, -1)
        if local is not None:
            y = y + local
        return y + self.mlp(self.norm2(y))
