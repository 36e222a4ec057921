"""CeiT's fused forms."""

from typing import Any

from torch import nn

from weft.fast.swap import Fused, fused, is_exactly
from weft.fast.tape.attention import attention, is_standard_attention
from weft.fast.tape.blocks import is_layer_norm, is_linear
from weft.fast.tape.linear import linear, norm_linears
from weft.fast.tape.ops import (
    activate,
    add_branch,
    are_idle,
    batch_norm,
    conv_norm,
    is_conv,
    is_depthwise,
    is_norm,
    is_standard_drop_path,
    keep_factors,
    max_pool,
    moments,
    norm_conv,
    norm_map,
    norm_tokens,
    recompute_norm,
    uses_batch_statistics,
)
from weft.fast.tape.tape import Tape, Var
from weft.kernels.ops.depthwise import depthwise_forward
from weft.models import ceit
from weft.models.layers import ConvNorm, MaxPool


@fused(ceit.Image2Tokens)
class FusedImage2Tokens(Fused, ceit.Image2Tokens):
    @classmethod
    def fits(cls, module: Any) -> bool:
        layers = list(module.convs)
        known = all(is_exactly(layer, ConvNorm) and is_conv(layer.conv) and is_norm(layer.bn) for layer in layers)
        return bool(layers) and known and is_exactly(module.pool, MaxPool, nn.Identity)

    def steps(self, t: Tape, x: Var) -> Var:
        for layer in self.convs:
            x = conv_norm(t, x, layer.conv, layer.bn, layer.act)  # pyright: ignore[reportArgumentType]
        return x if isinstance(self.pool, nn.Identity) else max_pool(t, x, self.pool.stride)


@fused(ceit.Block)
class FusedCeiTBlock(Fused, ceit.Block):
    """A block without any option: LeFF with its convolution and its norms."""

    MIN_ELEMENTS = 2**23

    @classmethod
    def fits(cls, module: Any) -> bool:
        first, middle, last = module.leff.linear1, module.leff.dwconv, module.leff.linear2
        if not is_exactly(middle, ConvNorm) or not is_exactly(module.leff, ceit.LeFF):
            return False
        norms = is_norm(first.bn) and is_norm(middle.bn) and is_norm(last.bn)
        layers = is_linear(first.linear, last.linear) and is_conv(middle.conv) and is_depthwise(middle.conv)
        known = norms and layers and is_standard_attention(module.attn) and is_standard_drop_path(module.drop_path)
        return known and is_layer_norm(module.norm1, module.norm2)

    def ready(self, *inputs: Any) -> bool:
        return are_idle(self.attn.attn_drop, self.attn.proj_drop)

    def steps(self, t: Tape, x: Var, cls: Var) -> tuple[Var, Var | None]:
        t.casts.prepare(self.attn.qkv, self.attn.proj, self.leff.linear1.linear, self.leff.linear2.linear)
        x, cls, z = norm_tokens(t, self.norm1, x, cls)  # pyright: ignore[reportAssignmentType]  as it came
        y = attention(t, z, self.attn, recompute_norm(self.norm1, x, cls, t.dtype, joined=True))
        x, new_cls, z, z_cls = norm_map(t, self.norm2, x, cls, y, keep_factors(self.drop_path, x.value))
        y = leff(t, self.leff, z, recompute_norm(self.norm2, x, None, t.dtype, joined=False))
        return add_branch(t, x, new_cls, y, z_cls, keep_factors(self.drop_path, x.value))


def leff(t: Tape, module: ceit.LeFF, x: Var, recompute: Any) -> Var:
    """In training neither of the two maps of width e C that BatchNorm and GELU give is kept."""
    first, conv, last = module.linear1, module.dwconv, module.linear2
    assert conv is not None
    hidden = linear(t, x, first.linear, recompute, before_norm=uses_batch_statistics(first.bn))
    if not t.grad_enabled and isinstance(conv.bn, nn.Identity):  # in the copies that `weft.fuse` makes
        filters = conv.conv.weight, conv.conv.bias, None, None, conv.conv.stride[0]
        hidden = t(depthwise_forward, hidden, *filters, first.act, conv.act)
        return activate(t, linear(t, hidden, last.linear), last.act)
    if not uses_batch_statistics(conv.bn):
        hidden = conv_norm(t, batch_norm(t, hidden, first.bn, first.act), conv.conv, conv.bn, conv.act)
        return batch_norm(t, linear(t, hidden, last.linear), last.bn, last.act)
    hidden = norm_conv(t, hidden, first.bn, first.act, conv.conv)
    found, before_norm = [moments(hidden, conv.bn)], uses_batch_statistics(last.bn)
    (y,) = norm_linears(t, [hidden], found, [conv.bn], conv.act, [last.linear], before_norm)
    return batch_norm(t, y, last.bn, last.act)
