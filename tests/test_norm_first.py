"""Layers that make again what the BatchNorm in front of them gave: numbers as ever, and less kept on the way."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import weft
from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from tests.lost_kernels import QUICK_CHECKS
from tests.test_kernels_in_blocks import by_kernels, check_training, randomise  # noqa: F401  a fixture
from weft.kernels import op
from weft.kernels.batch_norm import batch_norm_statistics, plain_batch_norm_act
from weft.kernels.depthwise import plain_depthwise
from weft.kernels.norm_depthwise import norm_depthwise
from weft.models.ceit import LeFF
from weft.models.cetnet import LEWinAttention

# side, columns, channels, kernel, stride
MAPS = [(3, 4, 8, 3, 1), (5, 3, 40, 3, 2), (4, 4, 33, 5, 1), (14, 14, 8, 3, 1)]


def norm_conv(act: str, stride: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def kernel(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        moments = batch_norm_statistics(x.detach(), None, None, None, 0.1)
        return norm_depthwise(x, moments, gamma, beta, 1e-5, act, weight, bias, stride)

    def twin(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = plain_batch_norm_act(x, gamma, beta, None, None, True, 0.1, 1e-5, act)
        return plain_depthwise(y, weight, bias, None, None, stride, "none", "none")

    return kernel, twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, cols, channels, kernel, stride", MAPS)
def test_norm_and_convolution(
    rows: int, cols: int, channels: int, kernel: int, stride: int, dtype: torch.dtype
) -> None:
    functions = norm_conv("gelu" if channels % 8 else "none", stride)
    x = random(2, rows, cols, channels, dtype=dtype) * 2 + 1
    gamma, beta = random(channels, seed=1), random(channels, seed=2)
    weight, bias = random(channels, 1, kernel, kernel) / kernel, random(channels, seed=3) if stride == 1 else None
    check_values(*functions, x, gamma, beta, weight, bias, factor=2.0)
    check_gradients(*functions, x, gamma, beta, weight, bias, factor=4.0)


def test_it_is_an_operator() -> None:
    x, weight = random(2, 3, 4, 8).requires_grad_(), random(8, 1, 3, 3).requires_grad_()
    gamma, beta = random(8, seed=1).requires_grad_(), random(8, seed=2)
    moments = batch_norm_statistics(x.detach(), None, None, None, 0.1)
    args = (x, moments, gamma, beta, 1e-5, "gelu", weight, None, 2)
    torch.library.opcheck(torch.ops.weft.norm_depthwise.default, args, test_utils=QUICK_CHECKS)


class OneMap(nn.Module):
    """LeFF without its class token."""

    def __init__(self, leff: LeFF):
        super().__init__()
        self.leff = leff

    def forward(self, x: Tensor) -> Tensor:
        return self.leff(x, x[:, 0, :1])[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LeFF": lambda: OneMap(LeFF(8, 16, 3, norm=True, final_act=False)),
    "LeFF, 5x5, final GELU": lambda: OneMap(LeFF(8, 16, 5, norm=True, final_act=True)),
    "LeFF, no norm": lambda: OneMap(LeFF(8, 16, 3, norm=False, final_act=False)),
    "LEWin": lambda: LEWinAttention(16, 2, 2, True, "qkv", 0.0, 0.0),
}


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, by_kernels: Callable[[], None]) -> None:  # noqa: F811
    """Outputs, gradients and running statistics are those of the modules one by one."""
    check_training(randomise(MODULES[name]()), by_kernels, random(2, 4, 4, 16 if name == "LEWin" else 8))
