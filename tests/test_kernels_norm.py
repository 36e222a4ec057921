"""LayerNorm and BatchNorm kernels against their twins in float64, in Triton's interpreter or on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernel_checks import DEVICE, DTYPES, check_gradients, check_values, close, random
from tests.lost_kernels import QUICK_CHECKS, check_promise, lose
from weft.kernels import choose
from weft.kernels.batch_norm import batch_norm_act_forward, batch_norm_statistics, plain_batch_norm_act
from weft.kernels.layer_norm import plain_residual_norm, plain_residual_norm_apart, residual_norm_forward

SIZES = st.integers(1, 3)
# So small that every kernel has several programs, and every program several tiles
SMALL = dict(elements=128, width=32, per_processor=1, stages=1)


@pytest.fixture(autouse=True)
def _small_tiles():
    with choose.forced(SMALL):
        yield


def norm(joined: bool, has_y: bool):
    """The operator as models use it: the outputs that exist."""

    def run(x, cls, y, keep, weight, bias):
        found = residual_norm_forward(x, cls, y, keep, weight, bias, 1e-5, x.dtype, joined)
        return [out for out in found if out is not None]

    def twin(x, cls, y, keep, weight, bias):
        twin = plain_residual_norm if joined else plain_residual_norm_apart
        found = twin(x, cls, y, keep, weight, bias, 1e-5)
        return found if has_y else found[2:]

    return run, twin


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2)
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


def test_residual_norm_of_parts_of_tokens() -> None:
    tokens = random(3, 7, 16)
    x, cls = tokens[:, 1:].view(3, 2, 3, 16), tokens[:, :1]
    run, twin = norm(True, False)
    check_values(run, twin, x, cls, None, None, random(16), random(16))
    scattered = random(3, 2, 16, 3).transpose(2, 3)
    check_values(run, twin, scattered, cls.expand(3, 1, 16), None, None, random(16), random(16))


def test_residual_norm_of_mixed_types() -> None:
    """Under autocast the sum stays in float32, what a product takes next is bfloat16, and so is its gradient."""
    x = random(2, 2, 3, 16).requires_grad_()
    y = random(2, 6, 16, dtype=torch.bfloat16).requires_grad_()
    weight, bias = random(16).requires_grad_(), random(16).requires_grad_()
    total, _, normed, _ = residual_norm_forward(x, None, y, None, weight, bias, 1e-5, torch.bfloat16, True)
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    close(normed, plain_residual_norm(x, None, y, None, weight, bias, 1e-5)[2], 2**-7, "normed")
    (grad_x, grad_y), wanted = (
        torch.autograd.grad(out.float().square().sum(), (x, y))
        for out in (normed, plain_residual_norm(x, None, y, None, weight, bias, 1e-5)[2])
    )
    assert (grad_x.dtype, grad_y.dtype) == (torch.float32, torch.bfloat16)
    close(grad_x, wanted[0], 2**-6, "gradient of x")
    close(grad_y, wanted[1], 2**-6, "gradient of y")


def test_residual_norm_with_gradients_missing() -> None:
    x, cls, y = random(2, 2, 2, 8), random(2, 1, 8), random(2, 5, 8)
    weight, bias = random(8), random(8)
    for chosen in ([0], [1, 3], [2]):
        run, twin = norm(False, True)

        def some(function, chosen=chosen):
            return lambda x, cls, y, weight, bias: [function(x, cls, y, None, weight, bias)[i] for i in chosen]

        inputs = [t.clone().requires_grad_() for t in (x, cls, y, weight, bias)]
        wide = [t.double().requires_grad_() for t in (x, cls, y, weight, bias)]
        sum(out.square().sum() for out in some(run)(*inputs)).backward()
        sum(out.square().sum() for out in some(twin)(*wide)).backward()
        for found, wanted in zip(inputs, wide, strict=True):
            close(found.grad, torch.zeros_like(wanted) if wanted.grad is None else wanted.grad, 1e-5, f"{chosen}")


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=2)
@given(batch=SIZES, height=st.integers(2, 4), channels=st.sampled_from([3, 16, 40]))
def test_batch_statistics(dtype, batch, height, channels) -> None:
    x = 20 + random(batch, height, 5, channels, dtype=dtype)
    found, wanted = [
        (random(channels).fill_(0.5), random(channels).fill_(2.0), torch.tensor(3, device=DEVICE)) for _ in range(2)
    ]
    mean, var = batch_norm_statistics(x, *found, 0.1).unbind(0)
    plain_batch_norm_act(x.float(), mean, var, *wanted[:2], True, 0.1, 1e-5, "none", batches=wanted[2])
    wide = x.double().flatten(0, 2)
    close(mean, wide.mean(0), 1e-6, "mean")
    close(var, wide.var(0, correction=0), 1e-5, "variance")
    close(found[0], wanted[0], 1e-6, "running mean")
    close(found[1], wanted[1], 1e-5, "running variance")
    assert found[2] == wanted[2] == 4


@pytest.mark.parametrize("act", ["none", "gelu", "relu"])
@pytest.mark.parametrize("training", [True, False])
@settings(max_examples=2)
@given(
    dtype=st.sampled_from(DTYPES),
    batch=st.integers(2, 3),
    height=SIZES,
    channels=st.sampled_from([3, 16, 40]),
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
        mean, var = torch.stack([mean, var]).float(), None

    def kernel(x, residual, weight, bias):
        return batch_norm_act_forward(x, mean, var, weight, bias, residual, keep, 1e-5, act)

    def twin(x, residual, weight, bias):
        running = (None, None) if var is None else (mean.double(), var.double())
        factors = None if keep is None else keep.double()
        return plain_batch_norm_act(x, weight, bias, *running, training, 0.1, 1e-5, act, residual, factors)

    check_values(kernel, twin, x, residual, weight, bias)
    check_gradients(kernel, twin, x, residual, weight, bias)


@pytest.mark.parametrize("lost", [False, True])
def test_autograd_sees_that_running_statistics_change(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, running = random(2, 3, 2, 8), (random(8), random(8).abs(), torch.tensor(0, device=DEVICE))
    with choose.forced({}):
        lose(monkeypatch, *(["batch_norm_statistics"] if lost else []), **SMALL)
        for statistics in (batch_norm_statistics, torch.ops.weft.batch_norm_statistics):
            before = [tensor._version for tensor in running]
            statistics(x, *running, 0.1)
            assert all(tensor._version > version for tensor, version in zip(running, before, strict=True))


@pytest.mark.parametrize("lost", ["", "_backward"])
def test_twin_beside_kernel(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward by the one, backward by the other; and the twins give what is promised."""
    x, residual = (random(2, 2, 3, 8, dtype=torch.bfloat16, seed=i) for i in range(2))
    weight, bias = random(8, seed=3), random(8, seed=4)
    with choose.forced({}):
        lose(monkeypatch, "batch_norm_statistics", f"batch_norm{lost}", **SMALL)

        def kernel(x, residual, weight, bias):
            moments = batch_norm_statistics(x.detach(), None, None, None, 0.1)
            return batch_norm_act_forward(x, moments, None, weight, bias, residual, None, 1e-5, "gelu")

        def twin(x, residual, weight, bias):
            return plain_batch_norm_act(x, weight, bias, None, None, True, 0.1, 1e-5, "gelu", residual)

        check_gradients(kernel, twin, x, residual, weight, bias)
        check_promise("batch_norm_statistics", x, None, None, None, 0.1)
        args = (x, random(8), random(8).abs(), weight, bias, residual, None, 1e-5, "gelu")
        check_promise(f"batch_norm_act{lost}", *([x, *args, True] if lost else args))


def test_norms_are_operators() -> None:
    x, y, cls = random(2, 3, 2, 8), random(2, 7, 8), random(2, 1, 8)
    weight, bias, keep = random(8), random(8, seed=1), random(2)
    for tensor in (x, y, cls, weight, bias):
        tensor.requires_grad_()
    for joined in (True, False):
        args = (x, cls, y, keep, weight, bias, 1e-5, torch.bfloat16, joined)
        torch.library.opcheck(torch.ops.weft.residual_norm.default, args, test_utils=QUICK_CHECKS)
    torch.library.opcheck(
        torch.ops.weft.residual_norm.default,
        (x, None, None, None, weight, bias, 1e-5, torch.float32, True),
        test_utils=QUICK_CHECKS,
    )
    mean, var = random(8), random(8).abs() + 1
    torch.library.opcheck(
        torch.ops.weft.batch_norm_statistics.default,
        (x.detach(), mean, var, torch.tensor(1, device=x.device), 0.1),
        test_utils=QUICK_CHECKS,
    )
    for act in ("none", "gelu"):
        args = (x, mean, var, weight, bias, random(2, 3, 2, 8, seed=2).requires_grad_(), keep, 1e-5, act)
        torch.library.opcheck(torch.ops.weft.batch_norm_act.default, args, test_utils=QUICK_CHECKS)
