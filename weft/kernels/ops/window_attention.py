"""Attention inside windows of a map: its pixels are read where they are, without rolling, padding, cutting or masks.

Cutting three maps into windows and joining the result are eight copies for a shifted window, and the mask is as large
as the logits of a picture. Here the map is read once and the result written once.
"""

from typing import Any

import torch
from timm.layers.pos_embed_rel import gen_relative_position_index
from torch import Tensor

from weft.kernels.ops.op import define
from weft.models.windows import windowed_attention

LARGEST_WINDOW, LARGEST_DIM = 8, 64


def fits(dim: int, window: int) -> bool:
    """Whether the kernels know heads of `dim` channels and windows of this side."""
    return window <= LARGEST_WINDOW and dim <= LARGEST_DIM and dim % 8 == 0


def plain_window_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    """The twin, which is what the models do without kernels."""
    index = gen_relative_position_index((window, window), device=q.device).view(-1)
    return windowed_attention(q, k, v, table, index, table.shape[1], window, shifted, 0.0)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, table = (x.detach().requires_grad_() for x in (q, k, v, table))
        return torch.autograd.grad(plain_window_attention(q, k, v, table, window, shifted), (q, k, v, table), grad)


def _fake(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _fake_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, table))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.window, ctx.shifted = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *window_attention_backward.inside(grad, *ctx.saved_tensors, ctx.window, ctx.shifted), None, None


window_attention_backward = define(
    "window_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    plain_backward,
    "window_attention.backward",
    _fake_backward,
)
# (B, H, W, heads * dim) maps and a ((2 window - 1) ** 2, heads) table of biases -> a map
window_attention = define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted) -> Tensor",
    plain_window_attention,
    "window_attention.forward",
    _fake,
    _setup,
    _backward,
)
