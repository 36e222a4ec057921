"""The kernels against their twins in float64, in Triton's interpreter, and on a GPU where there is one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, random
from weft.kernels import switch
from weft.kernels.activation import KINDS, activation, activation_forward, plain_activation

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5, deadline=None)
@given(shape=SHAPES)
def test_activation(kind: str, dtype: torch.dtype, shape: list[int]) -> None:
    x = 3 * random(*shape, dtype=dtype)
    check_values(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)
    check_gradients(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)


@pytest.mark.parametrize("kind", KINDS)
def test_activation_is_an_operator(kind: str) -> None:
    torch.library.opcheck(torch.ops.weft.activation.default, (random(3, 5).requires_grad_(), kind))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_everywhere(kind: str) -> None:
    """The formulas of the kernels are as good as float32: training in it must not notice them."""
    x = torch.linspace(-12, 12, 4001, device=DEVICE).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, wanted = activation_forward(x, kind), plain_activation(wide, kind)
    assert ((y - wanted).abs() / wanted.abs().clamp(1.0)).max() < 1e-6
    (slope,), (wanted_slope,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(wanted.sum(), wide)
    assert (slope - wanted_slope)[x != 0].abs().max() < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_activation_at_the_ends(kind: str) -> None:
    x = torch.tensor([-60000.0, -200.0, -20.0, -0.0, 0.0, 20.0, 200.0, 60000.0], device=DEVICE)
    check_values(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)
    check_gradients(lambda x: activation_forward(x, kind), lambda x: plain_activation(x, kind), x)
    assert activation_forward(torch.tensor([torch.nan, 1.0], device=DEVICE), kind)[0].isnan()


def test_no_activation() -> None:
    x = random(3)
    assert activation(x, "none") is x


def test_under_a_compiler_kernels_are_asked_for_and_in_an_exported_program_not(monkeypatch):
    """The compiler of torch 2.11 says that it is an export."""
    monkeypatch.setattr(switch, "has_triton", lambda: True)
    monkeypatch.setattr(switch, "_gpu_is_new_enough", lambda index: True)

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if switch._machine_can(0) else x - 1

    x = torch.zeros(2)
    assert torch.compile(Asks(), fullgraph=True, backend="eager")(x).tolist() == [1, 1]
    assert torch.export.export(Asks(), (x,)).module()(x).tolist() == [-1, -1]
