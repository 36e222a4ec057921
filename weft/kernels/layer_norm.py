"""LayerNorm, together with the residual sum before it and the joining of map and class token behind it, as one pass.

Torch's LayerNorm is several times off the limit of the memory and, under autocast, works in float32 with conversions
before and behind; sum, stochastic depth and joining would be passes of their own.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.case import Case
from weft.kernels.linear import make_again
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

Pair = tuple[Tensor, Optional[Tensor]]  # a (B, H, W, C) map and, where there is one, a (B, 1, C) class token


def _add(x: Tensor, cls: Optional[Tensor], y: Optional[Tensor], keep: Optional[Tensor]) -> Pair:
    """x + keep * y, where y is None or (B, [1 +] H*W, C) tokens, and keep None or (B,) factors."""
    if y is None:
        return x, cls
    if keep is not None:
        y = y * keep.to(y.dtype).view(-1, 1, 1)
    if cls is None:
        return x + y.view(x.shape), None
    return x + y[:, 1:].view(x.shape), cls + y[:, :1]


def plain_residual_norm(
    x: Tensor,
    cls: Optional[Tensor],
    y: Optional[Tensor],
    keep: Optional[Tensor],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """The twin of `residual_norm`."""
    x, cls, normed, normed_cls = plain_residual_norm_apart(x, cls, y, keep, weight, bias, eps)
    tokens = normed.flatten(1, 2)
    return x, cls, tokens if normed_cls is None else torch.cat([normed_cls, tokens], dim=1)


def plain_residual_norm_apart(
    x: Tensor,
    cls: Optional[Tensor],
    y: Optional[Tensor],
    keep: Optional[Tensor],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]:
    """The twin of `residual_norm_apart`."""
    x, cls = _add(x, cls, y, keep)
    normed = F.layer_norm(x, weight.shape, weight, bias, eps)
    normed_cls = F.layer_norm(cls, weight.shape, weight, bias, eps) if cls is not None else None
    return x, cls, normed, normed_cls


# The operator ---------------------------------------------------------------------------------------------------
# Some outputs may be None: without y there is no sum, without a class token there is none behind it.


def _tokens(x: Tensor, cls: Tensor | None) -> tuple[int, int, int]:
    """The shape of a map and its class token as tokens."""
    batch, height, width, channels = x.shape
    return batch, height * width + (0 if cls is None else 1), channels


def _outputs(
    x: Tensor, cls: Tensor | None, y: Tensor | None, dtype: torch.dtype, joined: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Room for the sum, its class token, what is normalised (tokens if `joined`) and its class token."""
    total = total_cls = normed_cls = None
    if y is not None:
        wide = x.dtype if x.dtype == y.dtype else torch.promote_types(x.dtype, y.dtype)
        total = x.new_empty(x.shape, dtype=wide)
        total_cls = None if cls is None else x.new_empty(cls.shape, dtype=wide)
    normed = x.new_empty(_tokens(x, cls) if joined else x.shape, dtype=dtype)
    if cls is not None and not joined:
        normed_cls = x.new_empty(cls.shape, dtype=dtype)
    return total, total_cls, normed, normed_cls


def _plain(
    x: Tensor, cls: Tensor | None, y: Tensor | None, keep: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    total, total_cls = _add(x, cls, y, keep)
    found = _plain_normed(total, total_cls, weight, bias, eps, joined)
    outputs = _outputs(x, cls, y, dtype, joined)
    values = (None, None) if y is None else (total, total_cls)
    for room, value in zip(outputs, (*values, *found), strict=True):
        if room is not None and value is not None:
            room.copy_(value)
    return outputs


def _plain_normed(x: Tensor, cls: Tensor | None, weight: Tensor, bias: Tensor, eps: float, joined: bool) -> Pair:
    wide = torch.promote_types(x.dtype, weight.dtype)
    args = (x.to(wide), None if cls is None else cls.to(wide), None, None, weight.to(wide), bias.to(wide), eps)
    if joined:
        return plain_residual_norm(*args)[2], None
    return plain_residual_norm_apart(*args)[2:]


def _launch(
    x: Tensor, cls: Tensor | None, y: Tensor | None, keep: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    from weft.kernels.gpu import layer_norm

    outputs = _outputs(x, cls, y, dtype, joined)
    if x.numel():
        layer_norm.forward(x, cls, y, keep, weight, bias, eps, outputs, joined)
    return outputs


def _gradients(
    x: Tensor, cls: Tensor | None, x_dtype: torch.dtype, y_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for the gradients of x, of the class token and of the tokens y."""
    grad_x = x.new_empty(x.shape, dtype=x_dtype)
    grad_cls = None if cls is None else x.new_empty(cls.shape, dtype=x_dtype)
    return grad_x, grad_cls, None if y_dtype is None else x.new_empty(_tokens(x, cls), dtype=y_dtype)


def _plain_backward(
    grad: Tensor, grad_cls: Tensor | None, grad_sum: Tensor | None, grad_sum_cls: Tensor | None,
    x: Tensor, cls: Tensor | None, keep: Tensor | None, weight: Tensor, eps: float,
    x_dtype: torch.dtype, y_dtype: torch.dtype | None, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (x, weight, torch.zeros_like(weight))]
        leaves += [] if cls is None else [cls.detach().requires_grad_()]
        x, weight, bias, *rest = leaves
        outputs = _plain_normed(x, rest[0] if rest else None, weight, bias, eps, joined)
        pairs = [
            (out, up.to(out.dtype))
            for out, up in zip(outputs, (grad, grad_cls), strict=True)
            if out is not None and up is not None
        ]
        found = torch.autograd.grad([out for out, _ in pairs], leaves, [up for _, up in pairs])
    grad_x = found[0] if grad_sum is None else found[0] + grad_sum
    tokens, grad_x_cls, grad_y = grad_x.flatten(1, 2), None, None
    if cls is not None:
        grad_x_cls = found[3] if grad_sum_cls is None else found[3] + grad_sum_cls
        tokens = torch.cat([grad_x_cls, tokens], dim=1)
        grad_x_cls = grad_x_cls.to(x_dtype)
    if y_dtype is not None:
        grad_y = (tokens if keep is None else tokens * keep.view(-1, 1, 1)).to(y_dtype, copy=True)
    return grad_x.to(x_dtype), grad_x_cls, grad_y, *found[1:3]


def _launch_backward(
    grad: Tensor, grad_cls: Tensor | None, grad_sum: Tensor | None, grad_sum_cls: Tensor | None,
    x: Tensor, cls: Tensor | None, keep: Tensor | None, weight: Tensor, eps: float,
    x_dtype: torch.dtype, y_dtype: torch.dtype | None, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    from weft.kernels.gpu import layer_norm

    rooms = _gradients(x, cls, x_dtype, y_dtype)
    if not x.numel():
        return *rooms, torch.zeros_like(weight), torch.zeros_like(weight)
    has_y = y_dtype is not None
    parameters = layer_norm.backward(
        grad, grad_cls, grad_sum, grad_sum_cls, x, cls, keep, weight, eps, rooms, joined, has_y
    )
    return *rooms, *parameters


def _fake_backward(
    grad: Tensor, grad_cls: Tensor | None, grad_sum: Tensor | None, grad_sum_cls: Tensor | None,
    x: Tensor, cls: Tensor | None, keep: Tensor | None, weight: Tensor, eps: float,
    x_dtype: torch.dtype, y_dtype: torch.dtype | None, joined: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return *_gradients(x, cls, x_dtype, y_dtype), torch.empty_like(weight), torch.empty_like(weight)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, cls, y, keep, weight, _, ctx.eps, _, ctx.joined = inputs
    ctx.x_dtype, ctx.y_dtype = x.dtype, None if y is None else y.dtype
    ctx.set_materialize_grads(False)
    if y is not None:
        x, cls = output[0], None if cls is None else output[1]
    ctx.save_for_backward(x, cls, keep, weight)


def _backward(
    ctx: Any, grad_sum: Tensor | None, grad_sum_cls: Tensor | None, grad: Tensor | None, grad_cls: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, cls, keep, weight = ctx.saved_tensors
    if grad is None:
        grad = x.new_zeros(_tokens(x, cls) if ctx.joined else x.shape)
    if cls is None or ctx.joined:
        grad_cls = None
    elif grad_cls is None:
        grad_cls = torch.zeros_like(cls)
    if ctx.y_dtype is None or (grad_sum is None and grad_sum_cls is None):
        grad_sum = grad_sum_cls = None
    else:
        grad_sum = torch.zeros_like(x) if grad_sum is None else grad_sum
        grad_sum_cls = None if cls is None else torch.zeros_like(cls) if grad_sum_cls is None else grad_sum_cls
    same = cls is None and keep is None and ctx.x_dtype == ctx.y_dtype  # one gradient for x and y
    grad_x, grad_x_cls, grad_y, grad_weight, grad_bias = residual_norm_backward(
        grad, grad_cls, grad_sum, grad_sum_cls, x, cls, keep, weight, ctx.eps, ctx.x_dtype,
        None if same else ctx.y_dtype, ctx.joined,
    )  # fmt: skip
    if ctx.y_dtype is None:
        grad_y = None
    elif same:
        grad_y = grad_x.view(_tokens(x, cls))
    return grad_x, None if cls is None else grad_x_cls, grad_y, None, grad_weight, grad_bias, None, None, None


residual_norm_backward = define(
    "residual_norm_backward(Tensor grad, Tensor? grad_cls, Tensor? grad_sum, Tensor? grad_sum_cls, Tensor x, "
    "Tensor? cls, Tensor? keep, Tensor weight, float eps, ScalarType x_dtype, ScalarType? y_dtype, bool joined) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plain_backward,
    _launch_backward,
    _fake_backward,
)
residual_norm_forward = define(
    "residual_norm(Tensor x, Tensor? cls, Tensor? y, Tensor? keep, Tensor weight, Tensor bias, float eps, "
    "ScalarType dtype, bool joined) -> (Tensor, Tensor, Tensor, Tensor)",
    _plain,
    _launch,
    lambda x, cls, y, keep, weight, bias, eps, dtype, joined: _outputs(x, cls, y, dtype, joined),
    _setup,
    _backward,
)


# What models call -----------------------------------------------------------------------------------------------


def residual_norm(
    x: Tensor,
    cls: Optional[Tensor],
    y: Optional[Tensor],
    keep: Optional[Tensor],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """x + keep * y, and the LayerNorm of that as tokens, in the type that the next product computes in.

    Args:
        x, cls: (B, H, W, C) map and (B, 1, C) class token or None; the pictures may lie apart in memory.
        y: None, or what is added, (B, [1 +] H*W, C) tokens. keep: None, or (B,) factors of stochastic depth.

    Returns:
        The sum as map and class token (x and cls themselves if there is no y), and (B, [1 +] H*W, C) tokens.
    """
    if torch.jit.is_scripting():
        return plain_residual_norm(x, cls, y, keep, weight, bias, eps)
    else:  # not compiled by TorchScript
        # Compilers fuse it with what stands around it, which an operator of its own would prevent.
        if torch.compiler.is_compiling() or not usable(x):
            return plain_residual_norm(x, cls, y, keep, weight, bias, eps)
        x, cls, normed, _ = _residual_norm(x, cls, y, keep, weight, bias, eps, amp_dtype(x), True)
        return x, cls, normed


def residual_norm_apart(
    x: Tensor,
    cls: Optional[Tensor],
    y: Optional[Tensor],
    keep: Optional[Tensor],
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]:
    """`residual_norm` that returns the LayerNorm not as tokens, but as a map and a class token of their own."""
    if torch.jit.is_scripting():
        return plain_residual_norm_apart(x, cls, y, keep, weight, bias, eps)
    else:  # not compiled by TorchScript
        if torch.compiler.is_compiling() or not usable(x):
            return plain_residual_norm_apart(x, cls, y, keep, weight, bias, eps)
        return _residual_norm(x, cls, y, keep, weight, bias, eps, amp_dtype(x), False)


def _residual_norm(
    x: Tensor, cls: Tensor | None, y: Tensor | None, keep: Tensor | None, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype, joined: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    if cls is not None and cls.dtype != x.dtype:
        cls = cls.to(x.dtype)
    total, total_cls, normed, normed_cls = residual_norm_forward(x, cls, y, keep, weight, bias, eps, dtype, joined)
    if y is not None:
        x, cls = total, None if cls is None else total_cls
    return x, cls, normed, None if cls is None else normed_cls


def norm_again(normed: Tensor, x: Tensor, cls: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> None:
    """Lets a `Linear` make `normed`, the norm of x and cls that `residual_norm` or its sister gave, again."""
    joined, dtype = normed.dim() == 3, normed.dtype

    def make(x: Tensor, cls: Tensor | None, weight: Tensor, bias: Tensor) -> Tensor:
        return _residual_norm(x, cls, None, None, weight, bias, eps, dtype, joined)[2]

    make_again(normed, make, x, cls, weight, bias)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`F.layer_norm` over the last axis; under autocast, like that, in float32."""
    if torch.jit.is_scripting():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    else:  # not compiled by TorchScript
        if torch.compiler.is_compiling() or not usable(x):
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        maps = x if x.dim() == 4 else x.reshape(1, 1, -1, x.shape[-1])
        return residual_norm_forward(maps, None, None, None, weight, bias, eps, dtype, False)[2].view(x.shape)


# Measurements ---------------------------------------------------------------------------------------------------

# Side of the map and channels: CeiT, CvT, CETNet
SHAPES = [(14, 192), (14, 384), (14, 768), (56, 64), (28, 192), (56, 96), (7, 512)]
TILES = [(1024, 1), (1024, 2), (2048, 4)]  # elements, warps
SHARED = [(1024, 4, 6, 1), (1024, 4, 6, 2), (2048, 4, 4, 2), (2048, 4, 4, 3), (4096, 8, 2, 2)]  # ..., programs, stages


def _case(size: int, channels: int, residual: bool, backward: bool) -> Case:
    batch = 128 if backward else 256
    rows = batch * size * size
    # Training has a float32 residual stream and bfloat16 branches, inference has bfloat16 alone.
    wide = torch.float32 if backward else torch.bfloat16

    def inputs(device: torch.device) -> tuple[Any, ...]:
        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype)

        x = make(batch, size, size, channels, dtype=wide)
        weight, bias = make(2, channels, dtype=wide).unbind(0)
        y = make(batch, size * size, channels, dtype=torch.bfloat16)
        if not backward:
            return x, None, y if residual else None, None, weight, bias, 1e-6, torch.bfloat16, True
        keep = make(batch, dtype=wide) if residual else None
        passed = make(batch, size, size, channels, dtype=wide) if residual else None
        return y, None, passed, None, x, None, keep, weight, 1e-6, wide, torch.bfloat16 if residual else None, True

    moved = rows * channels * ((16 if residual else 10) if backward else (8 if residual else 4))
    candidates = [dict(elements=elements, num_warps=warps) for elements, warps in TILES]
    if backward:
        candidates = [
            dict(elements=elements, num_warps=warps, per_processor=programs, stages=stages)
            for elements, warps, programs, stages in SHARED
        ]
    return Case(
        operation="layer_norm_backward" if backward else "layer_norm",
        shape=dict(rows=rows, channels=channels, residual=residual),
        inputs=inputs,
        kernel=residual_norm_backward if backward else residual_norm_forward,
        plain=_plain_backward if backward else _plain,
        bytes=moved,
        candidates=candidates,
    )


def cases() -> list[Case]:
    """LayerNorm with and without a residual sum at the maps of CeiT, CvT, CETNet and Swin."""
    with_sum = [_case(*shape, True, backward) for backward in (False, True) for shape in SHAPES]
    return with_sum + [_case(*shape, False, backward) for backward in (False, True) for shape in SHAPES[1:4]]
