"""Demands on kernels beside equalling their references at any shape: extremes, layouts, types, shares, promises."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.kernel_checks import DEVICE, DTYPES, as_list, by, check_gradients, check_values, close, random
from weft.fast.forms.vitae import ConvPyramid
from weft.fast.tape.tape import run_as_one_node
from weft.kernels import switch
from weft.kernels.ops import op, pool
from weft.kernels.ops.activation import KINDS, activation_forward, reference_activation
from weft.kernels.ops.attention import attention_forward, suits_heads
from weft.kernels.ops.batch_norm import batch_norm_statistics
from weft.kernels.ops.conv_act import conv_act_forward
from weft.kernels.ops.depthwise import depthwise_forward
from weft.kernels.ops.grouped import grouped_conv_forward
from weft.kernels.ops.layer_norm import reference_residual_norm, residual_norm_forward
from weft.kernels.ops.performer import performer_forward, reference_performer
from weft.kernels.ops.pool import max_pool_backward, max_pool_forward, reference_max_pool
from weft.kernels.ops.residual import add_branch_forward
from weft.kernels.ops.stem import reference_pyramid, stem_forward
from weft.kernels.ops.token_attention import tokens_to_pixels_forward
from weft.kernels.ops.window_attention import fits, window_attention
from weft.kernels.triton import grouped as gpu_grouped
from weft.kernels.triton import token_attention
from weft.kernels.triton.batch_norm import _with_gaps
from weft.kernels.triton.linear import column_sums
from weft.kernels.tuning.launches import TABLE, forced, launch_parameters

pytestmark = pytest.mark.filterwarnings("error:The kernel")
NORM = dict(elements=128, width=32, per_processor=1, stages=1)
TILE = dict(rows=2, cols=2, block_c=4)


def check(operation: Any, tensors: list[Tensor | None], *rest: Any, factor: float = 2.0, backward: bool = True) -> None:
    kernel, reference = by(operation, *rest), lambda *t: operation.reference(*t, *rest)
    check_values(kernel, reference, *tensors, factor=factor)
    if backward:
        check_gradients(kernel, reference, *tensors, factor=2 * factor)


# Extremes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_activation_everywhere(kind: str) -> None:
    """The formulas of the kernels are as good as float32: training in it must not notice them."""
    x = torch.linspace(-12, 12, 4001, device=DEVICE).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, wanted = by(activation_forward, kind)(x), reference_activation(wide, kind)
    assert ((y - wanted).abs() / wanted.abs().clamp(1.0)).max() < 1e-6
    (slope,), (wanted_slope,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(wanted.sum(), wide)
    assert (slope - wanted_slope)[x != 0].abs().max() < 3e-6


@pytest.mark.parametrize("kind", KINDS)
def test_activation_at_the_ends(kind: str) -> None:
    x = torch.tensor([-60000.0, -200.0, -20.0, -0.0, 0.0, 20.0, 200.0, 60000.0], device=DEVICE)
    check(activation_forward, [x], kind, factor=1.0)
    assert activation_forward.run(torch.tensor([torch.nan, 1.0], device=DEVICE), kind)[0].isnan()


def test_large_scores() -> None:
    q, k, v = random(1, 5, 16) * 100, random(1, 7, 16, seed=1) * 100, random(1, 7, 16, seed=2)
    check(attention_forward, [q, k, v], 1, 1.0, factor=50, backward=False)


@pytest.mark.parametrize("scale", [4.0, 1e3])
def test_where_the_features_of_the_performer_overflow(scale: float) -> None:
    kqv, w = scale * random(1, 20, 48), torch.linalg.qr(random(16, 8))[0].t().contiguous() * 8**0.5
    with forced(dict(rows=16)):
        y = performer_forward.run(kqv, w)[0]
    assert (y - reference_performer(kqv, w)[0]).abs().max() < 1e-3 * scale


def test_of_equals_the_first_gets_the_gradient() -> None:
    x = random(1, 7, 7, 4).relu().round()
    check_gradients(lambda x: by(max_pool_forward, 2, True)(x)[0], lambda x: reference_max_pool(x, 2), x)


def test_max_pool_keeps_what_is_no_number() -> None:
    x = torch.full((1, 5, 5, 2), float("-inf"), device=DEVICE)
    x[0, 2, 2, 0] = float("nan")
    for places in (False, True):
        close(max_pool_forward.run(x, 2, places)[0].nan_to_num(), reference_max_pool(x, 2).nan_to_num(), 0.0, "maximum")


# Ways and shapes that the models have -------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_by_the_library(dtype: torch.dtype, act: str) -> None:
    tensors = [random(2, 3, 5, 7, dtype=dtype), random(9, 7, 1, 1, dtype=dtype), random(9), None]
    with forced(dict(how="linear")):
        check(conv_act_forward, tensors, 1, 0, 1, act, backward=False)


@pytest.mark.parametrize("how", ["linear", "library", "kernel"])
def test_groups_go_to_the_library(how: str) -> None:
    tensors = [random(2, 3, 5, 8, dtype=torch.bfloat16), random(4, 2, 3, 3, dtype=torch.bfloat16), random(4), None]
    with forced(dict(how=how)):
        check(conv_act_forward, tensors, 1, 1, 4, "relu", backward=False)


@pytest.mark.parametrize("kernel", [5, 7])
def test_large_kernels_as_launched(kernel: int) -> None:
    for stride in (1, 2):
        check(
            depthwise_forward, [random(1, 3, 3, 2), random(2, 1, kernel, kernel), None],
            None, None, stride, "none", "none",
        )  # fmt: skip


@pytest.mark.parametrize(("inner", "outer"), [(4, 12), (12, 4)])
def test_grouped_windows_of_several_chunks(inner: int, outer: int) -> None:
    x, weight = random(1, 3, 4, 6 * inner), random(6 * outer, inner, 3, 3) / inner
    with forced(dict(rows=32, chunk=16, block=32)):
        check(grouped_conv_forward, [x, weight, random(6 * outer)], 6, "none")


def test_stem_as_launched() -> None:
    """With the tiles of a GPU, without a bias, also from a picture that does not start at a multiple of 16 bytes."""
    for x in (random(1, 7, 16, 3), random(337)[1:].view(1, 7, 16, 3)):
        weight = random(5, 3, 7, 7).to(memory_format=torch.channels_last)
        check(stem_forward, [x, weight, None], 2, 3, 1, "gelu", backward=False)


@pytest.mark.parametrize("biased", [True, False])
def test_pyramid(biased: bool) -> None:
    x, numbers = random(1, 8, 12, 3), (4, [2, 5], [1, 2], "none")
    parameters = random(4, 3, 7, 7), random(3, 3, 7, 7), *((random(4), random(3)) if biased else ())

    def kernel(*parameters: Tensor) -> Tensor:
        return run_as_one_node(lambda t, *given: t(ConvPyramid, *numbers, x, *given), *parameters)

    def reference(a: Tensor, b: Tensor, *biases: Tensor) -> Tensor:
        return reference_pyramid(x.double(), [a, b], list(biases), *numbers)

    with forced(dict(BLOCK_M=16, BLOCK_N=16, num_stages=1)):
        with torch.no_grad():
            check_values(kernel, reference, *parameters, factor=2.0)
        if biased:  # as the models have it
            check_gradients(kernel, reference, *parameters)


@pytest.mark.parametrize("shifted", [False, True])
def test_windows_of_the_models(shifted: bool) -> None:
    maps = random(3, 2, 14, 7, 32, dtype=torch.bfloat16)
    with forced(dict(per_processor=1)):
        check(window_attention, [*maps, random(13**2, 1)], 7, shifted)


def test_what_fits() -> None:
    assert all(fits(dim, window) for dim, window in ((32, 7), (24, 8), (8, 1)))
    assert not any(fits(dim, window) for dim, window in ((32, 9), (96, 7), (3, 7)))
    assert suits_heads(64)
    assert not suits_heads(8)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (300, 70), (64, 64), (33, 5)])
def test_sums_over_rows(rows: int, columns: int) -> None:
    check_values(column_sums, lambda x: x.sum(0), random(rows, columns, dtype=torch.bfloat16))


# Layouts ------------------------------------------------------------------------------------------------------------


def test_maps_among_tokens_are_read_in_place() -> None:
    tokens = random(2, 7, 16)
    with forced(TILE | NORM):
        x, cls = tokens[:, 1:].view(2, 2, 3, 16), tokens[:, :1]
        check(depthwise_forward, [x, random(16, 1, 3, 3), None], None, None, 1, "none", "none", backward=False)
        rest = 1e-5, torch.float32, True
        weights = random(16), random(16, seed=1)
        check_values(by(residual_norm_forward, *rest), norm(*rest), x, cls, None, None, *weights)
        scattered = random(2, 2, 16, 3).transpose(2, 3)
        parts = [scattered, cls.expand(2, 1, 16), None, None, *weights]
        check_values(by(residual_norm_forward, *rest), norm(*rest), *parts)
    assert _with_gaps(x)[0] is x
    assert _with_gaps(x)[1] == 1  # row, that of the class token
    for other in (scattered, x.contiguous(), x.transpose(0, 1), x[..., :8], x[:1].expand(2, -1, -1, -1)):
        dense, gap = _with_gaps(other)
        assert dense.is_contiguous()
        assert gap == 0


def norm(eps: float, dtype: torch.dtype, joined: bool) -> Any:
    return lambda *t: reference_residual_norm(*t, eps, torch.float64, joined)


def test_windows_are_read_in_place() -> None:
    """As parts of one joint map, or behind a class token; and in layouts of their own."""
    joint = random(2, 1 + 4 * 3, 3 * 16)
    q, k, v = joint[:, 1:].view(2, 4, 3, 48).chunk(3, dim=-1)
    with forced(dict(per_processor=1)):
        for maps in ([q, k, v], [q, k.contiguous(), v.transpose(1, 2).contiguous().transpose(1, 2)]):
            check(window_attention, [*maps, random(25, 2)], 3, True)


# Types --------------------------------------------------------------------------------------------------------------


def test_parameters_keep_their_type() -> None:
    """Under autocast maps are in half precision and parameters in float32."""
    half = dict(dtype=torch.bfloat16)
    tries = [
        (by(depthwise_forward, None, None, 1, "none", "none"), random(1, 2, 2, 3, **half), random(3, 1, 3, 3)),
        (by(stem_forward, 2, 1, 1, "none"), random(1, 9, 9, 3, **half), random(3, 3, 3, 3)),
        (by(grouped_conv_forward, 1, "none"), random(1, 2, 2, 3, **half), random(3, 3, 3, 3)),
    ]
    for kernel, x, weight in tries:
        leaves = weight.requires_grad_(), random(3).requires_grad_()
        with forced(TILE | dict(BLOCK_M=16, BLOCK_N=16, num_stages=1, chunk=16, block=16) | dict(rows=16)):
            y = kernel(x, *leaves)
            y.float().sum().backward()
        assert y.dtype == torch.bfloat16
        assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


def test_a_norm_between_types() -> None:
    """Under autocast the sum stays in float32, what a product takes next is bfloat16, and so is its gradient."""
    x, y = random(2, 2, 3, 16).requires_grad_(), random(2, 6, 16, dtype=torch.bfloat16).requires_grad_()
    weight, bias = random(16).requires_grad_(), random(16).requires_grad_()
    rest = 1e-5, torch.bfloat16, True
    with forced(NORM):
        total, _, normed, _ = by(residual_norm_forward, *rest)(x, None, y, None, weight, bias)
        wanted = reference_residual_norm(x, None, y.float(), None, weight, bias, 1e-5, torch.float32, True)[2]
        assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
        close(normed, wanted, 2**-7, "normed")
        (grad_x, grad_y), (right_x, right_y) = (
            torch.autograd.grad(out.float().square().sum(), (x, y)) for out in (normed, wanted)
        )
    assert (grad_x.dtype, grad_y.dtype) == (torch.float32, torch.bfloat16)
    close(grad_x, right_x, 2**-6, "gradient of x")
    close(grad_y, right_y, 2**-6, "gradient of y")


def test_a_float32_stream_takes_half_precision_branches() -> None:
    x, cls, y, keep = random(2, 3, 2, 8), random(2, 1, 8), random(2, 7, 8, dtype=torch.bfloat16), random(2)
    found = add_branch_forward.run(x, cls, y, None, keep)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found, add_branch_forward.reference(x, cls, y.float(), None, keep))


# Gradients that are missing, and state ------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [[0], [1, 3], [2]])
def test_a_norm_of_which_only_some_results_are_used(chosen: list[int]) -> None:
    tensors = [random(2, 2, 2, 8), random(2, 1, 8), random(2, 5, 8), random(8), random(8)]
    inputs, wide = [t.clone().requires_grad_() for t in tensors], [t.double().requires_grad_() for t in tensors]
    with forced(NORM):
        for leaves, of in (
            (inputs, by(residual_norm_forward, 1e-5, torch.float32, False)),
            (wide, norm(1e-5, None, False)),
        ):
            outputs = of(*leaves[:3], None, *leaves[3:])
            sum(outputs[i].square().sum() for i in chosen).backward()
    for found, wanted in zip(inputs, wide, strict=True):
        right = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
        close(torch.zeros_like(found) if found.grad is None else found.grad, right, 1e-5, f"{chosen}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 16, 40])
def test_batch_statistics(dtype: torch.dtype, channels: int) -> None:
    """Running statistics move as torch's do, and autograd sees that."""
    x = 20 + random(2, 3, 5, channels, dtype=dtype)
    mine = random(channels).fill_(0.5), random(channels).fill_(2.0), torch.tensor(3, device=DEVICE)
    theirs = mine[0].double(), mine[1].double()
    versions = [tensor._version for tensor in mine]
    with forced(NORM):
        mean, var = batch_norm_statistics.run(x, *mine, 0.1).unbind(0)
    wide = x.double().flatten(0, 2)
    F.batch_norm(wide, *theirs, training=True)
    close(mean, wide.mean(0), 1e-6, "mean")
    close(var, wide.var(0, correction=0), 1e-5, "variance")
    close(mine[0], theirs[0], 1e-6, "running mean")
    close(mine[1], theirs[1], 1e-5, "running variance")
    assert mine[2] == 4
    assert all(tensor._version > version for tensor, version in zip(mine, versions, strict=True))


def test_plain_pooling_agrees_with_the_kernels() -> None:
    """The reference is what runs where Triton is missing."""
    x, grad = random(2, 5, 6, 3), random(2, 3, 3, 3, seed=1)
    y, place = pool._reference(x, 2, True)
    found, found_place = max_pool_forward.run(x, 2, True)
    assert place is not None
    assert torch.equal(y, found)
    assert torch.equal(place, found_place)
    close(pool._reference_backward(grad, place, 5, 6, 2), max_pool_backward.run(grad, place, 5, 6, 2), 1e-6, "gradient")


# Launches -----------------------------------------------------------------------------------------------------------


def test_pictures_and_heads_are_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a grid may have more than 65,535 programs."""
    grids = []
    monkeypatch.setattr(token_attention, "launch", lambda kernel, grid, *args, **options: grids.append(grid))
    q, x = random(2, 2, 3, 16), random(2, 5, 32)
    with forced(dict(BLOCK=16)):
        tokens_to_pixels_forward.run(x, q, None, q, x, None, 0.3)
    assert grids == [(4,)]


def test_nothing_is_kept_for_each_size_of_a_map() -> None:
    counts = []
    for side in (2, 3):
        grouped_conv_forward.run(random(1, side, side, 8), random(8, 4, 3, 3), None, 2, "none")
        counts.append((gpu_grouped._make_tiling.cache_info().currsize, gpu_grouped.pack_jobs.cache_info().currsize))
    assert counts[0] == counts[1]


def test_table_of_launches() -> None:
    usual = launch_parameters("depthwise", kernel=3, stride=2, active=False)
    assert usual == TABLE["depthwise"][0]
    assert launch_parameters("depthwise", kernel=7, stride=2, active=False)["cols"] < usual["cols"]
    with forced(dict(cols=1)):
        assert launch_parameters("depthwise", kernel=3, stride=2, active=False) == usual | dict(cols=1)
    assert launch_parameters("depthwise", kernel=3, stride=2, active=False) == usual


def test_every_line_of_the_table_can_be_reached() -> None:
    """No exception is hidden by one in front of it, and none has a parameter that the default lacks."""
    numbers = range(2048)
    for name, (default, *exceptions) in TABLE.items():
        for i, (sizes, changes) in enumerate(exceptions):
            assert changes.keys() <= default.keys(), name
            for before, _ in exceptions[:i]:
                wider = [all(n in before[key] for n in numbers if n in sizes[key]) for key in before if key in sizes]
                assert not (before.keys() <= sizes.keys() and all(wider)), (name, sizes)


# Operators ----------------------------------------------------------------------------------------------------------


def grad(*shape: int) -> Tensor:
    return random(*shape).requires_grad_()


def operators() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator that torch's compiler may see."""
    w = torch.linalg.qr(random(8, 4))[0].t().contiguous() * 2
    tokens, pixels = random(1, 5, 8), random(1, 3, 2, 8)
    return {
        "grouped_conv": (grad(1, 3, 3, 8), grad(8, 4, 3, 3), grad(8), 2, "silu"),
        "grouped_conv_backward": (*random(2, 1, 3, 3, 8), random(8, 4, 3, 3), random(8), 2, "silu"),
        "performer": (grad(1, 5, 24), w),
        "performer_backward": (tokens, tokens, random(1, 5, 24), w, random(1, 4, 40).abs()),
        "window_attention": (*(grad(1, 3, 2, 8),) * 3, grad(9, 1), 2, True),
        "window_attention_backward": (*(pixels,) * 4, random(9, 1), 2, True),
    }


@pytest.mark.parametrize("name", operators())
def test_operator(name: str) -> None:
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]  # opcheck's other takes long
    with forced(dict(rows=16, chunk=16, block=16, per_processor=1)):
        torch.library.opcheck(getattr(torch.ops.weft, name).default, operators()[name], test_utils=checks)


@pytest.mark.parametrize("name", operators())
def test_references_keep_what_operators_promise(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, shapes and types are those of the fakes where Triton is missing."""
    monkeypatch.setattr(op, "has_triton", lambda: False)
    operator, args = getattr(torch.ops.weft, name), operators()[name]
    with FakeTensorMode() as fake:
        promised = as_list(operator(*(fake.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args)))
    outputs = as_list(operator(*args))
    for found, wanted in zip(outputs, promised, strict=True):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), name
        assert found.is_contiguous(), name
    if outputs[0].requires_grad:
        outputs[0].sum().backward()


def test_no_other_operators_are_registered() -> None:
    found = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "weft::" in name}
    assert found - {"suppress"} == operators().keys()  # which stands in exported graphs: weft/export/suppress.py


def test_under_a_compiler_kernels_are_asked_for_and_in_an_exported_program_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler of torch 2.11 says that it is an export."""
    monkeypatch.setattr(switch, "has_triton", lambda: True)
    monkeypatch.setattr(switch, "_gpu_is_new_enough", lambda index: True)

    class Asks(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if switch._machine_can(0) else x - 1

    x = torch.zeros(2)
    assert torch.compile(Asks(), fullgraph=True, backend="eager")(x).tolist() == [1, 1]
    assert torch.export.export(Asks(), (x,)).module()(x).tolist() == [-1, -1]
