"""The released networks as plainly as their papers' code writes them, under the released parameter names.

They are the yardstick for Weft's own: one glued token sequence, NCHW convolutions, explicit softmax, square grids.
"""

import math

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn
from transformers import CvtConfig, CvtForImageClassification

from weft.models.weights.layouts import HUGGING_FACE_CVT, rename


def attention(x_q: Tensor, x_kv: Tensor, qkv: nn.Linear, proj: nn.Linear, heads: int) -> Tensor:
    """Of the last tokens, `x_q`, to all of them, `x_kv`."""
    batch, count, dim = x_kv.shape
    joint = F.linear(x_kv, qkv.weight, qkv.bias).reshape(batch, count, 3, heads, dim // heads)
    q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, d)
    q = q[:, :, count - x_q.shape[1] :]
    y = (q @ k.transpose(-2, -1) * (dim // heads) ** -0.5).softmax(-1) @ v
    return proj(y.transpose(1, 2).reshape(x_q.shape))


class Namespace(nn.Module):
    """Holds modules under the names of a checkpoint."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


def drop_paths(rate: float, depth: int) -> list[nn.Module]:
    """Stochastic depth that grows with the blocks, as in training; without a rate there is none."""
    return [DropPath(rate * i / max(depth - 1, 1)) for i in range(depth)]


def _attn(dim: int) -> Namespace:
    return Namespace(qkv=nn.Linear(dim, 3 * dim), proj=nn.Linear(dim, dim))


class OfficialCeiT(nn.Module):
    """The released CeiT, forward pass and parameter names."""

    def __init__(
        self, dim: int, heads: int, depth: int = 12, img_size: int = 224, classes: int = 1000, drop_path: float = 0.0
    ):
        super().__init__()
        self.heads = heads
        self.i2t = Namespace(
            backbone=Namespace(conv=nn.Conv2d(3, 64, 7, 2, 3, bias=False), bn=nn.BatchNorm2d(64)),
            proj=nn.Conv2d(64, dim, 4, 4),
        )
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (img_size // 16) ** 2 + 1, dim))
        self.pos_layer_embed = nn.Parameter(torch.randn(1, depth, dim))
        self.blocks = nn.ModuleList(
            Namespace(
                norm1=nn.LayerNorm(dim, eps=1e-6),
                attn=_attn(dim),
                norm2=nn.LayerNorm(dim, eps=1e-6),
                leff=Namespace(
                    conv1=nn.Conv2d(dim, 4 * dim, 1),
                    bn1=nn.BatchNorm2d(4 * dim),
                    conv2=nn.Conv2d(4 * dim, 4 * dim, 3, padding=1, groups=4 * dim),
                    bn2=nn.BatchNorm2d(4 * dim),
                    conv3=nn.Conv2d(4 * dim, dim, 1),
                    bn3=nn.BatchNorm2d(dim),
                ),
                drop_path=drop,
            )
            for drop in drop_paths(drop_path, depth)
        )
        self.lca = Namespace(
            norm1=nn.LayerNorm(dim, eps=1e-6),
            attn=_attn(dim),
            norm2=nn.LayerNorm(dim, eps=1e-6),
            feedforward=Namespace(fc1=nn.Linear(dim, 4 * dim), fc2=nn.Linear(4 * dim, dim)),
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)

    @staticmethod
    def leff(m: nn.Module, tokens: Tensor) -> Tensor:
        cls, x = tokens[:, :1], tokens[:, 1:]
        side = math.isqrt(x.shape[1])
        x = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        x = F.gelu(m.bn1(m.conv1(x)))
        x = F.gelu(m.bn2(m.conv2(x)))
        x = m.bn3(m.conv3(x))
        return torch.cat([cls, x.flatten(2).transpose(1, 2)], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.i2t.backbone.bn(self.i2t.backbone.conv(x))
        x = self.i2t.proj(F.max_pool2d(x, 3, 2, 1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        class_tokens = []
        for block in self.blocks:
            y = block.norm1(x)
            x = x + block.drop_path(attention(y, y, block.attn.qkv, block.attn.proj, self.heads))
            x = x + block.drop_path(self.leff(block.leff, block.norm2(x)))
            class_tokens.append(x[:, 0])
        z = torch.stack(class_tokens, dim=1) + self.pos_layer_embed
        y = self.lca.norm1(z)
        last = z[:, -1:] + attention(y[:, -1:], y, self.lca.attn.qkv, self.lca.attn.proj, self.heads)
        last = last + self.lca.feedforward.fc2(F.gelu(self.lca.feedforward.fc1(self.lca.norm2(last))))
        return self.head(self.norm(last))[:, 0]


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def hugging_face_cvt(quick_gelu: bool = False, **config) -> CvtForImageClassification:
    """transformers' CvT; with `quick_gelu` it computes what the released code computes."""
    model = CvtForImageClassification(CvtConfig(**{"num_labels": 10, **config}))
    if quick_gelu:
        for module in model.modules():
            if hasattr(module, "activation"):
                module.activation = QuickGELU()
    return model


def official_cvt_keys(hugging_face: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Hugging Face state dict under the names of the released .pth files."""
    native = rename(HUGGING_FACE_CVT)(hugging_face)
    return {k.replace("stages.", "stage").replace(".embed.", ".patch_embed."): v for k, v in native.items()}
