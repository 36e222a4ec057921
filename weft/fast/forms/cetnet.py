"""CETNet's fused forms: LEWin blocks, Swin's blocks among its hosts, and convolutional embeddings."""

from typing import Any

from timm.layers import BatchNormAct2d
from torch import nn

from weft.fast.forms.cvt import NONE, is_projection, project
from weft.fast.swap import Fused, fused, is_exactly
from weft.fast.tape.blocks import activation_of, is_layer_norm, is_linear, is_standard_mlp, run_mlp
from weft.fast.tape.linear import linear, linears, norm_linears
from weft.fast.tape.ops import (
    Chunk,
    add_branch,
    are_idle,
    batch_norm,
    cast,
    conv_norm,
    convolve,
    is_batch_norm,
    is_conv,
    is_norm,
    is_standard_drop_path,
    keep_factors,
    layer_norm,
    moments,
    norm_conv,
    norm_map,
    norm_tokens,
    reshape_output,
    share_mode,
    uses_batch_statistics,
)
from weft.fast.tape.tape import Tape, Var
from weft.kernels.ops.qkv import qkv_forward
from weft.kernels.ops.window_attention import fits, window_attention
from weft.models import ce, ce_hosts, cetnet
from weft.models._timm import ConvBnAct, DepthwiseSeparableConv, EdgeResidual, InvertedResidual
from weft.models.layers import ConvNorm


class FusedWindows(Fused):
    """A block that attends inside windows, then the MLP."""

    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    mlp: Any
    drop_path: Any

    def layers(self) -> tuple[Any, ...]:
        """The linear layers of the attention."""
        raise NotImplementedError

    def attend(self, t: Tape, z: Var) -> Var:
        """The attention of the normed map, which stays one."""
        raise NotImplementedError

    def steps(self, t: Tape, x: Var) -> Var:
        t.casts.prepare(*self.layers(), self.mlp.fc1, self.mlp.fc2)
        x, _, z, _ = norm_map(t, self.norm1, x)
        y = reshape_output(self.attend(t, z), z.shape[0], -1, z.shape[3])  # (B, H*W, C)
        x, _, z = norm_tokens(t, self.norm2, x, None, y, keep_factors(self.drop_path, x.value))
        return add_branch(t, x, None, run_mlp(t, z, self.mlp), None, keep_factors(self.drop_path, x.value))[0]


@fused(cetnet.LEWinBlock)
class FusedLEWinBlock(FusedWindows, cetnet.LEWinBlock):
    attn: cetnet.LEWinAttention

    @classmethod
    def fits(cls, module: Any) -> bool:
        attn = module.attn
        branches, layers = (attn.conv_q, attn.conv_k, attn.conv_v), (attn.q, attn.k, attn.v, attn.proj)
        local = is_projection(*branches) if attn.has_convs else all(type(b) is nn.Identity for b in branches)
        conv = module.conv
        before = type(conv) is nn.Identity or (is_exactly(conv, ConvNorm) and is_conv(conv.conv) and is_norm(conv.bn))
        return local and before and is_linear(*layers) and fits_windows(attn) and is_standard_block(module)

    def ready(self, *inputs: Any) -> bool:
        attn = self.attn
        if attn.has_convs and not share_mode(attn.conv_q.bn, attn.conv_k.bn, attn.conv_v.bn):
            return False
        dropped = attn.attn_drop > 0 and attn.training
        return not dropped and are_idle(attn.proj_drop, self.mlp.drop1, self.mlp.drop2)

    def steps(self, t: Tape, x: Var) -> Var:
        if not isinstance(self.conv, nn.Identity):
            x = conv_norm(t, x, self.conv.conv, self.conv.bn, "none")
        return super().steps(t, x)

    def layers(self) -> tuple[Any, ...]:
        return self.attn.q, self.attn.k, self.attn.v, self.attn.proj

    def attend(self, t: Tape, z: Var) -> Var:
        attn = self.attn
        q, k, v = (reshape_output(y, *z.shape) for y in self.project(t, z))
        table = attn.rel_pos.relative_position_bias_table
        return linear(t, t(window_attention, q, k, v, table, attn.window, attn.shifted), attn.proj)

    def project(self, t: Tape, z: Var) -> tuple[Var, ...]:
        """q, k and v; in training what the norms give is not kept."""
        attn = self.attn
        branches: Any = (attn.conv_q, attn.conv_k, attn.conv_v)
        layers, z = (attn.q, attn.k, attn.v), cast(t, z, t.dtype)
        if not attn.has_convs:
            return linears(t, (z, z, z), layers)
        weights, biases = [b.conv.weight for b in branches], [b.conv.bias for b in branches]
        norms = [b.bn for b in branches]
        if not t.grad_enabled and not uses_batch_statistics(*norms):
            return linears(t, project(t, z, None, branches), layers)
        raw = t(qkv_forward, z, None, *weights, *biases, *NONE, *NONE, 1)
        if uses_batch_statistics(*norms):
            found = [moments(y, bn) for y, bn in zip(raw, norms, strict=True)]
            return norm_linears(t, raw, found, norms, "none", layers)
        return linears(t, [batch_norm(t, y, bn) for y, bn in zip(raw, norms, strict=True)], layers)


@fused(ce_hosts.SwinBlock)
class FusedSwinBlock(FusedWindows, ce_hosts.SwinBlock):
    @classmethod
    def fits(cls, module: Any) -> bool:
        attn = module.attn
        return is_linear(attn.qkv, attn.proj) and fits_windows(attn, module.window) and is_standard_block(module)

    def ready(self, *inputs: Any) -> bool:
        dropped = self.training and self.attn.attn_drop.p > 0  # whose rate is read by the block, in the block's mode
        return not dropped and are_idle(self.attn.proj_drop, self.mlp.drop1, self.mlp.drop2)

    def layers(self) -> tuple[Any, ...]:
        return self.attn.qkv, self.attn.proj

    def attend(self, t: Tape, z: Var) -> Var:
        attn = self.attn
        q, k, v = t(Chunk, linear(t, z, attn.qkv), 3)
        y = t(window_attention, q, k, v, attn.relative_position_bias_table, self.window, self.shifted)
        return linear(t, y, attn.proj)


def is_standard_block(block: Any) -> bool:
    """Whether what is around the attention is what a fused block knows."""
    usual = is_standard_mlp(block.mlp) and is_standard_drop_path(block.drop_path)
    return usual and is_layer_norm(block.norm1, block.norm2)


def fits_windows(attn: Any, window: int | None = None) -> bool:
    """Whether the kernels know windows and heads of this size."""
    layer = attn.proj
    return fits(layer.in_features // attn.num_heads, attn.window if window is None else window)


# Convolutional embedding --------------------------------------------------------------------------------------------

LAYERS = {  # of timm's units: convolutions and the norms behind them
    ConvBnAct: (("conv", "bn1"),),
    DepthwiseSeparableConv: (("conv_dw", "bn1"), ("conv_pw", "bn2")),
    InvertedResidual: (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")),
    EdgeResidual: (("conv_exp", "bn1"), ("conv_pwl", "bn2")),
}


def layers_of(unit: Any) -> list[tuple[Any, Any]]:
    return [(getattr(unit, conv), getattr(unit, norm)) for conv, norm in LAYERS[type(unit)]]


def is_known_unit(unit: Any) -> bool:
    if type(unit) not in LAYERS or not isinstance(getattr(unit, "se", nn.Identity()), nn.Identity):
        return False
    if not isinstance(getattr(unit, "aa", None) or nn.Identity(), nn.Identity):
        return False
    known = all(is_conv(conv) and parts_of(norm) is not None for conv, norm in layers_of(unit))
    return known and is_standard_drop_path(unit.drop_path)


def parts_of(norm: Any) -> tuple[nn.Module, str] | None:
    """BatchNorm and activation of timm's layer for both, of which `weft.fuse` leaves the activation alone."""
    if type(norm) is not BatchNormAct2d:
        act = "none" if isinstance(norm, nn.Identity) else activation_of(norm)
        return None if act is None else (FOLDED, act)
    behind: Any = norm.act
    act = "none" if isinstance(behind, nn.Identity) else activation_of(behind)
    known = is_batch_norm(norm, BatchNormAct2d) and isinstance(norm.drop, nn.Identity)
    return (norm, act) if known and act is not None else None


FOLDED = nn.Identity()


@fused(ce.ConvolutionalEmbedding)
class FusedConvolutionalEmbedding(Fused, ce.ConvolutionalEmbedding):
    @classmethod
    def fits(cls, module: Any) -> bool:
        known = all(map(is_known_unit, module.units)) and (type(module.proj) is nn.Identity or is_linear(module.proj))
        return known and is_layer_norm(module.norm)

    def steps(self, t: Tape, x: Var) -> Var:
        for module in self.units:
            x = unit(t, x, module)
        if isinstance(self.proj, nn.Linear):
            x = linear(t, x, self.proj)
        return layer_norm(t, x, self.norm)


def unit(t: Tape, x: Var, module: Any) -> Var:
    """A unit whose convolutions take BatchNorm, GELU and, where no GELU stands between, the shortcut with them."""
    shortcut = x
    layers: Any = [(conv, *(parts_of(norm) or ())) for conv, norm in layers_of(module)]
    *firsts, (conv, norm, act) = layers
    if len(firsts) == 2 and uses_batch_statistics(firsts[0][1], firsts[1][1]):  # the second is depth-wise
        (expand, norm1, act1), (conv_dw, norm2, act2) = firsts
        x = batch_norm(t, norm_conv(t, convolve(t, x, expand), norm1, act1, conv_dw), norm2, act2)
    else:
        for first, norm1, act1 in firsts:
            x = conv_norm(t, x, first, norm1, act1)
    if not module.has_skip:
        return conv_norm(t, x, conv, norm, act)
    keep = keep_factors(module.drop_path, x.value)
    if act == "none":
        return conv_norm(t, x, conv, norm, act, shortcut, keep)
    return add_branch(t, shortcut, None, conv_norm(t, x, conv, norm, act), None, keep)[0]
