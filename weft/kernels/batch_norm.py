"""Stub."""

import torch.nn.functional as F

from weft.kernels.activation import plain_activation


def batch_norm_act(x, weight, bias, running_mean, running_var, training, momentum, eps, act, residual=None, keep=None):
    y = F.batch_norm(x.permute(0, 3, 1, 2), running_mean, running_var, weight, bias, training, momentum, eps).permute(
        0, 2, 3, 1
    )
    if keep is not None:
        y = y * keep.view(-1, 1, 1, 1)
    if residual is not None:
        y = y + residual
    return plain_activation(y, act)
