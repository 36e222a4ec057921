"""The released ViTAE and the token performer it shares with T2T-ViT, written plainly under their published names."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.published import Namespace, attention, drop_paths


def released_performer(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The formula of the released code as it stands, without any care for the range of numbers."""

    def features(u: Tensor) -> Tensor:
        return torch.exp(torch.einsum("bti,mi->btm", u, w) - u.square().sum(-1, keepdim=True) / 2) / math.sqrt(len(w))

    phi_q, phi_k = features(q), features(k)
    total = torch.einsum("bti,bi->bt", phi_q, phi_k.sum(1)).unsqueeze(2)
    return torch.einsum("bti,bni->btn", phi_q, torch.einsum("bin,bim->bnm", v, phi_k)) / (total + 1e-8)


def token_performer(m: nn.Module, tokens: Tensor, local: Tensor | float) -> Tensor:
    k, q, v = m.kqv(m.norm1(tokens)).chunk(3, dim=-1)
    y = v + m.dp(m.proj(released_performer(q, k, v, m.w))) + local
    return y + m.dp(m.mlp(m.norm2(y)))


def to_map(tokens: Tensor) -> Tensor:
    side = math.isqrt(tokens.shape[1])
    return tokens.transpose(1, 2).reshape(len(tokens), -1, side, side)


def to_tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


class TokenPerformer(Namespace):
    """The parameters of one token performer, under the names both released codes give them."""

    def __init__(self, in_dim: int, dim: int, drop: float = 0.0):
        super().__init__(
            dp=nn.Dropout(drop),
            norm1=nn.LayerNorm(in_dim),
            kqv=nn.Linear(in_dim, 3 * dim),
            proj=nn.Linear(dim, dim),
            norm2=nn.LayerNorm(dim),
            mlp=nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)),
        )
        self.w = nn.Parameter(torch.randn(dim // 2, dim), requires_grad=False)


def prm(in_chs: int, dim: int, kernel: int, stride: int, paddings: list[int]) -> nn.Module:
    convs = [
        nn.Sequential(nn.Conv2d(in_chs, dim, kernel, stride, padding, dilation), nn.GELU())
        for dilation, padding in enumerate(paddings, 1)
    ]
    return Namespace(convs=nn.ModuleList(convs))


def rc_pcm(in_chs: int, hidden: int, dim: int, strides: tuple[int, int, int]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_chs, hidden, 3, strides[0], 1),
        nn.SiLU(),
        nn.Conv2d(hidden, hidden, 3, strides[1], 1),
        nn.BatchNorm2d(hidden),
        nn.SiLU(),
        nn.Conv2d(hidden, dim, 3, strides[2], 1),
        nn.SiLU(),
    )


def nc_pcm(dim: int, hidden: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(dim, hidden, 3, 1, 1, groups=groups),
        nn.BatchNorm2d(hidden),
        nn.SiLU(),
        nn.Conv2d(hidden, dim, 3, 1, 1, groups=groups),
        nn.BatchNorm2d(dim),
        nn.SiLU(),
        nn.Conv2d(dim, dim, 3, 1, 1, groups=groups),
        nn.SiLU(),
    )


class OfficialViTAE(nn.Module):
    """The released ViTAE, forward pass and parameter names."""

    def __init__(self, prm_dims, token_dims, depth, heads, ratio, groups, classes=10, *, rc_drop=0.0, drop_path=0.0):
        super().__init__()
        self.heads = heads
        (e1, e2, e3), (t1, t2, dim) = prm_dims, token_dims
        cells = [
            Namespace(
                norm1=nn.LayerNorm(dim, eps=1e-6),
                attn=Namespace(qkv=nn.Linear(dim, 3 * dim), proj=nn.Linear(dim, dim)),
                PCM=nc_pcm(dim, dim * ratio, groups),
                norm2=nn.LayerNorm(dim, eps=1e-6),
                mlp=Namespace(fc1=nn.Linear(dim, dim * ratio), fc2=nn.Linear(dim * ratio, dim)),
                drop_path=drop,
            )
            for drop in drop_paths(drop_path, depth)
        ]
        rc1 = dict(
            PRM=prm(3, e1, 7, 4, [2, 5, 8, 11]),
            PCM=rc_pcm(3, e1, t1, (2, 2, 1)),
            attn=TokenPerformer(4 * e1, t1, rc_drop),
        )
        rc2 = dict(
            PRM=prm(t1, e2, 3, 2, [1, 2, 3]),
            PCM=rc_pcm(t1, e2, t2, (2, 1, 1)),
            attn=TokenPerformer(3 * e2, t2, rc_drop),
        )
        self.layers = nn.ModuleList(
            [
                Namespace(RC=Namespace(**rc1)),
                Namespace(RC=Namespace(**rc2)),
                Namespace(RC=Namespace(PRM=prm(t2, e3, 3, 2, [1, 2])), NC=nn.ModuleList(cells)),
            ]
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            tokens = to_tokens(torch.cat([conv(x) for conv in layer.RC.PRM.convs], dim=1))
            if i < 2:
                x = to_map(token_performer(layer.RC.attn, tokens, to_tokens(layer.RC.PCM(x))))
        x = tokens
        for cell in self.layers[2].NC:
            local = cell.drop_path(to_tokens(cell.PCM(to_map(x))))
            y = cell.norm1(x)
            x = x + cell.drop_path(attention(y, y, cell.attn.qkv, cell.attn.proj, self.heads)) + local
            x = x + cell.drop_path(cell.mlp.fc2(F.gelu(cell.mlp.fc1(cell.norm2(x)))))
        return self.head(x.mean(1))


TINY = ((64, 64, 128), (64, 64, 256), 7, 4, 2, 64)
SMALL = ((64, 64, 192), (96, 192, 384), 14, 6, 3, 96)
SMALL_TEST = ((8, 6, 16), (12, 10, 32), 2, 2, 3, 16)  # sizes in which no two widths are equal
SMALL_ARGS = dict(prm_dims=(8, 6, 16), token_dims=(12, 10, 32), depth=2, num_heads=2, mlp_ratio=3.0, groups=16)
