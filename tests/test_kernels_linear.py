"""Linear layers in training: the same values and gradients as torch's, with and without autocast."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.kernel_checks import DEVICE, check_values, random
from weft.kernels import linear
from weft.models.layers import GELU, Mlp


def outcome(run: Callable[..., Any], layers: Sequence[Any], xs: list[Tensor], amp: bool) -> list[Tensor | None]:
    for layer in layers:
        layer.zero_grad()
    xs = [x.detach().requires_grad_() for x in xs]
    with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
        ys = run(*xs)
    torch.autograd.backward(ys, [random(*y.shape, dtype=y.dtype, seed=i) for i, y in enumerate(ys)])
    return [*ys, *(x.grad for x in xs), *(p.grad for layer in layers for p in layer.parameters())]


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("kind", ["three", "one", "mlp"])
def test_like_torch(kind: str, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    count = 3 if kind == "three" else 1
    block = Mlp(6, 8, 5, act_layer=GELU).to(DEVICE)
    layers: list[Any] = [block.fc1, block.fc2]
    if kind != "mlp":
        layers = [linear.Linear(6, 8).to(DEVICE) for _ in range(count)]
    xs = [random(2, 3, 4, 6, seed=i) for i in range(count)]
    runs = {
        "mlp": lambda x: (block(x),),
        "one": lambda x: (layers[0](x),),
        "three": lambda *xs: linear.linears(xs, layers),
    }
    wanted = outcome(runs[kind], layers, xs, amp)
    monkeypatch.setattr(linear, "usable", lambda x: True)
    found = outcome(runs[kind], layers, xs, amp)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours is not None and theirs is not None and ours.dtype == theirs.dtype  # noqa: PT018
        torch.testing.assert_close(ours, theirs, rtol=2e-2 if amp else 1e-5, atol=2e-2 if amp else 1e-5)


def test_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen parameters and inputs without a gradient get none; layers that somebody watches are called."""
    monkeypatch.setattr(linear, "usable", lambda x: True)
    layer = nn.Linear(3, 2).to(DEVICE)
    layer.weight.requires_grad_(False)
    linear.linears((random(4, 3),), (layer,))[0].sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer.bias.grad, torch.full((2,), 4.0, device=DEVICE))
    seen = []
    layer.register_forward_hook(lambda *args: seen.append(args))
    linear.linears((random(4, 3),), (layer,))
    assert seen


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 300), columns=st.integers(1, 70))
def test_sums_over_rows(rows: int, columns: int) -> None:
    from weft.kernels.gpu.linear import column_sums

    check_values(column_sums, lambda x: x.sum(0), random(rows, columns, dtype=torch.bfloat16))
