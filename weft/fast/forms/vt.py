"""The fused forms of VT's modules, and of the blocks of the ResNet in front of them.

Where a convolution makes keys, queries or values of pixels, it is applied to the few tokens that they meet instead:
q (x W^T)^T = (q W) x^T, and the mean of the values is the value of the mean. So the map is read once.
"""

from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn
from torch.nn.functional import conv_transpose2d

from weft.fast.swap import Fused, are_unmodified, fused, snapshot
from weft.fast.tape.ops import (
    FROM_MAP,
    TO_MAP,
    Permute,
    are_idle,
    conv_norm,
    is_conv,
    is_norm,
    is_standard_drop_path,
    keep_factors,
    max_pool,
)
from weft.fast.tape.tape import Tape, Var, apply_operation
from weft.kernels.ops.token_attention import (
    MOST_TOKENS,
    fits,
    pixels_to_tokens_forward,
    split,
    tokens_to_pixels_forward,
)
from weft.kernels.switch import amp_dtype
from weft.models import layers, vt, vt_resnet
from weft.models.layers import to_nchw, to_nhwc

# ResNet -------------------------------------------------------------------------------------------------------------


def is_known_block(block: Any, *layers: tuple[Any, Any]) -> bool:
    down = [] if block.downsample is None else list(block.downsample)
    extras = (getattr(block, name, None) for name in ("se", "aa", "drop_block"))
    return (
        all(is_conv(conv) and is_norm(bn) for conv, bn in layers)
        and (not down or (len(down) == 2 and is_conv(down[0]) and is_norm(down[1])))
        and all(extra is None or isinstance(extra, nn.Identity) for extra in extras)
        and all(type(getattr(block, f"act{i + 1}")) is nn.ReLU for i in range(len(layers)))
        and is_standard_drop_path(block.drop_path)
    )


class FusedResidual(Fused):
    """A block whose convolutions take BatchNorm, ReLU and, the last one, the shortcut with them; (B, C, H, W) maps."""

    LAYERS: tuple[tuple[str, str], ...]
    downsample: Any
    drop_path: Any

    @classmethod
    def fits(cls, module: Any) -> bool:
        return is_known_block(module, *cls.layers_of(module))

    @classmethod
    def layers_of(cls, block: Any) -> list[tuple[Any, Any]]:
        return [(getattr(block, conv), getattr(block, norm)) for conv, norm in cls.LAYERS]

    def ready(self, *inputs: Any) -> bool:
        return inputs[0].is_contiguous(memory_format=torch.channels_last)

    def steps(self, t: Tape, x: Var) -> Var:
        x = shortcut = t(Permute, x, TO_MAP)
        if self.downsample is not None:
            shortcut = conv_norm(t, x, self.downsample[0], self.downsample[1], "none")
        *firsts, (last, last_norm) = self.layers_of(self)
        for conv, norm in firsts:
            x = conv_norm(t, x, conv, norm, "relu")
        keep = keep_factors(self.drop_path, x.value)
        return t(Permute, conv_norm(t, x, last, last_norm, "relu", shortcut, keep), FROM_MAP)


@fused(BasicBlock)
class FusedBasicBlock(FusedResidual, BasicBlock):
    LAYERS = (("conv1", "bn1"), ("conv2", "bn2"))


@fused(Bottleneck)
class FusedBottleneck(FusedResidual, Bottleneck):
    LAYERS = (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))


@fused(layers.MaxPool)
class FusedMaxPool(Fused, layers.MaxPool):
    def steps(self, t: Tape, x: Var) -> Var:
        return max_pool(t, x, self.stride)


@fused(vt_resnet.ResNetTrunk)
class FusedResNetTrunk(Fused, vt_resnet.ResNetTrunk):
    """Its stem: convolution, BatchNorm and ReLU at the picture. What comes behind has forms of its own."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        return is_conv(module.conv1) and is_norm(module.bn1) and type(module.act1) is nn.ReLU

    def remember_parts(self) -> None:
        self.__dict__["_parts"] = snapshot([self.conv1, self.bn1, self.act1])

    def is_unmodified(self) -> bool:
        parts = self.__dict__["_parts"]
        return [part for part, *_ in parts] == [self.conv1, self.bn1, self.act1] and are_unmodified(parts, self)

    def ready(self, *inputs: Any) -> bool:
        return inputs[0].is_contiguous(memory_format=torch.channels_last)

    def steps(self, t: Tape, x: Var) -> Var:
        return t(Permute, conv_norm(t, t(Permute, x, TO_MAP), self.conv1, self.bn1, "relu"), FROM_MAP)

    def stem(self, x: Tensor) -> Tensor:
        plain = super().stem
        return plain(x) if torch.compiler.is_compiling() else self.run(plain, x)

    def forward(self, x: Tensor, last: int | None = None) -> list[Tensor]:
        return vt_resnet.ResNetTrunk.forward(self, x, last)


# VT modules ---------------------------------------------------------------------------------------------------------


class FusedTokenModule(Fused):
    """A part that reads the map once; torch differentiates it, but for one operation between tokens and pixels."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        plain = super(Fused, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        return plain(*inputs, **named) if torch.compiler.is_compiling() else self.run(plain, *inputs, **named)


def absorb(conv: vt.GroupedConv, tokens: Tensor) -> Tensor:
    """(B, L, C_out) tokens t -> t W, (B, L, C_in): t (W x + b) = (t W) x + t b for any pixel x."""
    column = to_nchw(tokens.unsqueeze(2))
    return to_nhwc(conv_transpose2d(column, conv.weight, groups=conv.groups)).flatten(1, 2)


def bias_scores(conv: vt.GroupedConv, tokens: Tensor) -> Tensor:
    """(B, L, C_out) tokens t -> t b, (B, groups, L)."""
    assert conv.bias is not None
    return (tokens * conv.bias).unflatten(2, (conv.groups, -1)).sum(dim=3).transpose(1, 2)


def pixels_to_tokens(q: Tensor, x: Tensor, scale: float) -> Tensor:
    """(B, heads, L, D) queries and (B, N, heads * D) pixels, which are keys and values -> (B, L, heads * D)."""
    dtype = amp_dtype(x)
    return apply_operation(pixels_to_tokens_forward, q.to(dtype), x.to(dtype), scale)[0]


def tokens_to_pixels(
    x: Tensor, k: Tensor, bias: Tensor | None, v: Tensor, shortcut: Tensor, keep: Tensor | None, scale: float
) -> Tensor:
    """shortcut + keep softmax(scale (x k^T + bias)) v of (B, N, heads * D) pixels and (B, heads, L, D) tokens."""
    dtype = amp_dtype(x)
    given = (x.to(dtype), k.to(dtype), bias, v.to(dtype), shortcut.to(dtype))
    return apply_operation(tokens_to_pixels_forward, *given, keep, scale)


@fused(vt.FilterTokenizer)
class FusedFilterTokenizer(FusedTokenModule, vt.FilterTokenizer):
    @classmethod
    def fits(cls, module: Any) -> bool:
        return type(module.value) in (vt.GroupedConv, nn.Identity)

    def compute(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        attention = (self.coefficients(x).flatten(1, 2) * self.scale).softmax(dim=1).transpose(1, 2)  # (B, L, H*W)
        means = attention @ x.flatten(1, 2)
        return self.token(self.value(means.unsqueeze(2)).flatten(1, 2))


@fused(vt.RecurrentTokenizer)
class FusedRecurrentTokenizer(FusedTokenModule, vt.RecurrentTokenizer):
    @classmethod
    def fits(cls, module: Any) -> bool:
        return type(module.key) is type(module.value) is vt.GroupedConv and fits(module.key.in_channels // module.heads)

    def ready(self, *inputs: Any) -> bool:
        return inputs[1].shape[1] <= MOST_TOKENS

    def compute(self, x: Tensor, tokens: Tensor) -> Tensor:
        asking = tokens.shape[1] - self.carried
        q = self.query(tokens[:, :asking])
        keys = absorb(self.key, q)
        if torch.is_grad_enabled():  # what the bias adds is the same for all pixels, but DDP wants a gradient
            keys = torch.add(keys, self.key.bias, alpha=0)  # pyright: ignore[reportArgumentType]
        means = pixels_to_tokens(split(keys, self.heads), x.flatten(1, 2), (q.shape[2] // self.heads) ** -0.5)
        new = self.token(self.value(means.unsqueeze(2)).flatten(1, 2))
        return torch.cat([new, tokens[:, asking:]], dim=1) if self.carried else new


@fused(vt.Transformer)
class FusedTransformer(FusedTokenModule, vt.Transformer):
    @classmethod
    def fits(cls, module: Any) -> bool:
        heads = module.num_heads
        widths = (module.key.out_channels // heads, module.value.out_channels // heads)
        return fits(*widths) and is_standard_drop_path(module.drop_path)

    def ready(self, *inputs: Any) -> bool:
        return inputs[0].shape[1] <= MOST_TOKENS and are_idle(self.drop)

    def compute(self, tokens: Tensor) -> Tensor:
        column = tokens.unsqueeze(2)  # (B, L, 1, CT), a map one token wide
        q, k, v = (conv(column).flatten(1, 2) for conv in (self.query, self.key, self.value))
        k, v = split(k, self.num_heads), split(v, self.num_heads)
        tokens = tokens_to_pixels(q, k, None, v, tokens, keep_factors(self.drop_path, tokens), k.shape[3] ** -0.5)
        y = self.f2(torch.relu(self.f1(tokens)))
        return tokens + self.drop_path(y)


@fused(vt.Projector)
class FusedProjector(FusedTokenModule, vt.Projector):
    @classmethod
    def fits(cls, module: Any) -> bool:
        widths = (module.query.in_channels // module.heads, module.query.out_channels // module.heads)
        return type(module.query) is vt.GroupedConv and fits(*widths) and is_standard_drop_path(module.drop_path)

    def ready(self, *inputs: Any) -> bool:
        return inputs[1].shape[1] <= MOST_TOKENS

    def compute(self, x: Tensor, tokens: Tensor) -> Tensor:
        key, value, shortcut = self.key(tokens), self.value(tokens), self.shortcut(x)  # (B, L, C) twice, a map
        keys, values = split(absorb(self.query, key), self.heads), split(value, self.heads)
        scale, keep = (key.shape[2] // self.heads) ** -0.5, keep_factors(self.drop_path, x)
        bias, pixels = bias_scores(self.query, key), x.flatten(1, 2)
        y = tokens_to_pixels(pixels, keys, bias, values, shortcut.flatten(1, 2), keep, scale)
        return y.view(shortcut.shape)
