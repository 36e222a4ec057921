"""Shortcut, stochastic depth and LayerNorm of a map and its class token: what stands between two branches, in one pass.

A block's state is a (B, H, W, C) map and, in some families, a (B, 1, C) class token. A branch gives back either tokens,
(B, [1 +] H*W, C) with the class token first, or a map and a class token; and wants either. So there are

    norm_tokens, norm_pair                  LayerNorm(x), as tokens or as map and class token
    add_norm_tokens, add_norm_pair          x + keep y, and its LayerNorm
    add_branch                              x + keep y

with `keep`, None or (B,), the factors of stochastic depth.
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_add(
    x: Tensor, cls: Optional[Tensor], y: Tensor, y_cls: Optional[Tensor], keep: Optional[Tensor]
) -> tuple[Tensor, Optional[Tensor]]:
    """The twin: map and class token plus `keep` times a branch, which is tokens, or a map and a class token `y_cls`."""
    y_map = y
    if cls is not None and y_cls is None:
        y_map, y_cls = y[:, 1:], y[:, :1]
    y_map = y_map.reshape(x.shape)
    if keep is not None:
        y_map = y_map * keep.view(-1, 1, 1, 1)
        y_cls = y_cls * keep.view(-1, 1, 1) if y_cls is not None else None
    return x + y_map, cls + y_cls if cls is not None and y_cls is not None else None


def plain_norm(
    x: Tensor, cls: Optional[Tensor], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Optional[Tensor]]:
    """The twin: LayerNorm of map and class token."""
    z = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return z, F.layer_norm(cls, cls.shape[-1:], weight, bias, eps) if cls is not None else None


def plain_join(cls: Optional[Tensor], x: Tensor) -> Tensor:
    return x.flatten(1, 2) if cls is None else torch.cat([cls, x.flatten(1, 2)], dim=1)


def norm_tokens(x: Tensor, cls: Optional[Tensor], weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of map and class token, as (B, [1 +] H*W, C) tokens."""
    z, z_cls = plain_norm(x, cls, weight, bias, eps)
    return plain_join(z_cls, z)


def norm_pair(
    x: Tensor, cls: Optional[Tensor], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Optional[Tensor]]:
    """LayerNorm of map and class token."""
    return plain_norm(x, cls, weight, bias, eps)


def add_norm_tokens(
    x: Tensor, cls: Optional[Tensor], y: Tensor, keep: Optional[Tensor], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    """x + keep y for the tokens `y` of a branch: map, class token, and the LayerNorm of both as tokens."""
    x, cls = plain_add(x, cls, y, None, keep)
    z, z_cls = plain_norm(x, cls, weight, bias, eps)
    return x, cls, plain_join(z_cls, z)


def add_norm_pair(
    x: Tensor, cls: Optional[Tensor], y: Tensor, keep: Optional[Tensor], weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]:
    """x + keep y for the tokens `y` of a branch: map, class token, and the LayerNorm of both as map and class token."""
    x, cls = plain_add(x, cls, y, None, keep)
    z, z_cls = plain_norm(x, cls, weight, bias, eps)
    return x, cls, z, z_cls


def add_branch(
    x: Tensor, cls: Optional[Tensor], y: Tensor, y_cls: Optional[Tensor], keep: Optional[Tensor]
) -> tuple[Tensor, Optional[Tensor]]:
    """x + keep y for a branch that gives tokens `y`, or a map `y` and a class token `y_cls`."""
    return plain_add(x, cls, y, y_cls, keep)
