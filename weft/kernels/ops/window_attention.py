"""Attention inside windows of a map: its pixels are read where they are, without rolling, padding, cutting or masks.

Cutting three maps into windows and joining the result are eight copies for a shifted window, and the mask is as large
as the logits of a picture. Here the map is read once and the result written once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define

LARGEST_WINDOW, LARGEST_DIM = 8, 64


def fits(dim: int, window: int) -> bool:
    """Whether the kernels know heads of `dim` channels and windows of this side."""
    return window <= LARGEST_WINDOW and dim <= LARGEST_DIM and dim % 8 == 0


def _axis(size: int, window: int, shifted: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pixels along an axis that windows hold, and whether the shift moved them there from the other end.

    Both are (windows, window); a pixel at or behind `size` is padding. Shifted windows start half a window further and
    wrap around, except along an axis that one window covers.
    """
    windows = -(-size // window)
    shift = window // 2 if shifted and windows > 1 else 0
    pixel = ((torch.arange(windows * window, device=device) + shift) % (windows * window)).view(windows, window)
    return pixel, pixel < shift


def _windows(height: int, width: int, window: int, shifted: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The pixels of every window, (windows, N), where H*W is padding; and which of them see which, (windows, N, N).

    A shifted window at the border holds both ends of the map, which do not see each other. No pixel sees padding.
    """
    rows, from_below = _axis(height, window, shifted, device)
    columns, from_right = _axis(width, window, shifted, device)
    y, x = rows[:, None, :, None], columns[None, :, None, :]
    real = ((y < height) & (x < width)).flatten(0, 1).flatten(1)
    pixels = (y * width + x).flatten(0, 1).flatten(1).where(real, height * width)
    end = (2 * from_below.int()[:, None, :, None] + from_right.int()[None, :, None, :]).flatten(0, 1).flatten(1)
    seen = (end[:, :, None] == end[:, None, :]) & real[:, None, :]
    return pixels, seen | ~real[:, :, None]  # what padding sees is thrown away, but must not be NaN


def _biases(table: Tensor, window: int) -> Tensor:
    """(heads, N, N): the table's entry for the step from one pixel of a window to another."""
    place = torch.arange(window**2, device=table.device)
    down, right = place // window, place % window
    step = (down[:, None] - down + window - 1) * (2 * window - 1) + right[:, None] - right + window - 1
    return F.embedding(step, table).permute(2, 0, 1)  # whose gradient is one sum; that of an index sorts


def reference_window_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool) -> Tensor:
    """The reference: windows are gathered from (B, H, W, C) maps, attend within themselves, and are put back."""
    heads, (_, height, width, _) = table.shape[1], q.shape
    pixels, seen = _windows(height, width, window, shifted, q.device)
    mask = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, float("-inf"))
    bias = (_biases(table, window) + mask[:, None]).flatten(0, 1).to(q.dtype)  # (windows * heads, N, N)

    def cut(x: Tensor) -> Tensor:  # (B, H, W, C) -> (B, windows * heads, N, C / heads)
        padded = F.pad(x.flatten(1, 2), (0, 0, 0, 1))  # the last one is what windows hold outside of the map
        return padded[:, pixels].unflatten(3, (heads, -1)).transpose(2, 3).flatten(1, 2)

    y = F.scaled_dot_product_attention(cut(q), cut(k), cut(v), attn_mask=bias)
    y = y.unflatten(1, (-1, heads)).transpose(2, 3).flatten(3).flatten(1, 2)  # (B, windows * N, C)
    return y[:, pixels.flatten().argsort()[: height * width]].view(q.shape)


def reference_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, window: int, shifted: bool
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        q, k, v, table = (x.detach().requires_grad_() for x in (q, k, v, table))
        return torch.autograd.grad(reference_window_attention(q, k, v, table, window, shifted), (q, k, v, table), grad)


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
    return *window_attention_backward.dispatch(grad, *ctx.saved_tensors, ctx.window, ctx.shifted), None, None


window_attention_backward = define(
    "window_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    reference_backward,
    "window_attention.backward",
    _fake_backward,
)
# (B, H, W, heads * dim) maps and a ((2 window - 1) ** 2, heads) table of biases -> a map
window_attention = define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor table, int window, bool shifted) -> Tensor",
    reference_window_attention,
    "window_attention.forward",
    _fake,
    _setup,
    _backward,
)
