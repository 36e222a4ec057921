"""CvT's fused forms."""

from typing import Any

from torch import nn

from weft.fast.inference.packed_linear import LINEAR_TYPES
from weft.fast.swap import Fused, fused, is_exactly
from weft.fast.tape.attention import CrossAttention
from weft.fast.tape.blocks import is_layer_norm, is_standard_mlp, run_mlp
from weft.fast.tape.linear import linear, linears
from weft.fast.tape.ops import (
    add_branch,
    are_idle,
    as_affine,
    batch_norm,
    batch_norm_tokens,
    cast,
    convolve,
    is_conv,
    is_depthwise,
    is_norm,
    is_standard_drop_path,
    keep_factors,
    layer_norm,
    norm_map,
    norm_tokens,
    share_mode,
    uses_batch_statistics,
)
from weft.fast.tape.tape import Tape, Var
from weft.kernels.ops.attention import MOST_KEYS, attention_forward, suits_heads
from weft.kernels.ops.qkv import qkv_forward
from weft.models import cvt
from weft.models.layers import ConvEmbed, ConvNorm

NONE = (None, None, None)


def is_projection(*branches: Any) -> bool:
    """Whether these three are the depth-wise ConvNorms of q, k and v that one kernel computes."""
    q, k, v = branches
    if not all(is_exactly(b, ConvNorm) and is_conv(b.conv) and is_depthwise(b.conv) for b in branches):
        return False
    if len({type(b.bn) for b in branches}) > 1 or not all(is_norm(b.bn) for b in branches):
        return False
    return q.conv.stride == (1, 1) and k.conv.stride == v.conv.stride and q.conv.kernel_size == k.conv.kernel_size


def project(t: Tape, x: Var, cls: Var | None, branches: Any) -> tuple[Var, ...]:
    """The depth-wise halves of the three projections with their norms, as tokens."""
    x = cast(t, x, t.dtype)
    weights, biases = [b.conv.weight for b in branches], [b.conv.bias for b in branches]
    stride = branches[1].conv.stride[0]
    folded = type(branches[0].bn) is nn.Identity
    if folded or not (t.grad_enabled or uses_batch_statistics(branches[0].bn)):
        scales, shifts = (NONE, NONE) if folded else zip(*(as_affine(b.bn) for b in branches), strict=True)
        cls = None if cls is None else cast(t, cls, t.dtype)
        return t(qkv_forward, x, cls, *weights, *biases, *scales, *shifts, stride)
    raw = t(qkv_forward, x, None, *weights, *biases, *NONE, *NONE, stride)
    pairs = zip(raw, (b.bn for b in branches), strict=True)
    return tuple(batch_norm(t, y, bn) if cls is None else batch_norm_tokens(t, y, cls, bn) for y, bn in pairs)


@fused(ConvEmbed)
class FusedConvEmbed(Fused, ConvEmbed):
    """Convolutional Token Embedding, where no padding is needed."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        return is_layer_norm(module.norm) and is_conv(module.proj)

    def ready(self, *inputs: Any) -> bool:
        return inputs[0].shape[1] % self.multiple == 0 and inputs[0].shape[2] % self.multiple == 0

    def steps(self, t: Tape, x: Var) -> Var:
        return layer_norm(t, convolve(t, x, self.proj), self.norm)


@fused(cvt.Block)
class FusedCvTBlock(Fused, cvt.Block):
    """A block with Convolutional Projections."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        attn = module.attn
        branches = (attn.conv_proj_q, attn.conv_proj_k, attn.conv_proj_v)
        layers = (attn.proj_q, attn.proj_k, attn.proj_v, attn.proj)
        known = type(attn) is cvt.Attention and is_projection(*branches)
        known = known and all(type(layer) in LINEAR_TYPES for layer in layers)
        usual = is_standard_mlp(module.mlp) and is_standard_drop_path(module.drop_path)
        return known and usual and is_layer_norm(module.norm1, module.norm2)

    def ready(self, *inputs: Any) -> bool:
        attn: Any = self.attn
        if not share_mode(attn.conv_proj_q.bn, attn.conv_proj_k.bn, attn.conv_proj_v.bn):
            return False
        dropped = attn.attn_drop > 0 and attn.training
        return not dropped and are_idle(attn.proj_drop, self.mlp.drop1, self.mlp.drop2)

    def steps(self, t: Tape, x: Var, cls: Var | None) -> tuple[Var, Var | None]:
        attn: Any = self.attn
        t.casts.prepare(attn.proj_q, attn.proj_k, attn.proj_v, attn.proj, self.mlp.fc1, self.mlp.fc2)
        x, cls, z, z_cls = norm_map(t, self.norm1, x, cls)
        branches = (attn.conv_proj_q, attn.conv_proj_k, attn.conv_proj_v)
        q, k, v = linears(t, project(t, z, z_cls, branches), (attn.proj_q, attn.proj_k, attn.proj_v))
        y = linear(t, attend(t, q, k, v, attn.num_heads, attn.scale), attn.proj)
        x, cls, z = norm_tokens(t, self.norm2, x, cls, y, keep_factors(self.drop_path, x.value))
        return add_branch(t, x, cls, run_mlp(t, z, self.mlp), None, keep_factors(self.drop_path, x.value))


def attend(t: Tape, q: Var, k: Var, v: Var, heads: int, scale: float) -> Var:
    """In inference all keys of a head fit into one tile."""
    if not t.grad_enabled and k.shape[1] <= MOST_KEYS and suits_heads(q.shape[2] // heads):
        return t(attention_forward, q, k, v, heads, scale)
    return t(CrossAttention, q, k, v, heads, scale)
