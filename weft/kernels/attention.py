"""Attention of many tokens to few keys, as CvT has it where keys and values are taken at stride 2, for inference.

All keys of a head fit into one tile, so that every query is read once and every answer written once. The library goes
over them as if there were thousands, and wants heads apart from each other in memory.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import usable

HEAD_WIDTHS = (16, 32, 64, 128)
MOST_KEYS = 128


def plain_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """The twin. q: (B, N, C); k, v: (B, L, C), channels in `heads`; returns (B, N, C)."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


def _launch(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    from weft.kernels.gpu import attention

    return attention.forward(q.contiguous(), k.contiguous(), v.contiguous(), heads, scale)


def _fake(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    return q.new_empty(q.shape)


attention_forward = define(
    "attention(Tensor q, Tensor k, Tensor v, int heads, float scale) -> Tensor", plain_attention, _launch, _fake
)


def suits(q: Tensor, k: Tensor, heads: int) -> bool:
    """Whether `attention_forward` may answer: no gradient is wanted, keys are few, and heads as wide as tiles."""
    if torch.is_grad_enabled() or not usable(q):
        return False
    return k.shape[1] <= MOST_KEYS and q.shape[2] // heads in HEAD_WIDTHS


def cases(batch: int = 256) -> list[Case]:
    """The last stage of CvT at 224 pixels with its class token, and wider or larger ones."""
    return [_case(batch, *shape) for shape in [(197, 50, 6, 64), (785, 101, 3, 64), (577, 128, 6, 64), (50, 50, 6, 64)]]


def _case(batch: int, queries: int, keys: int, heads: int, width: int) -> Case:
    channels = heads * width

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(batch, length, channels, device=device, dtype=torch.bfloat16)
            for length in (queries, keys, keys)
        )

    rest = dict(heads=heads, scale=channels**-0.5)
    return Case(
        operation="attention",
        shape=dict(queries=queries, keys=keys, width=width),
        inputs=inputs,
        kernel=partial(_launch, **rest),
        plain=partial(plain_attention, **rest),
        bytes=4 * batch * channels * (queries + keys),
        flops=4 * batch * channels * queries * keys,
        candidates=[dict(rows=rows, num_warps=warps) for rows, warps in [(64, 4), (128, 4), (128, 8), (64, 2)]],
    )
