"""Attention inside windows: the kernel against its twin in float64, at sizes that windows fit and do not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, random
from weft.kernels.choose import forced
from weft.kernels.window_attention import fits, plain_window_attention, window_attention
from weft.models import windows
from weft.models.ce_hosts import SwinBlock
from weft.models.cetnet import LEWinAttention


def tensors(shape: tuple[int, int, int], heads: int, dim: int, window: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the table, which under autocast stays in float32."""
    return [*random(3, *shape, heads * dim, dtype=dtype), random((2 * window - 1) ** 2, heads)]


def check(given: list[Tensor], window: int, shifted: bool, programs: int = 99) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return window_attention(q, k, v, table, window, shifted)

    def twin(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return plain_window_attention(q, k, v, table, window, shifted)

    with forced({"programs": programs}):
        check_values(kernel, twin, *given, factor=2)
        check_gradients(kernel, twin, *given, factor=4)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    """A window, and a map in which it fits at most one and a half times in each direction."""
    window = draw(st.sampled_from([2, 4, 7]))
    return window, draw(st.integers(1, 3 * window // 2)), draw(st.integers(1, 3 * window // 2))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None)
@given(
    size=sizes(),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    dim=st.sampled_from([8, 16, 24, 32]),
    shifted=st.booleans(),
    programs=st.sampled_from([1, 99]),  # one program for all pictures, or one for each
)
def test_windows(dtype, size, batch, heads, dim, shifted, programs) -> None:
    window, height, width = size
    check(tensors((batch, height, width), heads, dim, window, dtype), window, shifted, programs)


@pytest.mark.parametrize("shifted", [False, True])
def test_models_have_such_windows(shifted: bool) -> None:
    check(tensors((2, 14, 7), 1, 32, 7, torch.bfloat16), 7, shifted, programs=2)


def test_maps_are_read_in_place() -> None:
    """As parts of one joint map, or behind a class token; and in layouts of their own."""
    joint = random(2, 1 + 4 * 3, 3 * 16)
    views = joint[:, 1:].view(2, 4, 3, 48).chunk(3, dim=-1)
    table = random(25, 2)
    check([*views, table], 3, True, programs=1)
    check(
        [views[0], views[1].contiguous(), views[2].transpose(1, 2).contiguous().transpose(1, 2), table],
        3,
        True,
        programs=1,
    )


def test_it_is_an_operator() -> None:
    given = [t.requires_grad_() for t in tensors((1, 3, 2), 1, 8, 2, torch.float32)]
    checks = "test_schema", "test_autograd_registration", "test_faketensor"  # the others take long
    torch.library.opcheck(torch.ops.weft.window_attention.default, (*given, 2, True), test_utils=checks)


def test_what_fits() -> None:
    maps = torch.empty(1, 8, 8, 96, device="meta")
    assert all(fits(maps, heads, window) for heads, window in ((3, 7), (4, 8), (12, 1)))
    assert not any(fits(maps, heads, window) for heads, window in ((3, 9), (1, 7), (32, 7)))


@pytest.mark.parametrize("kind", ["lewin", "swin"])
def test_attention_of_the_models_is_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels and without, including the gradients of all parameters."""
    torch.manual_seed(0)
    layer = (
        LEWinAttention(32, 2, 4, True, "none", 0.0, 0.0) if kind == "lewin" else SwinBlock(32, 2, 4, True, 1, 0, 0, 0)
    )
    layer, x = layer.to(DEVICE), random(1, 6, 7, 32)
    results = []
    for on in (False, True):
        calls = []
        monkeypatch.setattr(windows, "usable", lambda x, on=on, calls=calls: calls.append(x) or on)
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        assert calls, "the layer never asked"
        results.append([y, *(p.grad for p in layer.parameters())])
    for found, wanted in zip(*results[::-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
