"""Blocks of VT-ResNet, VT modules and CE units by kernels, in Triton's interpreter, against themselves without."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernel_checks import DEVICE, close, random
from weft.models import ce, fuse
from weft.models.vt import VisualTransformer
from weft.models.vt_resnet import BasicBlock, Bottleneck


def down(chs: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(chs, out, 1, 2, bias=False), nn.BatchNorm2d(out))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "basic": lambda: BasicBlock(8, 16, 2, down(8, 16)),
    "bottleneck": lambda: Bottleneck(16, 4),
    "convolution": lambda: ce.fused_mbconv(8, 8, 1, 1),
    "mbconv": lambda: ce.mbconv(8, 8, 1, 2),
    "mbconv, stride 2": lambda: ce.mbconv(8, 12, 2, 2),
    "fused mbconv": lambda: ce.fused_mbconv(8, 8, 1, 2),
}
MODULES: dict[str, dict[str, Any]] = {
    "filter": dict(in_chs=64, channels=32),
    "recurrent": dict(in_chs=48, channels=48, tokenizer="recurrent", carried_tokens=1),
    "clustering": dict(in_chs=48, channels=48, tokenizer="clustering"),
}


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes Weft take every map for one on a GPU."""

    def force() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("weft.") and name != "weft.kernels.switch" and hasattr(module, "usable"):
                monkeypatch.setattr(module, "usable", lambda x: True)

    return force


def randomise(module: nn.Module) -> nn.Module:
    for i, parameter in enumerate(module.parameters()):
        parameter.data = random(*parameter.shape, seed=i) * (
            0.3 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        )
    return module.to(DEVICE)


def check_training(module: nn.Module, by_kernels: Callable[[], None], *inputs: Tensor) -> None:
    """Outputs, gradients and running statistics."""
    modules = module.train(), copy.deepcopy(module)
    results = []
    for each in modules:
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        outputs = each(*leaves)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        torch.autograd.backward(outputs, [random(*out.shape, seed=7) for out in outputs])
        names = [name for name, _ in each.named_parameters()]
        grads = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in each.parameters()]
        results.append(dict(zip([f"output {i}" for i in range(len(outputs))], outputs, strict=True)))
        results[-1] |= zip(["input", "tokens"][: len(leaves)] + names, grads, strict=True)
        results[-1] |= dict(each.named_buffers())
        by_kernels()
    for name, wanted in results[0].items():
        largest = max(value.abs().max().item() for value in results[0].values())
        error = (results[1][name] - wanted).abs().max().item()
        assert error <= 2e-5 * largest, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("block", BLOCKS)
def test_block(block: str, by_kernels: Callable[[], None]) -> None:
    module = randomise(BLOCKS[block]())
    chs = next(module.parameters()).shape[1]
    x = random(2, chs, 3, 4).contiguous(memory_format=torch.channels_last)
    check_training(module, by_kernels, x)


@pytest.mark.parametrize("block", BLOCKS)
def test_folded_block(block: str, by_kernels: Callable[[], None]) -> None:
    module = randomise(BLOCKS[block]()).eval()
    chs = next(module.parameters()).shape[1]
    x = random(2, chs, 3, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = module(x)
        by_kernels()
        close(module(x), wanted, 1e-5, "eval mode")
        close(fuse.fuse(module)(x), wanted, 1e-5, "folded")


@pytest.mark.parametrize("kind", MODULES)
def test_vt_module(kind: str, by_kernels: Callable[[], None]) -> None:
    args = dict(num_tokens=5, token_dim=64, group_width=16, num_heads=2) | MODULES[kind]
    module = randomise(VisualTransformer(**args))
    x = random(2, args["in_chs"], 3, 4).contiguous(memory_format=torch.channels_last)
    check_training(module, by_kernels, x, *([random(2, 5, 64)] if kind == "recurrent" else []))
