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

from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable

HEAD_WIDTHS = (16, 32, 64, 128)
MOST_TOKENS = 64


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(2, (heads, -1)).transpose(1, 2)  # (B, N, C) -> (B, heads, N, C / heads)


def plain_pixels_to_tokens(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The twin. q: (B, heads, L, D); x: (B, N, heads * D) pixels, keys and values in one.

    Returns (B, L, heads * D) tokens, and the logarithm of what their weights were divided by, (B, heads, L).
    """
    pixels = split(x, q.shape[1])
    scores = q @ pixels.transpose(2, 3) * scale
    tokens = scores.softmax(dim=3) @ pixels
    wide = torch.promote_types(x.dtype, torch.float32)
    return tokens.transpose(1, 2).flatten(2), scores.to(wide).logsumexp(dim=3)


def plain_tokens_to_pixels(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    """The twin. x: (B, N, heads * D); k, bias, v: (B, heads, L, D), (B, heads, L) or None, (B, heads, L, E).

    Returns shortcut + keep softmax(scale (x k^T + bias)) v, (B, N, heads * E); keep is None or (B,).
    """
    scores = split(x, k.shape[1]) @ k.transpose(2, 3) * scale
    if bias is not None:
        scores = scores + scale * bias.unsqueeze(2).to(scores.dtype)
    y = (scores.softmax(dim=3) @ v).transpose(1, 2).flatten(2)
    return shortcut + (y if keep is None else y * keep.view(-1, 1, 1).to(y.dtype))


# Pixels to tokens -----------------------------------------------------------------------------------------------


def _gather_backward_plain(
    grad: Tensor, q: Tensor, x: Tensor, out: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        q, x = q.detach().requires_grad_(), x.detach().requires_grad_()
        grads = torch.autograd.grad(plain_pixels_to_tokens(q, x, scale)[0], (q, x), grad)
    return grads[0].contiguous(), grads[1].contiguous()


def _gather(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import token_attention

    return token_attention.gather(q, x.contiguous(), scale)


def _gather_backward(
    grad: Tensor, q: Tensor, x: Tensor, out: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    from weft.kernels.gpu import token_attention

    return token_attention.gather_backward(grad.contiguous(), q, x.contiguous(), out, total, scale)


def _gather_fake(q: Tensor, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, width = q.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(batch, tokens, heads * width), x.new_empty(batch, heads, tokens, dtype=wide)


def _gather_setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    q, x, ctx.scale = inputs
    ctx.save_for_backward(q, x, *output)


def _gather_grads(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_q, grad_x = pixels_to_tokens_backward(grad, *ctx.saved_tensors, ctx.scale)
    return grad_q, grad_x, None


pixels_to_tokens_backward = define(
    "pixels_to_tokens_backward(Tensor grad, Tensor q, Tensor x, Tensor out, Tensor total, float scale)"
    " -> (Tensor, Tensor)",
    _gather_backward_plain,
    _gather_backward,
    lambda grad, q, x, out, total, scale: (q.new_empty(q.shape), x.new_empty(x.shape)),
)
pixels_to_tokens_forward = define(
    "pixels_to_tokens(Tensor q, Tensor x, float scale) -> (Tensor, Tensor)",
    plain_pixels_to_tokens,
    _gather,
    _gather_fake,
    _gather_setup,
    _gather_grads,
)


def pixels_to_tokens(q: Tensor, x: Tensor, scale: float) -> Tensor:
    """(B, heads, L, D) queries and (B, N, heads * D) pixels, which are keys and values -> (B, L, heads * D)."""
    if not usable(x) or not fits(q):
        return plain_pixels_to_tokens(q, x, scale)[0]
    dtype = amp_dtype(x)
    return pixels_to_tokens_forward(q.to(dtype), x.to(dtype), scale)[0]


def fits(*tokens: Tensor) -> bool:
    """Whether the kernels have tiles for these (B, heads, L, D)."""
    return all(t.shape[3] in HEAD_WIDTHS and t.shape[2] <= MOST_TOKENS for t in tokens)


# Tokens to pixels -----------------------------------------------------------------------------------------------

Grads = tuple[Tensor, Tensor, Tensor, Tensor]


def _spread_backward_plain(
    grad: Tensor, x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, keep: Optional[Tensor], scale: float
) -> Grads:
    with torch.enable_grad():
        given: list[Any] = [None if t is None else t.detach().requires_grad_() for t in (x, k, bias, v)]
        y = plain_tokens_to_pixels(*given, shortcut=torch.zeros_like(grad), keep=keep, scale=scale)
        grads = torch.autograd.grad(y, [t for t in given if t is not None], grad)
    x, k, *shift, v = grads
    return x, k, shift[0] if shift else x.new_empty(0), v


def _spread_plain(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    return plain_tokens_to_pixels(x, k, bias, v, shortcut, keep, scale).to(shortcut.dtype)


def _spread(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    from weft.kernels.gpu import token_attention

    return token_attention.spread(x.contiguous(), k, bias, v, shortcut.contiguous(), keep, scale)


def _spread_backward(
    grad: Tensor, x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, keep: Optional[Tensor], scale: float
) -> Grads:
    from weft.kernels.gpu import token_attention

    return token_attention.spread_backward(grad.contiguous(), x.contiguous(), k, bias, v, keep, scale)


def _spread_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, shortcut, keep, ctx.scale = inputs
    ctx.save_for_backward(*tensors, keep)
    ctx.shortcut_dtype = shortcut.dtype


def _spread_grads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, keep = ctx.saved_tensors
    x, k, bias, v = tokens_to_pixels_backward(grad, *tensors, keep, ctx.scale)
    return x, k, None if tensors[2] is None else bias, v, grad.to(ctx.shortcut_dtype), None, None


tokens_to_pixels_backward = define(
    "tokens_to_pixels_backward(Tensor grad, Tensor x, Tensor k, Tensor? bias, Tensor v, Tensor? keep, float scale)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _spread_backward_plain,
    _spread_backward,
    lambda grad, x, k, bias, v, keep, scale: tuple(
        x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, k, bias, v)
    ),
)
tokens_to_pixels_forward = define(
    "tokens_to_pixels(Tensor x, Tensor k, Tensor? bias, Tensor v, Tensor shortcut, Tensor? keep, float scale)"
    " -> Tensor",
    _spread_plain,
    _spread,
    lambda x, k, bias, v, shortcut, keep, scale: shortcut.new_empty(shortcut.shape),
    _spread_setup,
    _spread_grads,
)


def tokens_to_pixels(
    x: Tensor, k: Tensor, bias: Optional[Tensor], v: Tensor, shortcut: Tensor, keep: Optional[Tensor], scale: float
) -> Tensor:
    """(B, N, heads * D) pixels ask tokens with keys (B, heads, L, D), biases (B, heads, L), values (B, heads, L, E).

    Returns shortcut + keep softmax(scale (x k^T + bias)) v, (B, N, heads * E); `bias` may be None, `keep` None or (B,).
    """
    if not usable(x) or not fits(k, v):
        return plain_tokens_to_pixels(x, k, bias, v, shortcut, keep, scale)
    dtype = amp_dtype(x)
    return tokens_to_pixels_forward(x.to(dtype), k.to(dtype), bias, v.to(dtype), shortcut.to(dtype), keep, scale)


# Measurement ----------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """The modules of VT-ResNet-18 and -50 at 224 pixels: 14 x 14 pixels, 16 tokens, heads of 64 channels."""
    made = []
    for heads, width in ((8, 32), (8, 64), (16, 64)):  # the first projector of VT-ResNet-18 widens
        made += [_spread_case(heads, width, batch, train) for batch, train in ((256, False), (128, True))]
        if width == 64:
            made += [_gather_case(heads, width, batch, train) for batch, train in ((256, False), (128, True))]
    return made


CANDIDATES = [
    dict(BLOCK=block, num_warps=warps) for block, warps in ((32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8))
]
PIXELS, TOKENS = 196, 16


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _gather_case(heads: int, width: int, batch: int, train: bool) -> Case:
    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        q, x = _random(device, batch, heads, TOKENS, width), _random(device, batch, PIXELS, heads * width)
        if not train:
            return q, x
        return _random(device, batch, TOKENS, heads * width), q, x, *_gather(q, x, width**-0.5)

    ways: Any = (_gather_backward, _gather_backward_plain) if train else (_gather, plain_pixels_to_tokens)
    return Case(
        operation="pixels_to_tokens_backward" if train else "pixels_to_tokens",
        shape=dict(rows=batch * heads, pixels=PIXELS, tokens=TOKENS, width=width),
        inputs=inputs,
        kernel=lambda *tensors: ways[0](*tensors, width**-0.5),
        plain=lambda *tensors: ways[1](*tensors, width**-0.5),
        bytes=2 * batch * heads * width * (PIXELS * (2 if train else 1) + 2 * TOKENS),
        candidates=CANDIDATES,
    )


def _spread_case(heads: int, width: int, batch: int, train: bool) -> Case:
    out = 64

    def inputs(device: torch.device) -> tuple[Tensor | None, ...]:
        x, k = _random(device, batch, PIXELS, heads * width), _random(device, batch, heads, TOKENS, width)
        bias, v = _random(device, batch, heads, TOKENS), _random(device, batch, heads, TOKENS, out)
        y = _random(device, batch, PIXELS, heads * out)  # the shortcut, or a gradient
        return (y, x, k, bias, v, None) if train else (x, k, bias, v, y, None)

    ways: Any = (_spread_backward, _spread_backward_plain) if train else (_spread, plain_tokens_to_pixels)
    return Case(
        operation="tokens_to_pixels_backward" if train else "tokens_to_pixels",
        shape=dict(rows=batch * heads, pixels=PIXELS, tokens=TOKENS, width=width, out=out),
        inputs=inputs,
        kernel=lambda *tensors: ways[0](*tensors, out**-0.5),
        plain=lambda *tensors: ways[1](*tensors, out**-0.5),
        bytes=2 * batch * heads * PIXELS * (2 * width + out if train else width + 2 * out),
        candidates=CANDIDATES,
    )
