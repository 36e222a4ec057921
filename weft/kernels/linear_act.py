"""A linear layer and the activation behind it.

The library writes the product, and the activation reads and writes all of it again, which takes longer than the product
did where channels are few. Which of two ways is faster differs from layer to layer:

    "library"    cublas, then one pass
    "kernel"     Triton, the activation as it writes
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activation import activation, plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import amp_dtype, usable


def plain_linear_act(x: Tensor, weight: Tensor, bias: Tensor, act: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    """The twin: (..., C) -> act(x weight' + bias), and that without the activation if it is to be kept."""
    y = F.linear(x, weight, bias)
    return plain_activation(y, act), y if keep else None


def _launch(x: Tensor, weight: Tensor, bias: Tensor, act: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    from weft.kernels.gpu import linear_act

    return linear_act.forward(x, weight, bias, act, keep)


def _fake(x: Tensor, weight: Tensor, bias: Tensor, act: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    def empty() -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    return empty(), empty() if keep else None


linear_act_forward = define(
    "linear_act(Tensor x, Tensor weight, Tensor bias, str act, bool keep) -> (Tensor, Tensor)",
    plain_linear_act,
    _launch,
    _fake,
)


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, act: str) -> Tensor:
    """act(F.linear(x, weight, bias)). The kernel has no gradient; the twin has."""
    if torch.is_grad_enabled() or bias is None or not usable(x):
        return activation(F.linear(x, weight, bias), act)
    dtype = amp_dtype(x)
    return linear_act_forward(x.to(dtype), weight.to(dtype), bias, act, False)[0]


def cases(batch: int = 256) -> list[Case]:
    """Of CvT, CETNet and ViTAE at 224 pixels; those of training have half as many pictures."""
    layers = [  # side of the map, channels, features, activation
        (56, 64, 256, "silu"), (28, 192, 768, "silu"), (14, 384, 1536, "silu"),
        (56, 64, 256, "gelu"), (28, 128, 512, "gelu"), (14, 256, 1024, "gelu"), (7, 512, 2048, "gelu"),
        (14, 384, 1152, "gelu"),
    ]  # fmt: skip
    trained = [(14, 384, 1536, "quick_gelu"), (14, 256, 1024, "gelu")]
    return [_case(batch, *layer, False) for layer in layers] + [_case(batch // 2, *layer, True) for layer in trained]


def _case(batch: int, side: int, channels: int, features: int, act: str, keep: bool) -> Case:
    rows = batch * side * side
    tiles = [(128, 128, 4, 3), (128, 128, 8, 4), (128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3)]
    candidates = [{"how": "library"}] + [
        dict(how="kernel", BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in tiles
    ]

    def inputs(device: torch.device) -> tuple[Tensor, ...]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        weight = random(features, channels) * channels**-0.5
        return random(rows, channels), weight if keep else weight.t().contiguous().t(), random(features)

    return Case(
        operation="linear_act",
        shape=dict(rows=rows, channels=channels, features=features, act=act, keep=keep),
        inputs=inputs,
        kernel=partial(_launch, act=act, keep=keep),
        plain=partial(plain_linear_act, act=act, keep=keep),
        bytes=2 * rows * (channels + features * (2 if keep else 1)),
        flops=2 * rows * channels * features,
        candidates=candidates,
    )
