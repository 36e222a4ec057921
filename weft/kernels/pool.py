"""Stub."""

import torch.nn.functional as F


def max_pool(x, stride):
    return F.max_pool2d(x.permute(0, 3, 1, 2), 3, stride, padding=1).permute(0, 2, 3, 1)
