"""LayerNorm and BatchNorm kernels against their twins in float64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DTYPES, check_gradients, check_values, close, random
from weft.kernels.batch_norm import batch_norm_act_forward, batch_norm_statistics, plain_batch_norm_act
from weft.kernels.layer_norm import plain_residual_norm, plain_residual_norm_apart, residual_norm_forward

SIZES = st.integers(1, 5)


def norm(joined: bool, has_y: bool):
    """The operator as models use it: the outputs that exist."""

    def run(x, cls, y, keep, weight, bias):
        found = residual_norm_forward(x, cls, y, keep, weight, bias, 1e-5, x.dtype, joined)
        return [out for out in found if out.numel()]

    def twin(x, cls, y, keep, weight, bias):
        twin = plain_residual_norm if joined else plain_residual_norm_apart
        found = twin(x, cls, y, keep, weight, bias, 1e-5)
        return found if has_y else found[2:]

    return run, twin


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4)
@given(
    batch=SIZES,
    height=SIZES,
    channels=st.sampled_from([16, 24, 65]),
    has_cls=st.booleans(),
    has_y=st.booleans(),
    has_keep=st.booleans(),
)
def test_residual_norm(joined, dtype, batch, height, channels, has_cls, has_y, has_keep) -> None:
    length = height * 3 + has_cls
    x = random(batch, height, 3, channels, dtype=dtype)
    cls = random(batch, 1, channels, dtype=dtype) if has_cls else None
    y = random(batch, length, channels, dtype=dtype, seed=1) if has_y else None
    keep = random(batch, dtype=dtype) if has_keep and has_y else None
    weight, bias = random(channels, seed=2), random(channels, seed=3)
    run, twin = norm(joined, has_y)
    check_values(run, twin, x, cls, y, keep, weight, bias, factor=2)

    def fixed(function):  # keep has no gradient
        return lambda x, cls, y, weight, bias: function(
            x, cls, y, None if keep is None else keep.to(x.dtype), weight, bias
        )

    check_gradients(fixed(run), fixed(twin), x, cls, y, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4)
@given(batch=SIZES, height=st.integers(2, 9), channels=st.sampled_from([3, 16, 40, 64]))
def test_batch_statistics(dtype, batch, height, channels) -> None:
    x = 20 + random(batch, height, 5, channels, dtype=dtype)
    found, wanted = [
        (torch.full((channels,), 0.5, device=x.device), torch.full((channels,), 2.0, device=x.device), torch.tensor(3))
        for _ in range(2)
    ]
    mean, var = batch_norm_statistics(x, *found, 0.1)
    plain_batch_norm_act(x.float(), mean, var, *wanted[:2], True, 0.1, 1e-5, "none", batches=wanted[2])
    wide = x.double().flatten(0, 2)
    close(mean, wide.mean(0), 1e-6, "mean")
    close(var, wide.var(0, correction=0), 1e-5, "variance")
    close(found[0], wanted[0], 1e-6, "running mean")
    close(found[1], wanted[1], 1e-5, "running variance")
    assert found[2] == wanted[2] == 4


@pytest.mark.parametrize("act", ["none", "gelu", "relu"])
@pytest.mark.parametrize("training", [True, False])
@settings(max_examples=4)
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(2, 5),
    height=SIZES,
    channels=st.sampled_from([3, 16, 40, 64]),
    has_residual=st.booleans(),
    has_keep=st.booleans(),
)
def test_batch_norm(act, training, dtype, batch, height, channels, has_residual, has_keep) -> None:
    x = random(batch, height, 5, channels, dtype=dtype)
    residual = random(batch, height, 5, channels, dtype=dtype, seed=1) if has_residual else None
    keep = random(batch, seed=2) if has_keep else None
    weight, bias = random(channels, seed=3), random(channels, seed=4)
    mean, var = random(channels, seed=5), random(channels, seed=6).abs() + 0.5
    if training:
        var, mean = torch.var_mean(x.double().flatten(0, 2), dim=0, correction=0)
        mean, var = mean.float(), var.float()

    def kernel(x, residual, weight, bias):
        return batch_norm_act_forward(x, mean, var, weight, bias, residual, keep, 1e-5, act, training)

    def twin(x, residual, weight, bias):
        running = (None, None) if training else (mean.double(), var.double())
        factors = None if keep is None else keep.double()
        return plain_batch_norm_act(x, weight, bias, *running, training, 0.1, 1e-5, act, residual, factors)

    check_values(kernel, twin, x, residual, weight, bias)
    check_gradients(kernel, twin, x, residual, weight, bias)


def test_norms_are_operators() -> None:
    x, y, cls = random(2, 3, 2, 8), random(2, 7, 8), random(2, 1, 8)
    weight, bias, keep = random(8), random(8, seed=1), random(2)
    for tensor in (x, y, cls, weight, bias):
        tensor.requires_grad_()
    for joined in (True, False):
        args = (x, cls, y, keep, weight, bias, 1e-5, torch.bfloat16, joined)
        torch.library.opcheck(torch.ops.weft.residual_norm.default, args)
    torch.library.opcheck(
        torch.ops.weft.residual_norm.default, (x, None, None, None, weight, bias, 1e-5, torch.float32, True)
    )
    mean, var = random(8), random(8).abs() + 1
    torch.library.opcheck(
        torch.ops.weft.batch_norm_statistics.default, (x.detach(), mean, var, torch.tensor(1, device=x.device), 0.1)
    )
    for act in ("none", "gelu"):
        args = (x, mean, var, weight, bias, random(2, 3, 2, 8, seed=2).requires_grad_(), keep, 1e-5, act, True)
        torch.library.opcheck(torch.ops.weft.batch_norm_act.default, args)
