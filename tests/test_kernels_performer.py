"""The Performer's kernels against their twin, in Triton's interpreter, and on a GPU where there is one."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernel_checks import DTYPES, check_gradients, check_values, random
from tests.lost_kernels import QUICK_CHECKS, check_promise, lose
from weft.kernels.choose import forced
from weft.kernels.performer import cases, performer_forward, plain_performer

SMALL = dict(rows=16)


def kernel(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return performer_forward(kqv, w)[:2]


def twin(kqv: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return plain_performer(kqv, w)


def matrix(channels: int) -> Tensor:
    features = max(channels // 2, 1)
    return torch.linalg.qr(random(channels, features))[0].t().contiguous() * features**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2, deadline=None, phases=[Phase.generate])  # shrinking would take minutes
@given(
    batch=st.integers(1, 2),
    tokens=st.integers(1, 24),
    channels=st.integers(2, 24),
    scale=st.sampled_from((0.1, 0.5, 1.0)),
)
def test_any_size(dtype: torch.dtype, batch: int, tokens: int, channels: int, scale: float) -> None:
    kqv, w = scale * random(batch, tokens, 3 * channels, dtype=dtype), matrix(channels)
    with forced(SMALL):
        check_values(kernel, twin, kqv, w, factor=2.0 if dtype.itemsize < 4 else 20.0)
        check_gradients(lambda kqv: kernel(kqv, w), lambda kqv: twin(kqv, w.double()), kqv, factor=20.0)


@pytest.mark.parametrize("scale", [4.0, 1e3])
def test_where_the_features_overflow(scale: float) -> None:
    kqv, w = scale * random(1, 20, 48), matrix(16)
    with forced(SMALL):
        y, _ = kernel(kqv, w)
    assert (y - twin(kqv, w)[0]).abs().max() < 1e-3 * scale


def test_is_an_operator() -> None:
    with forced(SMALL):
        torch.library.opcheck(
            torch.ops.weft.performer.default, (random(1, 5, 24).requires_grad_(), matrix(8)), test_utils=QUICK_CHECKS
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lost", ["performer", "performer_backward"])
def test_twin_beside_kernel(lost: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by the one, backward by the other."""
    lose(monkeypatch, lost, **SMALL)
    kqv, w = random(2, 5, 24, dtype=dtype), matrix(8)
    check_gradients(lambda kqv: kernel(kqv, w), lambda kqv: twin(kqv, w.double()), kqv, factor=20.0)


def test_the_twin_keeps_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    kqv, grad, w = random(2, 5, 24, dtype=torch.bfloat16), random(2, 5, 8, dtype=torch.bfloat16), matrix(8)
    with forced(SMALL):
        found = performer_forward(kqv, w)[2]
    lose(monkeypatch, "performer", "performer_backward")
    check_promise("performer", kqv, w)
    check_promise("performer_backward", grad, grad, kqv, w, found)


def test_cases_name_their_shapes() -> None:
    found = cases()
    assert {case.operation for case in found} == {"performer", "performer_backward"}
    assert all(len(case.candidates) > 3 and case.bytes > 0 for case in found)
