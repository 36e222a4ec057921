"""A PCM in training as one step against its layers, in Triton's interpreter, and on a GPU where there is one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernel_checks import DEVICE, close, random
from tests.lost_kernels import lose
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
    if keep is not None:
        ours = ours.to(memory_format=torch.channels_last)
    theirs = copy.deepcopy(ours).double()
    x = random(2, 2, 3, 4 * groups)
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


def hook(*_: Any) -> None: ...


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers[2].bn.eval(),
        lambda layers: setattr(layers[0].bn, "eps", 1e-3),
        lambda layers: setattr(layers[2].bn, "momentum", 0.3),
        lambda layers: setattr(layers[2], "bn", nn.SyncBatchNorm(8)),
        lambda layers: setattr(layers[2], "act", "gelu"),
        lambda layers: setattr(layers[0], "act_in", "relu"),
        lambda layers: setattr(layers[0].conv, "bias", None),
        lambda layers: layers[0].conv.register_forward_hook(hook),
        lambda layers: layers[2].bn.register_forward_pre_hook(hook),
        lambda layers: layers[5].register_forward_hook(hook),
        lambda layers: layers.register_full_backward_hook(hook),
        lambda layers: layers.insert(1, nn.Dropout()),
        lambda layers: layers.__setitem__(1, nn.Dropout()),
        lambda layers: layers.__setitem__(2, nn.Identity()),
        lambda layers: nn.utils.parametrizations.weight_norm(layers[4].conv),
    ],
)
def test_what_is_no_longer_one_step(change: Callable[[nn.Sequential], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be overlooked in modules that are not called."""
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    built = layers(8, 16, 2)
    change(built)
    assert not kernels.is_one_step(random(1, 3, 3, 8), built)


OPERATIONS = "grouped_conv", "grouped_conv_weight", "batch_norm_statistics", "batch_norm", "batch_norm_backward"


@pytest.mark.parametrize("lost", [None, *OPERATIONS])
def test_not_where_a_kernel_lost(lost: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has no twin of its own, and its gradient no way back."""
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    lose(monkeypatch, str(lost))
    assert kernels.is_one_step(random(1, 3, 3, 8), layers(8, 16, 2)) == (lost is None)


def test_two_batches_before_a_gradient() -> None:
    """The running statistics of the first have changed by then, and nothing depends on them."""
    built, x = layers(4, 4, 2), random(1, 1, 2, 4)
    with forced(dict(rows=16, chunk=16, block=16)):
        versions = built[0].bn.running_mean._version
        both = [kernels.train_pcm(x, None, built) for _ in range(2)]
        sum(y.sum() for y in both).backward()
    assert built[0].bn.running_mean._version > versions + 1
    assert built[0].bn.num_batches_tracked == 2
