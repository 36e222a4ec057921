"""Attention inside windows of a map: its pixels are read where they are, without rolling, padding, cutting or masks.

Cutting three maps into windows and joining the result are eight copies for a shifted window, and the mask is as large
as the logits of a picture. Here the map is read once and the result written once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.case import Case
from weft.kernels.op import define

LARGEST_WINDOW, LARGEST_DIM = 8, 64


def fits(q: Tensor, num_heads: int, window: int) -> bool:
    """Whether the kernels know such windows and heads."""
    dim = q.shape[3] // num_heads
    return window <= LARGEST_WINDOW and dim <= LARGEST_DIM and dim % 8 == 0


def plain_window_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    """The twin, which is what the models do without kernels."""
    from timm.layers.pos_embed_rel import gen_relative_position_index

    from weft.models.windows import plain_windowed_attention  # late, because that file imports this one

    index = gen_relative_position_index((window, window), device=q.device).view(-1)
    return plain_windowed_attention(q, k, v, table, index, table.shape[1], window, shifted, 0.0)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, table = (x.detach().requires_grad_() for x in (q, k, v, table))
        return torch.autograd.grad(plain_window_attention(q, k, v, table, window, shifted), (q, k, v, table), grad)


def _launch(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    from weft.kernels.gpu import window_attention

    return window_attention.forward(q, k, v, table, window, shifted)


def _launch_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, ...]:
    from weft.kernels.gpu import window_attention

    return window_attention.backward(grad, q, k, v, table, window, shifted)


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
    return *window_attention_backward(grad, *ctx.saved_tensors, ctx.window, ctx.shifted), None, None


window_attention_backward = define(
    "window_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    plain_backward,
    _launch_backward,
    _fake_backward,
)
# (B, H, W, heads * dim) maps and a ((2 window - 1) ** 2, heads) table of biases -> a map
window_attention = define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted) -> Tensor",
    plain_window_attention,
    _launch,
    _fake,
    _setup,
    _backward,
)


def cases() -> list[Case]:
    """CETNet-T's windows at 224 pixels, and Swin-T's in the two stages with most of the work."""
    shapes = [(56, 2, True), (28, 4, True), (14, 8, False), (14, 8, True), (7, 16, True), (56, 3, True), (14, 12, True)]
    return [_case(*shape, backward) for shape in shapes for backward in (False, True)]


def _case(side: int, heads: int, shifted: bool, backward: bool, window: int = 7, dim: int = 32) -> Case:
    batch = 128 if backward else 256

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        maps = [torch.randn(batch, side, side, heads * dim, device=device).bfloat16() for _ in range(3 + backward)]
        return *maps, torch.randn((2 * window - 1) ** 2, heads, device=device)

    pixels, products = batch * side * side, 5 if backward else 2
    kernel: Callable[..., Any] = window_attention_backward if backward else window_attention
    plain: Callable[..., Any] = plain_backward if backward else plain_window_attention
    choices = [(1056, 2, 3), (1056, 4, 3), (2112, 4, 2), (4224, 4, 3)]
    candidates = [dict(programs=p, num_warps=w, num_stages=s) for p, w, s in choices]
    if backward:
        choices = [(264, 1, 255), (528, 1, 255), (528, 2, 255), (528, 1, 168), (528, 1, 128), (1056, 2, 128)]
        candidates = [dict(programs=p, num_warps=4, num_stages=s, maxnreg=r) for p, s, r in choices]
    return Case(
        "window_attention_backward" if backward else "window_attention",
        dict(pixels=pixels, heads=heads, dim=dim, window=window, kind="bfloat16"),
        inputs,
        lambda *tensors: kernel(*tensors, window, shifted),
        lambda *tensors: plain(*tensors, window, shifted),
        bytes=(7 if backward else 4) * pixels * heads * dim * 2,
        flops=products * 2 * pixels * window**2 * heads * dim,
        candidates=candidates,
    )
