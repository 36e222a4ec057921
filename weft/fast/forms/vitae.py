"""ViTAE's fused forms: normal cells and reduction cells."""

from typing import Any

from torch import Tensor, nn

from weft.fast.swap import Fused, fused, is_exactly
from weft.fast.tape.attention import attention, is_standard_attention
from weft.fast.tape.blocks import is_layer_norm, is_linear, is_standard_mlp, run_mlp
from weft.fast.tape.linear import linear
from weft.fast.tape.ops import (
    Cat,
    activate,
    add_branch,
    are_idle,
    cast,
    conv_norm,
    convolve,
    dropout,
    is_conv,
    is_norm,
    is_standard_drop_path,
    keep_factors,
    norm_tokens,
    reshape,
)
from weft.fast.tape.tape import Checkpointed, Tape, TapeFunction, Var
from weft.kernels.ops.performer import WIDEST, performer_forward
from weft.kernels.ops.stem import pyramid_forward, stem_backward, suits_stem
from weft.models import performer, vitae
from weft.models.layers import ConvNorm, pad_to_multiple


def is_known_pcm(pcm: Any) -> bool:
    """Whether these are ConvNorms and the places of their activations, whose norms are BatchNorms or nothing."""
    if pcm is None:
        return True
    layers = list(pcm)
    known = all(is_exactly(layer, ConvNorm) and is_conv(layer.conv) and is_norm(layer.bn) for layer in layers[::2])
    return known and all(type(place) is nn.Identity for place in layers[1::2])


def run_pcm(t: Tape, x: Var, pcm: Any) -> Var:
    for layer in list(pcm)[::2]:
        x = conv_norm(t, x, layer.conv, layer.bn, layer.act)
    return x


@fused(vitae.NormalCell)
class FusedNormalCell(Fused, vitae.NormalCell):
    MIN_ELEMENTS = 2**22  # libraries are slow at what it has

    @classmethod
    def fits(cls, module: Any) -> bool:
        known = is_known_pcm(module.pcm) and is_standard_attention(module.attn) and is_standard_mlp(module.mlp)
        return known and is_layer_norm(module.norm1, module.norm2) and is_standard_drop_path(module.drop_path)

    def ready(self, *inputs: Any) -> bool:
        return are_idle(self.attn.attn_drop, self.attn.proj_drop, self.mlp.drop1, self.mlp.drop2)

    def steps(self, t: Tape, x: Var, cls: Var | None) -> tuple[Var, Var | None]:
        t.casts.prepare(self.attn.qkv, self.attn.proj, self.mlp.fc1, self.mlp.fc2)
        x, cls, z = norm_tokens(t, self.norm1, x, cls)
        local, keep = None, None
        if self.pcm is not None:
            local, keep = run_pcm(t, x, self.pcm), keep_factors(self.drop_path, x.value)
        if local is not None and not self.late:
            x, _ = add_branch(t, x, None, local, None, keep)
        x, cls, z = norm_tokens(
            t, self.norm2, x, cls, attention(t, z, self.attn), keep_factors(self.drop_path, x.value)
        )
        x, cls = add_branch(t, x, cls, run_mlp(t, z, self.mlp), None, keep_factors(self.drop_path, x.value))
        if local is not None and self.late:
            x, _ = add_branch(t, x, None, local, None, keep)
        return x, cls


class ConvPyramid(TapeFunction):
    """Convolutions of a picture side by side: their numbers, the picture, weights, biases."""

    @staticmethod
    def run(stride: int, paddings: list[int], dilations: list[int], act: str, x: Tensor, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: len(paddings)], parameters[len(paddings) :]
        return pyramid_forward.run(x, list(weights), list(biases), stride, paddings, dilations, act)

    @staticmethod
    def forward(
        ctx: Any, stride: int, paddings: list[int], dilations: list[int], act: str, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        assert act == "none", "the gradient wants what was before the activation"
        ctx.numbers = [(stride, padding, dilation) for padding, dilation in zip(paddings, dilations, strict=True)]
        ctx.save_for_backward(x, *parameters)
        return ConvPyramid.run(stride, paddings, dilations, act, x, *parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *parameters = ctx.saved_tensors
        count = len(ctx.numbers)
        weights, biases = parameters[:count], parameters[count:]
        parts = grad.split([len(weight) for weight in weights], dim=-1)
        found = [
            stem_backward.run(part, x, weight, bias, *numbers)
            for part, weight, bias, numbers in zip(parts, weights, biases, ctx.numbers, strict=True)
        ]
        return *(None,) * 5, *(f[0] for f in found), *(f[1] for f in found)


def run_prm(t: Tape, x: Var, prm: vitae.PRM) -> Var:
    convs: Any = list(prm.convs)
    x = cast(t, x, t.dtype)
    if x.slot < 0 and suits_stem(x.value, *convs):
        act = "none" if t.grad_enabled else "gelu"
        parameters = [conv.weight for conv in convs] + [conv.bias for conv in convs]
        y = t(ConvPyramid, prm.stride, prm.paddings, prm.dilations, act, x, *parameters)
        return y if act == "gelu" else activate(t, y, "gelu")
    return activate(t, t(Cat, *(convolve(t, x, conv) for conv in convs)), "gelu")


@fused(vitae.ReductionCell)
class FusedReductionCell(Fused, vitae.ReductionCell):
    MIN_ELEMENTS = 2**22

    @classmethod
    def fits(cls, module: Any) -> bool:
        known = type(module.prm) is vitae.PRM and is_conv(*module.prm.convs)
        known = known and (type(module.proj) is nn.Identity or is_linear(module.proj))
        known = known and (module.transformer is None or is_known_transformer(module.transformer))
        return known and is_known_pcm(module.pcm)

    def ready(self, *inputs: Any) -> bool:
        return self.transformer is None or are_idle(self.transformer.mlp.drop1)

    def steps(self, t: Tape, x: Var) -> Var:
        if x.shape[1] % self.stride or x.shape[2] % self.stride:
            x = t(Checkpointed, pad_to_multiple, x, self.stride)
        y = run_prm(t, x, self.prm)  # pyright: ignore[reportArgumentType]
        if isinstance(self.proj, nn.Linear):
            y = linear(t, y, self.proj)
        if self.transformer is None:
            return y
        return run_token_transformer(t, y, None if self.pcm is None else run_pcm(t, x, self.pcm), self.transformer)


def is_known_transformer(step: Any) -> bool:
    mixers = (performer.PerformerAttention, performer.SoftmaxAttention)
    known = is_layer_norm(step.norm1, step.norm2) and is_exactly(step.attention, *mixers)
    known = known and type(step.drop) is type(step.mlp.drop2) is nn.Dropout
    return known and is_linear(step.kqv, step.proj) and is_standard_mlp(step.mlp)


def run_token_transformer(t: Tape, x: Var, local: Var | None, step: performer.TokenTransformer) -> Var:
    """The token transformer of a reduction cell."""
    t.casts.prepare(step.kqv, step.proj, step.mlp.fc1, step.mlp.fc2)
    _, _, z = norm_tokens(t, step.norm1, x)
    kqv, mixer = linear(t, z, step.kqv), step.attention
    if isinstance(mixer, performer.PerformerAttention) and mixer.w.shape[1] <= WIDEST:
        y, v, *_ = t(performer_forward, kqv, mixer.w)
    else:
        y, v = t(Checkpointed, mixer.mix, kqv)
    shortcut = reshape(t, v, *x.shape[:3], -1)
    if local is not None:
        shortcut, _ = add_branch(t, shortcut, None, local)
    y = dropout(t, linear(t, y, step.proj), step.drop)
    x, _, z = norm_tokens(t, step.norm2, shortcut, None, y)
    y = dropout(t, run_mlp(t, z, step.mlp), step.mlp.drop2)
    return add_branch(t, x, None, y)[0]
