"""The layers of fused forms: each function runs operations of `weft.kernels` on the `Var`s of a tape.

Maps are (B, H, W, C), tokens (B, [1 +] H*W, C) with the class token first, as everywhere.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from weft.fast.tape.linear import NO_OPTIONS, Linears
from weft.fast.tape.tape import Tape, TapeFunction, Var
from weft.kernels.ops.activation import activation_forward
from weft.kernels.ops.batch_norm import batch_norm_act_forward, batch_norm_statistics, norm_behind_token
from weft.kernels.ops.conv_act import conv_act_forward
from weft.kernels.ops.depthwise import depthwise_forward
from weft.kernels.ops.grouped import grouped_conv_forward, is_grouped
from weft.kernels.ops.layer_norm import residual_norm_forward
from weft.kernels.ops.norm_depthwise import norm_depthwise
from weft.kernels.ops.pool import max_pool_forward
from weft.kernels.ops.residual import add_branch_forward
from weft.kernels.ops.stem import stem_forward, suits_stem
from weft.models.layers import MapConv, StochasticDepth

# Shapes and types ---------------------------------------------------------------------------------------------------


class Reshape(TapeFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        ctx.shape = x.shape
        return x.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.reshape(ctx.shape), None


TO_MAP, FROM_MAP = (0, 2, 3, 1), (0, 3, 1, 2)  # of (B, C, H, W), channels last in memory, and back


class Permute(TapeFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: tuple[int, ...]) -> Tensor:
        ctx.back = FROM_MAP if order == TO_MAP else TO_MAP
        return x.permute(order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.permute(ctx.back), None


class Cat(TapeFunction):
    """Maps side by side in their channels."""

    @staticmethod
    def forward(ctx: Any, *maps: Tensor) -> Tensor:
        ctx.widths = [x.shape[-1] for x in maps]
        return torch.cat(maps, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.split(ctx.widths, dim=-1)


class Chunk(TapeFunction):
    """Undoes `Cat` of `count` equal parts; they are views."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return x.chunk(count, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads, dim=-1), None


class Cast(TapeFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


class Dropout(TapeFunction):
    @staticmethod
    def run(x: Tensor, p: float) -> Tensor:
        return torch.native_dropout(x, p, True)[0]

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        y, mask = torch.native_dropout(x, p, True)
        ctx.scale = 1 / (1 - p)
        ctx.save_for_backward(mask)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.ops.aten.native_dropout_backward(grad, *ctx.saved_tensors, ctx.scale), None


def reshape(t: Tape, x: Var, *shape: int) -> Var:
    return t(Reshape, x, shape)


def reshape_output(x: Var, *shape: int) -> Var:
    """A view of what a linear layer gave, whose gradient may come back in any shape."""
    return Var(x.value.view(shape), x.slot)


def cast(t: Tape, x: Var, dtype: torch.dtype) -> Var:
    return x if x.dtype == dtype else t(Cast, x, dtype)


def dropout(t: Tape, x: Var, module: nn.Dropout) -> Var:
    return t(Dropout, x, module.p) if module.training and module.p > 0 else x


# Norms and sums -----------------------------------------------------------------------------------------------------


def norm_tokens(
    t: Tape, norm: nn.LayerNorm, x: Var, cls: Var | None = None, y: Var | None = None, keep: Tensor | None = None
) -> tuple[Var, Var | None, Var]:
    """x + keep y for the tokens `y` of a branch, and `norm` of that as tokens; map, class token, tokens.

    Without a branch the first two are x and cls; their gradients are then added to those of the norm in one pass.
    """
    x, cls, normed, _ = _residual_norm(t, norm, x, cls, y, keep, joined=True)
    return x, cls, normed


def norm_map(
    t: Tape, norm: nn.LayerNorm, x: Var, cls: Var | None = None, y: Var | None = None, keep: Tensor | None = None
) -> tuple[Var, Var | None, Var, Var | None]:
    """As `norm_tokens`, but the norm is a map and a class token."""
    return _residual_norm(t, norm, x, cls, y, keep, joined=False)


def _residual_norm(
    t: Tape, norm: nn.LayerNorm, x: Var, cls: Var | None, y: Var | None, keep: Tensor | None, joined: bool
) -> tuple[Var, Var | None, Var, Var | None]:
    if cls is not None:
        cls = cast(t, cls, x.dtype)
    return t(residual_norm_forward, x, cls, y, keep, norm.weight, norm.bias, norm.eps, t.dtype, joined)


def layer_norm(t: Tape, x: Var, norm: nn.LayerNorm) -> Var:
    """The norm of a map; under autocast, as torch has it, in float32."""
    dtype = torch.float32 if torch.is_autocast_enabled(x.value.device.type) else x.dtype
    return t(residual_norm_forward, x, None, None, None, norm.weight, norm.bias, norm.eps, dtype, False)[2]


def recompute_norm(norm: nn.LayerNorm, x: Var, cls: Var | None, dtype: torch.dtype, joined: bool) -> Any:
    """How a linear layer recomputes the `norm` of x and cls, both of which are kept for the norm's own gradient."""

    def recompute(x: Tensor, cls: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        return residual_norm_forward.run(x, cls, None, None, weight, bias, norm.eps, dtype, joined)[2]

    return recompute, (x.value, None if cls is None else cls.value, norm.weight, norm.bias)


def add_branch(
    t: Tape, x: Var, cls: Var | None, y: Var, y_cls: Var | None = None, keep: Tensor | None = None
) -> tuple[Var, Var | None]:
    """x + keep y for a branch that gives tokens `y`, or a map `y` and a class token `y_cls`."""
    total, total_cls = t(add_branch_forward, x, cls, y, y_cls, keep)
    return total, total_cls if cls is not None else None


def activate(t: Tape, x: Var, act: str) -> Var:
    return x if act == "none" else t(activation_forward, x, act)


# BatchNorm ----------------------------------------------------------------------------------------------------------


def is_batch_norm(bn: Any, kind: type = nn.BatchNorm2d) -> bool:
    """Whether `bn` is a BatchNorm with running statistics and parameters, as all of ours are."""
    return type(bn) is kind and bn.affine and bn.track_running_stats


def is_norm(bn: Any) -> bool:
    """Whether `bn` is such a BatchNorm, or was one before `weft.fuse`."""
    return type(bn) is nn.Identity or is_batch_norm(bn)


def uses_batch_statistics(*norms: Any) -> bool:
    """Whether all of these are BatchNorms that normalise by the statistics of the batch; a folded one is none."""
    return all(isinstance(bn, nn.BatchNorm2d) and bn.training for bn in norms)


def share_mode(*norms: Any) -> bool:
    """Whether these are all in training mode, or all not."""
    return len({uses_batch_statistics(bn) for bn in norms}) == 1


def moments(x: Var, bn: Any) -> Tensor:
    """Mean and variance of a map over the batch, (2, C); moves the running ones."""
    rows = x.value.numel() // x.shape[-1]
    if rows == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    return batch_norm_statistics.run(x.value, bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum)


def batch_norm(
    t: Tape, x: Var, bn: Any, act: str = "none", residual: Var | None = None, keep: Tensor | None = None
) -> Var:
    """act(residual + keep bn(x)); moves the running statistics where `bn` is in training mode."""
    if isinstance(bn, nn.Identity):
        if residual is not None:
            x, _ = add_branch(t, residual, None, x, None, keep)
        return activate(t, x, act)
    return t(batch_norm_act_forward, x, *_mean_and_var(x, bn), bn.weight, bn.bias, residual, keep, bn.eps, act)


def batch_norm_tokens(t: Tape, x: Var, cls: Var, bn: nn.BatchNorm2d) -> Var:
    """bn(x) as tokens behind the class token; moves the running statistics where `bn` is in training mode."""
    return t(norm_behind_token, x, cls, *_mean_and_var(x, bn), bn.weight, bn.bias, bn.eps)


def _mean_and_var(x: Var, bn: Any) -> tuple[Tensor, Tensor | None]:
    return (moments(x, bn), None) if uses_batch_statistics(bn) else (bn.running_mean, bn.running_var)


def as_affine(bn: Any) -> tuple[Tensor, Tensor]:
    """A BatchNorm in eval mode as the scale and shift of x * scale + shift."""
    scale = bn.weight * (bn.running_var + bn.eps).rsqrt()
    return scale, bn.bias - bn.running_mean * scale


# Convolutions -------------------------------------------------------------------------------------------------------

DEPTHWISE_KERNELS, DEPTHWISE_STRIDES = (3, 5, 7), (1, 2)


def is_conv(*convs: Any) -> bool:
    """Whether all of these are convolutions, not of a class derived from them, that pad with zeros."""
    return all(type(conv) in (nn.Conv2d, MapConv) and conv.padding_mode == "zeros" for conv in convs)


def is_depthwise(conv: nn.Conv2d) -> bool:
    """Whether the depth-wise kernels know this convolution."""
    kernel = conv.kernel_size[0]
    return (
        conv.groups == conv.in_channels == conv.out_channels
        and kernel in DEPTHWISE_KERNELS
        and conv.kernel_size == (kernel, kernel)
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.stride[0] == conv.stride[1]
        and conv.stride[0] in DEPTHWISE_STRIDES
        and conv.dilation == (1, 1)
    )


class Convolution(TapeFunction):
    """The library's, on (B, H, W, C) maps."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
    ) -> Tensor:
        ctx.numbers = (stride, padding, dilation, False, (0, 0), groups)
        ctx.weight_dtype, ctx.bias_shape = weight.dtype, None if bias is None else bias.shape
        weight = weight.to(x.dtype, memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        bias = None if bias is None else bias.to(x.dtype)
        return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding, dilation, groups).permute(0, 2, 3, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
            grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), weight, ctx.bias_shape, *ctx.numbers,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        if grad_x is not None:
            grad_x = grad_x.permute(0, 2, 3, 1)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def convolve(t: Tape, x: Var, conv: nn.Conv2d) -> Var:
    """The convolution alone, by whichever kernel knows it."""
    x = cast(t, x, t.dtype)
    if is_depthwise(conv):
        return t(depthwise_forward, x, conv.weight, conv.bias, None, None, conv.stride[0], "none", "none")
    if is_grouped(conv):
        return t(grouped_conv_forward, x, conv.weight, conv.bias, conv.groups, "none")
    if suits_stem(x.value, conv):
        numbers = conv.stride[0], conv.padding[0], conv.dilation[0]
        return t(stem_forward, x, conv.weight, conv.bias, *numbers, "none")
    if conv.kernel_size == conv.stride == (1, 1) and conv.groups == 1 and conv.padding == (0, 0):
        weight = t(Reshape, conv.weight, conv.weight.shape[:2])
        return t(Linears, t.casts, NO_OPTIONS, x, weight, conv.bias)[0]
    return t(Convolution, x, conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups)


def conv_norm(
    t: Tape, x: Var, conv: nn.Conv2d, bn: Any, act: str, residual: Var | None = None, keep: Tensor | None = None
) -> Var:
    """act(residual + keep bn(conv(x))), in training and in eval mode; `bn` may be an Identity."""
    if not t.grad_enabled and keep is None and not uses_batch_statistics(bn):
        return _folded(t, x, conv, bn, act, residual)
    return batch_norm(t, convolve(t, x, conv), bn, act, residual, keep)


def _folded(t: Tape, x: Var, conv: Any, bn: Any, act: str, residual: Var | None) -> Var:
    """In inference all of it is the convolution with other weights."""
    x = cast(t, x, t.dtype)
    scale, shift = (None, None) if isinstance(bn, nn.Identity) else as_affine(bn)
    if is_depthwise(conv) and residual is None:
        return t(depthwise_forward, x, conv.weight, conv.bias, scale, shift, conv.stride[0], "none", act)
    weight, bias = conv.weight, conv.bias
    if scale is not None and shift is not None:
        weight = weight * scale.view(-1, 1, 1, 1)
        bias = shift if bias is None else bias * scale + shift
    if is_grouped(conv) and residual is None:
        return t(grouped_conv_forward, x, weight, bias, conv.groups, act)
    if suits_stem(x.value, conv) and residual is None:
        return t(stem_forward, x, weight, bias, conv.stride[0], conv.padding[0], conv.dilation[0], act)
    weight = weight.to(t.dtype)
    square = conv.stride[0] == conv.stride[1] and conv.padding[0] == conv.padding[1] and conv.dilation == (1, 1)
    if square and not (bias is None and residual is None and act == "none"):
        return t(conv_act_forward, x, weight, bias, residual, conv.stride[0], conv.padding[0], conv.groups, act)
    y = t(Convolution, x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups)
    if residual is not None:
        y = Var(y.value + residual.value)
    return activate(t, y, act)


def norm_conv(t: Tape, x: Var, bn: Any, act: str, conv: nn.Conv2d) -> Var:
    """conv(act(bn(x))) of a map; in training what the norm gives is not kept where the convolution is depth-wise."""
    if not (uses_batch_statistics(bn) and is_depthwise(conv) and x.dtype == t.dtype):
        return convolve(t, batch_norm(t, x, bn, act), conv)
    found = moments(x, bn)
    return t(norm_depthwise, x, found, bn.weight, bn.bias, bn.eps, act, conv.weight, conv.bias, conv.stride[0])


def max_pool(t: Tape, x: Var, stride: int) -> Var:
    return t(max_pool_forward, x, stride, t.grad_enabled and x.slot >= 0)[0]


# Dropping -----------------------------------------------------------------------------------------------------------


def is_standard_drop_path(module: Any) -> bool:
    """Whether this is stochastic depth as everybody has it, or none."""
    if type(module) is DropPath:
        return module.scale_by_keep
    return module is None or type(module) in (nn.Identity, StochasticDepth)


def is_idle_drop_path(module: Any) -> bool:
    """Whether this is such a module, and drops nothing now."""
    if module is None:
        return True
    return is_standard_drop_path(module) and not (module.training and getattr(module, "drop_prob", 0.0))


def keep_factors(drop_path: Any, x: Tensor) -> Tensor | None:
    """(B,) factors of stochastic depth, ours or timm's, 0 or 1 / (1 - rate); None where nothing is dropped."""
    rate = getattr(drop_path, "drop_prob", 0.0)
    if not rate or not drop_path.training:
        return None
    kept = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32)).bernoulli_(1 - rate)
    return kept.div_(1 - rate) if rate < 1 else kept


def are_idle(*dropouts: Any) -> bool:
    """Whether all of these are torch's dropouts, or nothing, and drop nothing now."""
    return all(
        type(module) is nn.Identity or (type(module) is nn.Dropout and not (module.training and module.p > 0))
        for module in dropouts
    )
