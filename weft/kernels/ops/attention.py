"""Attention of many tokens to few keys, as CvT has it where keys and values are taken at stride 2, for inference.

All keys of a head fit into one tile, so that every query is read once and every answer written once. The library goes
over them as if there were thousands, and wants heads apart from each other in memory.
"""

import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define

HEAD_WIDTHS = (16, 32, 64, 128)
MOST_KEYS = 128


def reference_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """The reference. q: (B, N, C); k, v: (B, L, C), channels in `heads`; returns (B, N, C)."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


attention_forward = define("attention", reference_attention, "attention.forward")


def suits_heads(width: int) -> bool:
    """Whether there are tiles for heads of this width."""
    return width in HEAD_WIDTHS
