"""Stub."""

import torch

from weft.kernels.depthwise import plain_depthwise


def qkv_depthwise(x, cls, weights, biases=None, scales=None, shifts=None, stride_kv=1):
    out = []
    for i in range(3):
        y = plain_depthwise(
            x,
            weights[i],
            biases[i] if biases else None,
            scales[i] if scales else None,
            shifts[i] if shifts else None,
            1 if i == 0 else stride_kv,
        ).flatten(1, 2)
        out.append(y if cls is None else torch.cat([cls, y], 1))
    return tuple(out)
