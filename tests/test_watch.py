"""Fused paths step aside where somebody watches, replaces or freezes a module; here twins stand for the kernels."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from tests.conftest import randomise
from weft.kernels import op, switch, switched
from weft.kernels.watch import bare

NANO = ("ceit_nano", "cvt_nano", "cetnet_nano", "vitae_nano", "vt_resnet_nano")


@pytest.fixture
def fused_on_cpu(monkeypatch):
    """The paths of a GPU, on the CPU."""
    monkeypatch.setattr(switch, "_usable", lambda x: switch._on)
    monkeypatch.setattr(op, "interpreted", lambda: False)


def make(name: str) -> nn.Module:
    model = randomise(timm.create_model(name, drop_path_rate=0.0, num_classes=5))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ViTAE's own
    return model


def both_ways(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    picture = torch.randn(2, 3, 32, 32)
    with switched(True):
        fused = copy.deepcopy(model)(picture)
    with switched(False):
        return fused, copy.deepcopy(model)(picture)


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    skip = (nn.Identity, nn.Dropout)
    return {n: m for n, m in model.named_modules() if not list(m.children()) and not isinstance(m, skip)}


@pytest.mark.parametrize("name", NANO)
def test_hooks_fire_as_without_kernels(name, fused_on_cpu):
    model = make(name)
    fired: set[str] = set()
    for leaf, module in leaves(model).items():
        module.register_forward_hook(lambda *_, leaf=leaf: fired.add(leaf))
    seen = []
    for on in (True, False):
        fired.clear()
        with switched(on), torch.no_grad():
            model(torch.randn(1, 3, 32, 32))
        seen.append(set(fired))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 20


# ViTAE's PCM has no twin in training: its kernels run in the interpreter, which takes long.
IN_BOTH_MODES = [
    pytest.param(name, train, marks=pytest.mark.slow if train and "vitae" in name else ())
    for name in NANO
    for train in (False, True)
]


@pytest.mark.parametrize(("name", "train"), IN_BOTH_MODES)
def test_fused_paths_equal_the_modules(name, train, fused_on_cpu):
    fused, plain = both_ways(make(name).train(train))
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", NANO)
def test_some_norms_frozen_and_some_averaging(name, fused_on_cpu):
    """Every second BatchNorm in eval mode, the others with the momentum that averages: as `update_bn` has them."""
    model = make(name).train()
    for i, module in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        if i % 2:
            module.eval()
        else:
            module.momentum = None
    fused, plain = both_ways(model)
    torch.testing.assert_close(fused, plain, rtol=1e-3, atol=1e-4)


def test_a_replaced_norm_is_used(fused_on_cpu):
    model = make("cvt_nano")
    before, _ = both_ways(model)
    model.stages[0].blocks[0].norm1 = nn.Identity()
    fused, plain = both_ways(model)
    torch.testing.assert_close(fused, plain)
    assert not torch.allclose(fused, before)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_bare():
    def linear() -> nn.Linear:
        return nn.Linear(2, 2)

    assert bare(linear(), nn.Identity())
    assert bare(linear(), types=(nn.Linear,))
    assert not bare(linear(), types=(nn.Identity,))
    watched = [linear() for _ in range(6)]
    watched[0].register_forward_hook(lambda *_: None)
    watched[1].register_forward_pre_hook(lambda *_: None)
    watched[2].register_full_backward_hook(lambda *_: None)
    watched[3].forward = lambda x: x
    prune.l1_unstructured(watched[4], "weight", 1)
    parametrize.register_parametrization(watched[5], "weight", Double())
    assert [bare(module, types=(nn.Linear,)) for module in watched] == [False] * 6
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not bare(linear())
    handle.remove()
    assert bare(linear())


def test_functional_gradients_are_those_without_kernels(fused_on_cpu):
    model = make("cvt_nano")
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    picture = torch.randn(1, 3, 32, 32)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (picture,)).square().sum()

    found = []
    for on in (True, False):
        with switched(on):
            found.append(torch.func.grad(loss)(parameters)["head.weight"])
    torch.testing.assert_close(*found)
