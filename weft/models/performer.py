"""The step that T2T-ViT and ViTAE share: tokens of another width by linear attention, and T2T-ViT's soft split."""

import math
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from weft.kernels.performer import performer, performer_attention
from weft.models.layers import GELU, LayerNorm, norm_tokens, pad_to_multiple


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
        return performer(kqv, self.w)


class SoftmaxAttention(nn.Module):
    """Ordinary attention with one head over (B, N, C) tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.norm1 = LayerNorm(in_dim, device=device, dtype=dtype)
        self.kqv = nn.Linear(in_dim, 3 * dim, device=device, dtype=dtype)
        self.attention = attention
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.drop = nn.Dropout(drop)
        self.norm2 = LayerNorm(dim, device=device, dtype=dtype)
        self.mlp = Mlp(dim, dim, act_layer=GELU, drop=(0.0, drop), device=device, dtype=dtype)

    def forward(self, x: Tensor, local: Optional[Tensor] = None) -> Tensor:
        if torch.jit.is_scripting():
            z = self.norm1(x).flatten(1, 2)
        else:  # not compiled by TorchScript
            _, _, z = norm_tokens(self.norm1, x, None)  # (B, H*W, C_in)
        y, v = self.attention.mix(self.kqv(z))  # (B, H*W, C) each  # pyright: ignore[reportCallIssue]
        shortcut = v.view(x.shape[0], x.shape[1], x.shape[2], v.shape[2])
        if local is not None:
            shortcut = shortcut + local
        y = self.drop(self.proj(y))
        if torch.jit.is_scripting():
            x = shortcut + y.view(shortcut.shape)
            z = self.norm2(x).flatten(1, 2)
        else:  # not compiled by TorchScript
            x, _, z = norm_tokens(self.norm2, shortcut, None, y)
        return x + self.mlp(z).view(x.shape)
