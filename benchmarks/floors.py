"""The time under which a model cannot run, however well it is written.

Every convolution and every matrix product is taken to be one kernel that reads its inputs and weights once, writes its
output once, and needs the larger of two times: its bytes at the rate of a copy, its multiplications at the rate of a
large matrix product. Attention scores need not be stored, so the largest of the three matrices of a batched product
costs nothing. All else (norms, activations, additions, pooling, layouts) is taken to happen inside these kernels, for
nothing. A training step adds what AdamW reads and writes. Operations are counted on the meta device.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import weft
from weft.bench import build, is_ours

PRODUCTS = {"bmm", "baddbmm"}  # on the meta device attention is two of these
ADAMW = 28  # bytes per parameter: weight, gradient and two averages read, all but the gradient written, in float32


@dataclass(frozen=True)
class Kernel:
    bytes: int
    flops: int


class Kernels(TorchDispatchMode):
    """Notes the convolutions and matrix products inside a `with`; `size` is the bytes of a value."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in flop_registry:
            outputs = out if isinstance(out, tuple) else (out,)
            counts = sorted(t.numel() for t in (*args, *outputs) if isinstance(t, Tensor))
            values = sum(counts[:-1] if function.overloadpacket.__name__ in PRODUCTS else counts)
            self.found.append(Kernel(self.size * values, _flops(function.overloadpacket, args, out)))
        return out


def _flops(packet: Any, args: tuple[Any, ...], out: Any) -> int:
    """Multiplications and additions. Torch's own count of a convolution's backward is wrong for groups."""
    if packet.__name__ == "convolution":  # of picture, weight (out, in / groups, k, k), ...
        return 2 * out.numel() * args[1][0].numel()
    if packet.__name__ == "convolution_backward":  # of gradient, picture, weight, ..., which gradients are wanted
        return 2 * args[0].numel() * args[2][0].numel() * sum(args[-1][:2])
    return flop_registry[packet](*args, out_val=out)


def kernels_of(name: str, batch: int, img_size: int, train: bool, size: int = 2) -> list[Kernel]:
    """The kernels of a forward pass, or of a training step."""
    with torch.device("meta"):
        model = build(name, img_size)
        pictures = torch.empty(batch, 3, img_size, img_size)
    if train:
        with Kernels(size) as counter:
            model.train()(pictures).sum().backward()
        return [*counter.found, Kernel(ADAMW * sum(p.numel() for p in model.parameters()), 0)]
    model = weft.fuse(model) if is_ours(name) else model.eval()
    with Kernels(size) as counter, torch.no_grad():
        model(pictures)
    return counter.found


def floor(kernels: list[Kernel], copy: float, matrix: float) -> float:
    """Seconds, at `copy` bytes and `matrix` multiplications and additions per second."""
    return math.fsum(max(kernel.bytes / copy, kernel.flops / matrix) for kernel in kernels)
