"""The references that define operations equal the models' own code to the last bit; neither imports the other."""

from collections.abc import Callable

import pytest
import torch
from timm.layers.pos_embed_rel import gen_relative_position_index
from torch import Tensor

from tests.helpers.kernel_checks import as_list
from weft.kernels.ops.activation import KINDS, reference_activation
from weft.kernels.ops.performer import reference_performer
from weft.kernels.ops.window_attention import reference_window_attention
from weft.models import layers
from weft.models.performer import PerformerAttention
from weft.models.windows import windowed_attention

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """On the CPU, where the same operations give the same bits."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_same(ours: Callable[..., object], theirs: Callable[..., object], *tensors: Tensor) -> None:
    """Outputs and, under random gradients of those, the gradients of `tensors` are the same numbers."""
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in tensors]
        outputs = as_list(function(*leaves))
        upstream = [random(*y.shape, dtype=y.dtype, seed=i) for i, y in enumerate(outputs)]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_activations(kind: str) -> None:
    check_same(lambda x: reference_activation(x, kind), lambda x: layers.activate(x, kind), 3 * random(999))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 8), (5, 8), (50, 64)])
def test_the_performer(dtype: torch.dtype, tokens: int, channels: int) -> None:
    attention, kqv = PerformerAttention(channels, dtype=dtype), random(2, tokens, 3 * channels, dtype=dtype)
    check_same(lambda kqv: reference_performer(kqv, attention.w), attention.mix, kqv)


@pytest.mark.parametrize("amp", [torch.bfloat16, torch.float16])
def test_the_performer_is_exact_under_autocast(amp: torch.dtype) -> None:
    attention, kqv = PerformerAttention(8), random(2, 7, 24)
    with torch.autocast("cpu", amp):
        check_same(lambda kqv: reference_performer(kqv, attention.w), attention.mix, kqv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (3, 4), (4, 8), (7, 7), (14, 9), (2, 9)])
def test_windows(height: int, width: int, window: int, shifted: bool, dtype: torch.dtype) -> None:
    """Maps that windows fit, that they do not fit, and that are smaller than a window."""
    q, k, v = (random(2, height, width, 8, dtype=dtype, seed=i) for i in range(3))
    table = random((2 * window - 1) ** 2, 2, dtype=torch.promote_types(dtype, torch.float32))
    index = gen_relative_position_index((window, window)).view(-1)
    check_same(
        lambda q, k, v, table: reference_window_attention(q, k, v, table, window, shifted),
        lambda q, k, v, table: windowed_attention(q, k, v, table, index, 2, window, shifted, 0.0),
        *(q, k, v, table),
    )
