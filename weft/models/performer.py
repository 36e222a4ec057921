"""The step that T2T-ViT and ViTAE share: tokens of another width, by linear attention or not, and the soft split."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import Mlp, register_notrace_function
from torch import Tensor, nn

from weft.models.layers import LayerNorm, pad_to_multiple


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    if device.type == "meta":  # where MACs are counted; it knows no autocast
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


@register_notrace_function
def performer_attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Linear attention over (B, N, C) tokens by the positive random features of the Performer.

    phi(u) = exp(w u - |u|^2 / 2) / sqrt(m) with a fixed (m, C) matrix w, and

        y = phi(q) (sum_t phi(k_t)^T v_t) / (phi(q) sum_t phi(k_t) + 1e-8).

    Computed in float32, also under autocast and in half-precision models. The features grow up to exp(m / 2) and shrink
    without limit, so float32 alone is not enough: everything stays a logarithm until a softmax takes it. That of the
    keys runs over the tokens, that of a query over the features and, as one more, the 1e-8.
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
    share = log_k.log_softmax(1)  # the logarithm of what each token has of a feature
    log_total = log_k[:, :1] - share[:, :1]  # (B, 1, m): the logarithm of sum_t phi(k_t), from any token
    context = share.exp().transpose(1, 2) @ v  # (B, m, C)
    log_q = torch.baddbmm(log_total, q, w_t)  # (B, N, m); without |q|^2 / 2, which all features share
    log_epsilon = q.square().sum(2, keepdim=True) / 2 + math.log(1e-8 * w.shape[0])  # (B, N, 1), so it goes here
    weights = torch.cat([log_q, log_epsilon], dim=2).softmax(2)  # (B, N, m + 1)
    return (weights[:, :, :-1] @ context).to(dtype)


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

    def mix(self, kqv: Tensor) -> tuple[Tensor, Tensor]:
        """The same for (B, N, 3C) tokens that hold k, q and v side by side; and v."""
        k, q, v = kqv.chunk(3, dim=-1)
        return performer_attention(q, k, v, self.w), v


class SoftmaxAttention(nn.Module):
    """Ordinary attention over (B, N, C) tokens, scaled by the width of a head unless told otherwise."""

    def __init__(self, dim: int, num_heads: int = 1, scale: float | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.scale: float = (dim // num_heads) ** -0.5 if scale is None else scale

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, heads, N, C / heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(self.heads(q), self.heads(k), self.heads(v), scale=self.scale)
        return y.transpose(1, 2).flatten(2)

    def mix(self, kqv: Tensor) -> tuple[Tensor, Tensor]:
        """The same for (B, N, 3C) tokens that hold k, q and v side by side; and v."""
        k, q, v = kqv.chunk(3, dim=-1)
        return self.forward(q, k, v), v


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
        kqv_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.norm1 = LayerNorm(in_dim, device=device, dtype=dtype)
        self.kqv = nn.Linear(in_dim, 3 * dim, bias=kqv_bias, device=device, dtype=dtype)
        self.attention = attention
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.norm2 = LayerNorm(dim, device=device, dtype=dtype)
        self.mlp = Mlp(dim, dim, drop=(0.0, drop), device=device, dtype=dtype)

    def forward(self, x: Tensor, local: Optional[Tensor] = None) -> Tensor:
        y, v = self.attention.mix(self.kqv(self.norm1(x).flatten(1, 2)))  # (B, H*W, C) each  # pyright: ignore
        y = v + self.drop(self.proj(y))
        x = y.view(x.shape[0], x.shape[1], x.shape[2], y.shape[2])
        if local is not None:
            x = x + local
        return x + self.mlp(self.norm2(x))
