"""Attention between the pixels of a map and a few tokens, as Visual Transformers have it, in heads of channels.

    pixels_to_tokens    each token is a weighted mean of the pixels
    tokens_to_pixels    each pixel adds a weighted mean of the tokens

There are some dozen tokens and hundreds of pixels, so all that counts is how often the map is read and written: once.
Pixels enter as they are. Where a convolution makes keys or queries of them, the caller applies it to the tokens that
they are multiplied with, q (x W^T)^T = (q W) x^T, and where it makes values, to the means.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from weft.kernels.ops.op import define

HEAD_WIDTHS = (16, 32, 64, 128)
MOST_TOKENS = 64


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, heads, N, C / heads)


def reference_pixels_to_tokens(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Weighted means of pixels. q: (B, heads, L, D); x: (B, N, heads * D) pixels, keys and values in one.

    Returns (B, L, heads * D) tokens, and the logarithm of what their weights were divided by, (B, heads, L).
    """
    pixels = split(x, q.shape[1])
    scores = q @ pixels.transpose(2, 3) * scale
    tokens = scores.softmax(dim=3) @ pixels
    wide = torch.promote_types(x.dtype, torch.float32)
    return tokens.transpose(1, 2).flatten(2), scores.to(wide).logsumexp(dim=3)


def reference_tokens_to_pixels(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    """Adds to each pixel a weighted mean of tokens.

    x: (B, N, heads * D); k, bias, v: (B, heads, L, D), (B, heads, L) or None, (B, heads, L, E).

    Returns shortcut + keep softmax(scale (x k^T + bias)) v, (B, N, heads * E); keep is None or (B,).
    """
    scores = split(x, k.shape[1]) @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + scale * bias.unsqueeze(2).to(scores.dtype)
    y = (scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2)
    return shortcut + (y if keep is None else y * keep.view(-1, 1, 1).to(y.dtype))


# Pixels to tokens -----------------------------------------------------------------------------------------------


def _gather_reference_backward(
    grad: Tensor, q: Tensor, x: Tensor, out: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        q, x = q.detach().requires_grad_(), x.detach().requires_grad_()
        grads = torch.autograd.grad(reference_pixels_to_tokens(q, x, scale)[0], (q, x), grad)
    return grads[0], grads[1]


def _gather_setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    q, x, ctx.scale = inputs
    ctx.save_for_backward(q, x, *output)


def _gather_backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_q, grad_x = pixels_to_tokens_backward.run(grad, *ctx.saved_tensors, ctx.scale)
    return grad_q, grad_x, None


pixels_to_tokens_backward = define(
    "pixels_to_tokens_backward", _gather_reference_backward, "token_attention.pixels_to_tokens_backward"
)
pixels_to_tokens_forward = define(
    "pixels_to_tokens",
    reference_pixels_to_tokens,
    "token_attention.pixels_to_tokens",
    setup=_gather_setup,
    backward=_gather_backward,
)


def fits(*widths: int) -> bool:
    """Whether the kernels have tiles for heads of these widths."""
    return all(width in HEAD_WIDTHS for width in widths)


# Tokens to pixels -----------------------------------------------------------------------------------------------

Grads = tuple[Tensor, Tensor, Tensor | None, Tensor]


def _spread_reference_backward(
    grad: Tensor, x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, keep: Optional[Tensor], scale: float
) -> Grads:
    with torch.enable_grad():
        given: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, k, bias, v)]
        y = reference_tokens_to_pixels(*given, shortcut=torch.zeros_like(grad), keep=keep, scale=scale)
        grads = torch.autograd.grad(y, [t for t in given if t is not None], grad)
    x, k, *shift, v = grads
    return x, k, shift[0] if shift else None, v


def _spread_reference(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    return reference_tokens_to_pixels(x, k, bias, v, shortcut, keep, scale).to(shortcut.dtype)


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, shortcut, keep, ctx.scale = inputs
    ctx.save_for_backward(*tensors, keep)
    ctx.shortcut_dtype = shortcut.dtype


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, keep = ctx.saved_tensors
    grads = tokens_to_pixels_backward.run(grad, *tensors, keep, ctx.scale)
    return *grads, grad.to(ctx.shortcut_dtype), None, None


tokens_to_pixels_backward = define(
    "tokens_to_pixels_backward", _spread_reference_backward, "token_attention.tokens_to_pixels_backward"
)
tokens_to_pixels_forward = define(
    "tokens_to_pixels",
    _spread_reference,
    "token_attention.tokens_to_pixels",
    setup=_spread_setup,
    backward=_spread_backward,
)
