"""Attention in a tape, by the kernels that torch itself takes for it, with what their gradients need."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from weft.fast.inference.packed_linear import LINEAR_TYPES
from weft.fast.tape.linear import linear
from weft.fast.tape.tape import Tape, TapeFunction, Var

Three = tuple[Tensor, Tensor, Tensor]


class PlainEngine:
    """Computes attention of (B, heads, N, d), and its gradient; whatever torch takes runs once more on the way back."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Sequence[Tensor | None], Sequence[Any]]:
        """The answer, and what `backward` wants beside q, k and v: tensors and lengths."""
        return F.scaled_dot_product_attention(q, k, v, scale=scale), (), ()

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Any], lengths: Sequence[Any], scale: float
    ) -> Three:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return torch.autograd.grad(y, (q, k, v), grad)  # pyright: ignore[reportReturnType]


class FlashEngine(PlainEngine):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Sequence[Tensor | None], Sequence[Any]]:
        y, sums, *lengths, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return y, (y, sums, seed, offset), lengths

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Any], lengths: Sequence[Any], scale: float
    ) -> Three:
        y, sums, seed, offset = kept
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, y, sums, *lengths, 0.0, False, seed, offset, scale=scale
        )


class CudnnEngine(PlainEngine):
    """On Hopper, where it takes two thirds of the time of torch's flash attention."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Sequence[Tensor | None], Sequence[Any]]:
        y, sums, *lengths, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, scale=scale
        )
        return y, (y, sums, seed, offset), lengths

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Any], lengths: Sequence[Any], scale: float
    ) -> Three:
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, *kept, None, *lengths, 0.0, False, scale=scale
        )


ENGINES: dict[int, type[PlainEngine]] = {
    SDPBackend.FLASH_ATTENTION.value: FlashEngine,
    SDPBackend.CUDNN_ATTENTION.value: CudnnEngine,
}


def engine_for(q: Tensor, k: Tensor, v: Tensor, scale: float) -> type[PlainEngine]:
    """The engine that torch takes for these where gradients are wanted, as far as we know how to ask it for those."""
    if not q.is_cuda:
        return PlainEngine  # flash attention has another operator there
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        return ENGINES.get(torch._fused_sdp_choice(q, k, v, scale=scale), PlainEngine)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, heads, N, C / heads)


def _thirds(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    return qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)  # three of (B, heads, N, C / heads)


def _tokens(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # undoes `_heads`


def _attend(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (B, heads, N, d); what its gradient needs is kept."""
    ctx.engine = engine_for(q, k, v, ctx.scale)
    y, kept, ctx.lengths = ctx.engine.forward(q, k, v, ctx.scale)
    ctx.save_for_backward(q, k, v, *kept)
    return _tokens(y)


def _attend_back(ctx: Any, grad: Tensor) -> list[Tensor]:
    """The gradients of q, k and v as (B, N, C), from that of (B, N, C)."""
    q, k, v, *kept = ctx.saved_tensors
    grads = ctx.engine.backward(_heads(grad, q.shape[1]), q, k, v, kept, ctx.lengths, ctx.scale)
    return [_tokens(x) for x in grads]  # views: these kernels give them as q, k and v came, heads behind tokens


class SelfAttention(TapeFunction):
    """(B, N, 3C) queries, keys and values side by side -> (B, N, C), in `heads`."""

    @staticmethod
    def run(qkv: Tensor, heads: int, scale: float) -> Tensor:
        q, k, v = _thirds(qkv, heads)
        return _tokens(F.scaled_dot_product_attention(q, k, v, scale=scale))

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, scale: float) -> Tensor:
        ctx.scale = scale
        q, k, v = _thirds(qkv, heads)
        return _attend(ctx, q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return torch.cat(_attend_back(ctx, grad), dim=2), None, None  # one pass over memory, row by row


class CrossAttention(TapeFunction):
    """(B, N, C) queries, (B, M, C) keys and values -> (B, N, C), in `heads`."""

    @staticmethod
    def run(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
        q, k, v = (_heads(x, heads) for x in (q, k, v))
        return _tokens(F.scaled_dot_product_attention(q, k, v, scale=scale))

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
        ctx.scale = scale
        return _attend(ctx, _heads(q, heads), _heads(k, heads), _heads(v, heads))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *_attend_back(ctx, grad), None, None


def attention(t: Tape, z: Var, attn: Attention, recompute: Any = None) -> Var:
    """timm's attention over (B, N, C) tokens."""
    qkv = linear(t, z, attn.qkv, recompute)
    return linear(t, t(SelfAttention, qkv, attn.num_heads, attn.scale), attn.proj)


def is_standard_attention(attn: Any) -> bool:
    """Whether this is timm's attention without any of its options."""
    return (
        type(attn) is Attention
        and type(attn.qkv) in LINEAR_TYPES
        and type(attn.proj) in LINEAR_TYPES
        and isinstance(attn.q_norm, nn.Identity)
        and isinstance(attn.k_norm, nn.Identity)
        and isinstance(getattr(attn, "norm", nn.Identity()), nn.Identity)
        and math.isclose(attn.scale, attn.head_dim**-0.5)
    )
