"""A PCM in training as one step against its layers, in Triton's interpreter, and on a GPU where there is one."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.kernel_checks import DEVICE, close, random
from weft.kernels import pcm as kernels
from weft.kernels.choose import forced
from weft.models.vitae import pcm


def layers(dim: int, hidden: int, groups: int) -> nn.Sequential:
    built = pcm((dim, hidden, dim, dim), (1, 1, 1), (True, True, False), groups, True, device=DEVICE)
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    return built.train()


@pytest.mark.parametrize(("outer", "groups", "keep"), [(8, 3, None), (12, 2, (0.0, 2.0))])
def test_training(outer: int, groups: int, keep: tuple[float, ...] | None) -> None:
    """Values, running statistics and all gradients."""
    ours = layers(4 * groups, outer * groups, groups)
    theirs = copy.deepcopy(ours).double()
    x = random(2, 3, 4, 4 * groups)
    factors = None if keep is None else torch.tensor(keep, device=DEVICE)

    def twin(x: Tensor) -> Tensor:
        local = theirs(x)
        return x + (local if factors is None else local * factors.double().view(-1, 1, 1, 1))

    given, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    with forced(dict(rows=32, chunk=16, block=32)):
        found, wanted = kernels.train_pcm(given, factors, ours), twin(wide)
        close(found, wanted, 1e-5, "output")
        upstream = random(*x.shape, seed=1)
        found.backward(upstream)
    wanted.backward(upstream.double())
    pairs = [("the map", given, wide)]
    pairs += [(name, mine, theirs.get_parameter(name)) for name, mine in ours.named_parameters()]
    for name, mine, other in pairs:
        assert mine.grad is not None
        assert other.grad is not None
        # A bias in front of a BatchNorm has no gradient but rounding.
        close(mine.grad, other.grad, 1e-4 if other.grad.abs().max() > 1e-9 else 1e-2, f"gradient of {name}")
    for (name, mine), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        close(mine.float(), other.float(), 1e-5, name)


def test_what_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    x = random(1, 3, 3, 8)
    assert kernels.is_one_step(x, layers(8, 16, 2))
    assert not kernels.is_one_step(x, layers(8, 16, 2).eval())
    assert not kernels.is_one_step(x, pcm((8, 16, 8), (1, 1), (True, False), 2, False))
    assert not kernels.is_one_step(x, pcm((8, 16, 8, 8), (1, 1, 1), (False, False, False), 2, True))
