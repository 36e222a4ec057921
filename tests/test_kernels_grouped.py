"""Convolutions in small groups against their twin, in Triton's interpreter, and on a GPU where there is one."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from tests.lost_kernels import QUICK_CHECKS, check_promise, lose
from weft.kernels.choose import forced
from weft.kernels.grouped import cases, grouped_conv_forward, plain_grouped_conv

SMALL = dict(rows=32, chunk=16, block=32)  # few programs, which the interpreter runs one by one


def check(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, act: str) -> None:
    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return grouped_conv_forward(x, weight, bias, groups, act)

    def twin(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return plain_grouped_conv(x, weight, bias, groups, act)

    check_values(kernel, twin, x, weight, bias, factor=2.0)
    check_gradients(kernel, twin, x, weight, bias, factor=4.0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])  # shrinking would take minutes
@given(
    batch=st.integers(1, 2),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    groups=st.integers(1, 4),
    inner=st.integers(1, 8),
    outer=st.integers(1, 8),
    act=st.sampled_from(("none", "gelu", "silu")),
)
def test_any_size(
    dtype: torch.dtype, batch: int, height: int, width: int, groups: int, inner: int, outer: int, act: str
) -> None:
    x = random(batch, height, width, groups * inner, dtype=dtype)
    weight = random(groups * outer, inner, 3, 3) / (3 * inner**0.5)
    with forced(SMALL):
        check(x, weight, random(groups * outer), groups, act)


@pytest.mark.parametrize(("inner", "outer"), [(4, 12), (12, 4)])
def test_windows_of_several_chunks(inner: int, outer: int) -> None:
    x, weight = random(1, 3, 4, 6 * inner), random(6 * outer, inner, 3, 3) / inner
    with forced(SMALL):
        check(x, weight, random(6 * outer), 6, "none")


def test_without_a_bias() -> None:
    with forced(SMALL):
        check(random(2, 5, 3, 16), random(32, 4, 3, 3) / 6, None, 4, "none")


def test_is_an_operator() -> None:
    x, weight, bias = (random(*shape).requires_grad_() for shape in ((1, 3, 3, 8), (8, 4, 3, 3), (8,)))
    with forced(SMALL):
        torch.library.opcheck(
            torch.ops.weft.grouped_conv.default, (x, weight, bias, 2, "silu"), test_utils=QUICK_CHECKS
        )


@pytest.mark.parametrize("lost", ["grouped_conv", "grouped_conv_weight"])
def test_twin_beside_kernel(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, lost, **SMALL)
    check(random(1, 2, 3, 8, dtype=torch.bfloat16), random(8, 4, 3, 3) / 6, random(8), 2, "silu")


def test_the_twin_keeps_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    lose(monkeypatch, "grouped_conv")
    x, weight = random(1, 2, 3, 8, dtype=torch.bfloat16), random(8, 4, 3, 3)
    check_promise("grouped_conv", x, weight, random(8), 2, "silu")
    check_promise("grouped_conv_backward", x, x, weight, None, 2, "none")


def test_nothing_is_kept_for_each_size_of_a_map() -> None:
    from weft.kernels.gpu import grouped

    def kept(rows: int) -> tuple[int, int]:
        way = grouped.plan("grouped_conv", rows, 8, 8, 2, torch.device("cpu"))
        grouped.jobs(((0, way, False),), torch.device("cpu"))
        return grouped._plan.cache_info().currsize, grouped.jobs.cache_info().currsize

    assert kept(10) == kept(11)


def test_cases_name_their_shapes() -> None:
    found = cases()
    assert {case.operation for case in found} == {"grouped_conv", "grouped_conv_weight"}
    assert all(len(case.candidates) > 3 and case.bytes > 0 for case in found)
