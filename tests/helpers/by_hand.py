"""Layers computed from a state dict alone, for networks that tests write out once more."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.conftest import randomise

Weights = dict[str, Tensor]


def enlarge(model: nn.Module) -> nn.Module:
    """Branches as large as what they are added to, so that a slip in one is no rounding error; eval mode.

    A new model hardly differs from its residuals: linear layers start at 0.02.
    """
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.2)
    return randomise(model)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def layer_norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def batch_norm(x: Tensor, w: Weights, name: str, norm: bool = True) -> Tensor:
    """In evaluation mode, with torch's 1e-5; without a `norm` there must be none."""
    assert (f"{name}.weight" in w) == norm
    if not norm:
        return x
    running = w[f"{name}.running_mean"], w[f"{name}.running_var"]
    return F.batch_norm(x, *running, w[f"{name}.weight"], w[f"{name}.bias"], eps=1e-5)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """(B, N, C), (B, n, C) twice -> (B, N, C), by an explicit softmax in each head."""
    parts = zip(*(t.chunk(heads, dim=-1) for t in (q, k, v)), strict=True)
    return torch.cat([(q @ k.transpose(1, 2) * scale).softmax(-1) @ v for q, k, v in parts], dim=-1)


def under(name: str, module: nn.Module) -> Weights:
    """The weights of a module as those of a network that has it under a name."""
    return {f"{name}.{key}": value for key, value in module.state_dict().items()}
