"""Blocks of fused models whose launches are recorded: the same numbers, whoever calls what in which order."""

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import weft
from tests.conftest import randomise
from tests.helpers.fake_graphs import State, install
from tests.helpers.variants import NANO
from weft.fast import precompile, swap
from weft.fast.recording import graphs, record
from weft.fast.recording.record import CALLS_IN_A_ROW, MOST_RECORDINGS, BlockRecordings
from weft.fast.swap import Fused
from weft.kernels import switch
from weft.kernels.ops import op


@pytest.fixture(autouse=True)
def generator(monkeypatch) -> State:
    """The paths of a GPU on the CPU, with references in place of kernels and lists of operations in place of graphs."""
    monkeypatch.setattr(switch, "_usable", lambda x: switch._on)
    monkeypatch.setattr(op, "interpreted", lambda: False)
    monkeypatch.setattr(op.Operation, "dispatch", op.Operation.run)  # the log of operations is no compiler
    here = lambda x: record.process_may_record() and torch._C._current_graph_task_id() == -1 and not is_watched()  # noqa: E731
    monkeypatch.setattr(swap, "may_record", here)
    monkeypatch.setattr(record, "has_spare_memory", lambda device: True)
    monkeypatch.setattr(record, "device_and_stream", lambda: (0, 0))
    return install(monkeypatch)


def is_watched() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # pyright: ignore


SHALLOW: dict[str, dict[str, Any]] = dict(
    ceit_nano=dict(depth=3), cvt_nano=dict(depths=(1, 2, 2)), cetnet_nano=dict(depths=(1, 1, 2, 1))
)


def make(name: str, drop_path_rate: float = 0.0) -> tuple[Any, Any]:
    """A model whose blocks are recorded, and the plain model that it is a copy of."""
    args = dict(SHALLOW.get(name, {}), num_classes=5, drop_path_rate=drop_path_rate)
    model: Any = randomise(timm.create_model(name, **args)).double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return weft.fast(copy.deepcopy(model)), model


def pictures(count: int = 2, size: int = 32) -> Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64)


def warm_up(model: nn.Module, times: int = CALLS_IN_A_ROW, x: Tensor | None = None) -> None:
    state = copy.deepcopy(model.state_dict())
    for _ in range(times):
        model(pictures() if x is None else x).sum().backward()
    model.load_state_dict(state)
    model.zero_grad()


def recordings(model: nn.Module) -> list[Any]:
    notes = [module.__dict__["_recordings"] for module in model.modules() if isinstance(module, Fused)]
    return [recording for note in notes for recording in note.made.values()]


def results(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """The gradients and buffers that `run` leaves."""
    model.zero_grad()
    run(model)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return grads | {name: buffer.clone() for name, buffer in model.named_buffers()}


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if "vitae" in n else ()) for n in NANO])
def test_replayed_blocks_equal_plain_ones(name):
    fast, plain = make(name)
    before = list(fast.parameters())
    warm_up(fast, CALLS_IN_A_ROW - 1)
    assert not recordings(fast)
    warm_up(fast, CALLS_IN_A_ROW)
    assert len(recordings(fast)) >= 3
    assert all(now is then for now, then in zip(fast.parameters(), before, strict=True))  # those of an optimizer
    for _ in range(2):
        x, y = pictures(), torch.randn(2, 5, dtype=torch.float64)
        run = lambda model, x=x, y=y: (model(x) * y).sum().backward()  # noqa: E731
        check(results(fast, run), results(plain, run))


def twice_before_going_back(model: nn.Module, a: Tensor, b: Tensor) -> None:
    (model(a).sum() + model(b).square().sum()).backward()


def twice_back(model: nn.Module, a: Tensor, b: Tensor) -> None:
    loss = model(a).square().sum()
    loss.backward(retain_graph=True)
    model(b).sum().backward()  # while the first may still be gone back
    loss.backward()


def added_up(model: nn.Module, a: Tensor, b: Tensor) -> None:
    for x in (a, b, a):
        model(x).square().sum().backward()


def from_the_middle_first(model: Any, a: Tensor, b: Tensor, middle: str = "stages.1.blocks.0") -> None:
    """An earlier block goes back before a later one."""
    seen: list[Any] = []
    handle = model.get_submodule(middle).register_forward_hook(lambda module, given, found: seen.append(found))
    loss = model(a).square().sum()
    handle.remove()
    found = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    found.square().sum().backward(retain_graph=True)
    loss.backward()


def never_back(model: nn.Module, a: Tensor, b: Tensor) -> None:
    model(a)
    gc.collect()
    model(b).square().sum().backward()


def checkpointed(model: nn.Module, a: Tensor, b: Tensor) -> None:
    checkpoint(model, a, use_reentrant=False).square().sum().backward()


def asked_between(model: Any, a: Tensor, b: Tensor) -> None:
    found = model(a)
    model.eval()
    with torch.no_grad():
        model(b)
    model.train()
    found.square().sum().backward()


ORDERS = [
    twice_before_going_back,
    twice_back,
    added_up,
    from_the_middle_first,
    never_back,
    checkpointed,
    asked_between,
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_any_order(order):
    """Recordings share memory, which a replay spoils for those that come later."""
    fast, plain = make("cvt_nano")
    fast.eval()
    with torch.no_grad():
        for _ in range(CALLS_IN_A_ROW):
            fast(pictures())
    warm_up(fast.train())
    asked = len(recordings(fast))
    a, b = pictures(), pictures()
    check(results(fast, lambda model: order(model, a, b)), results(plain, lambda model: order(model, a, b)))
    assert asked == len(recordings(fast))
    assert None not in recordings(fast)


MIDDLES = dict(
    ceit_nano="blocks.0", cetnet_nano="stages.0.blocks.0", vitae_nano="blocks.0", vt_resnet_nano="resnet.layer1.0"
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "ceit" in n else pytest.mark.slow) for n in MIDDLES])
def test_saved_tensors_survive_replays_of_earlier_blocks(name):
    """Whatever layouts they have: they are copied away and back while an earlier block goes back."""
    fast, plain = make(name)
    warm_up(fast)
    a, seen = pictures(), []
    save = graphs.PendingReplay.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.PendingReplay, "save", lambda self: (seen.append(self), save(self)))
        found = results(fast, lambda model: from_the_middle_first(model, a, a, MIDDLES[name]))
    check(found, results(plain, lambda model: from_the_middle_first(model, a, a, MIDDLES[name])))
    assert seen


def test_weights_must_not_change_between_forward_and_backward():
    """As torch has it: gradients of weights that are no longer those of the forward pass would be wrong."""
    fast, _ = make("ceit_nano")
    warm_up(fast)
    loss = fast(pictures()).square().sum()
    with torch.no_grad():
        fast.blocks[0].leff.linear1.linear.weight.mul_(0.9)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_settings_of_modules_may_change():
    """What Python passes to a kernel is in the recording: another rate, momentum or epsilon needs another one."""
    fast, plain = make("cvt_nano", drop_path_rate=0.3)
    warm_up(fast)

    def run(model: nn.Module) -> None:
        torch.manual_seed(3)
        model(x).square().sum().backward()

    x = pictures()
    check(results(fast, run), results(plain, run))
    for model in (fast, plain):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.5
            if isinstance(module, nn.LayerNorm):
                module.eps = 0.1
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.6
    for _ in range(CALLS_IN_A_ROW + 1):
        check(results(fast, run), results(plain, run))
    assert len(fast.stages[0].blocks[0].__dict__["_recordings"].made) == 2


def test_precision_of_products_is_in_the_key():
    torch.set_float32_matmul_precision("highest")
    before = record.state_key([], [])
    torch.set_float32_matmul_precision("high")
    try:
        assert record.state_key([], []) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert record.state_key([], []) == before


def test_shared_weights_get_the_gradients_of_both_places():
    fast, plain = make("cvt_nano")
    for model in (fast, plain):
        block = model.stages[1].blocks[0]
        block.norm2.weight = block.norm1.weight
    warm_up(fast)
    x = pictures()
    run = lambda model: model(x).square().sum().backward()  # noqa: E731
    assert None not in recordings(fast)
    check(results(fast, run), results(plain, run))


def replicate(module: nn.Module) -> nn.Module:
    """As DataParallel does: copies whose parameters are plain tensors that lead back to those of the module."""
    copies = {old: old._replicate_for_data_parallel() for old in module.modules()}
    for old, new in copies.items():
        for name, child in old.named_children():
            new._modules[name] = copies[child]
        for name, parameter in old._parameters.items():
            setattr(new, name, None if parameter is None else parameter * 1.0)
        for name, buffer in old._buffers.items():
            new._buffers[name] = buffer
    return copies[module]


def test_replicas_of_data_parallel_are_not_recorded():
    """They share everything with the model but the weights, which are made anew for each pass."""
    fast, plain = make("cvt_nano")
    warm_up(fast)
    count, x = len(recordings(fast)), pictures()
    for _ in range(CALLS_IN_A_ROW + 1):
        found = results(fast, lambda model: replicate(model)(x).square().sum().backward())
        check(found, results(plain, lambda model: model(x).square().sum().backward()))
    assert len(recordings(fast)) == count


def test_converted_blocks_free_their_recordings():
    fast, _ = make("cvt_nano")
    warm_up(fast)
    count = len(recordings(fast))
    fast.double()  # as they are
    assert len(recordings(fast)) == count > 0
    fast.float()
    assert not recordings(fast)


def test_memory_is_asked_for_once(monkeypatch):
    """That takes longer than a block."""
    asked = []
    monkeypatch.setattr(record, "has_spare_memory", lambda device: bool(asked.append(device)))
    fast, _ = make("ceit_nano")
    warm_up(fast, 2 * CALLS_IN_A_ROW)
    assert not recordings(fast)
    assert len(asked) == sum(
        "_recordings" in m.__dict__ and m.__dict__["_recordings"].times > 0 for m in fast.modules()
    )


def test_weights_may_change_and_move():
    fast, plain = make("ceit_nano")
    warm_up(fast)
    x = pictures()
    run = lambda model: model(x).square().sum().backward()  # noqa: E731
    with torch.no_grad():
        for model in (fast, plain):
            for p in model.parameters():
                p.mul_(0.9)
    check(results(fast, run), results(plain, run))
    for p in fast.parameters():
        p.data = p.data.clone()
    check(results(fast, run), results(plain, run))  # launched, since the recording would read the old ones
    for p in fast.parameters():
        p.requires_grad_(p.dim() > 1)
    for p in plain.parameters():
        p.requires_grad_(p.dim() > 1)
    for _ in range(CALLS_IN_A_ROW):
        check(results(fast, run), results(plain, run))
    assert all(len(block.__dict__["_recordings"].made) == MOST_RECORDINGS for block in fast.blocks)


def test_answers_are_recorded():
    fast, plain = make("cvt_nano")
    fast.eval(), plain.eval()
    with torch.inference_mode():
        for _ in range(CALLS_IN_A_ROW + 1):
            x = pictures()
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-8, atol=1e-8)
    assert recordings(fast)
    assert all(recording.backward is None for recording in recordings(fast))


def test_shapes_that_come_and_go_are_not_recorded():
    fast, plain = make("cvt_nano")
    for size in (32, 48) * CALLS_IN_A_ROW:
        x = pictures(size=size)
        run = lambda model, x=x: model(x).square().sum().backward()  # noqa: E731
        check(results(fast, run), results(plain, run))
    assert not recordings(fast)
    for size in (32, 48, 64):
        warm_up(fast, x=pictures(size=size))
    block = fast.stages[0].blocks[0]
    assert len(block.__dict__["_recordings"].made) == MOST_RECORDINGS


def test_small_blocks_of_passing_shapes_are_plain(monkeypatch):
    """The first shape is taken for the one that stays; another has to come twice."""
    fast, _ = make("ceit_nano")
    block, seen = fast.blocks[0], []
    monkeypatch.setattr(type(block), "compute", lambda self, *inputs: seen.append("fused"))
    monkeypatch.setattr(type(block).__mro__[2], "forward", lambda self, *inputs: seen.append("plain"))
    width = block.norm1.weight.numel()
    for batch in (2, 2, 3, 4, 4, 2):
        block(torch.randn(batch, 4, 4, width), torch.randn(batch, 1, width))
    assert seen == ["fused", "fused", "plain", "plain", "fused", "fused"]


def test_what_cannot_be_recorded_is_launched(monkeypatch, generator):
    fast, plain = make("cvt_nano")
    warm_up(fast)
    good = recordings(fast)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not permitted")

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(record, "Recording", fails)
        warm_up(fast, x=pictures(3))
    assert "not permitted" in str(told[0].message)
    assert generator.restored
    assert recordings(fast).count(None) == len(good)
    x = pictures(3)
    run = lambda model: model(x).square().sum().backward()  # noqa: E731
    check(results(fast, run), results(plain, run))
    warm_up(fast)  # the others were made for random numbers that are no longer drawn
    assert not any(old is new for old in good for new in recordings(fast))


def test_hooks(monkeypatch):
    """Those of a block run at every call; one inside it makes it plain."""
    fast, plain = make("cvt_nano")
    seen: list[str] = []
    block = fast.stages[0].blocks[0]
    block.register_forward_hook(lambda *_: seen.append("block"))
    warm_up(fast, CALLS_IN_A_ROW + 1)
    assert seen == ["block"] * (CALLS_IN_A_ROW + 1)
    block.norm1.register_forward_hook(lambda *_: seen.append("inside"))
    x = pictures()
    run = lambda model: model(x).square().sum().backward()  # noqa: E731
    check(results(fast, run), results(plain, run))
    assert "inside" in seen


def test_copies_begin_anew():
    fast, _ = make("cvt_nano")
    warm_up(fast)
    assert recordings(fast)
    assert not recordings(copy.deepcopy(fast))
    assert isinstance(pickle.loads(pickle.dumps(fast.stages[0].blocks[0].__dict__["_recordings"])), BlockRecordings)
    weft.plain(fast)
    assert not any("_recordings" in module.__dict__ for module in fast.modules())


def test_record_can_be_declined():
    fast, _ = make("cvt_nano")
    weft.fast(fast, record=False)
    warm_up(fast)
    assert all(module.__dict__["_recordings"] is None for module in fast.modules() if isinstance(module, Fused))


@pytest.mark.parametrize("name", [pytest.param("cvt_nano", marks=pytest.mark.slow), "ceit_nano"])
def test_torch_compile_leaves_training_to_recordings(monkeypatch, name):
    """But for fullgraph=True, and inference."""
    fast, plain = make(name)
    monkeypatch.setattr(precompile, "usable", lambda x: True)
    seen: list[bool] = []
    note = lambda self, *_: seen.append(torch.compiler.is_compiling())  # noqa: E731
    monkeypatch.setattr(precompile.PrecompiledModel, "precompile", note)
    compiled = torch.compile(fast, backend="eager")
    warm_up(compiled)
    x = pictures()
    run = lambda model: model(x).square().sum().backward()  # noqa: E731
    check(results(fast, lambda model: run(compiled)), results(plain, run))
    assert len(seen) == CALLS_IN_A_ROW + 1
    assert recordings(fast)
    torch._dynamo.reset()
    torch.compile(fast, backend="eager", fullgraph=True)(x)
    with torch.no_grad():
        torch.compile(fast.eval(), backend="eager")(x)
    assert len(seen) == CALLS_IN_A_ROW + 1
    torch._dynamo.reset()


def test_where_nothing_is_recorded(monkeypatch):
    assert record.process_may_record()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not record.process_may_record()
    monkeypatch.undo()
    torch.use_deterministic_algorithms(True)
    try:
        assert not record.process_may_record()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not record.may_record(torch.ones(2))  # on a CPU


def test_later_recordings_are_those_in_danger():
    class Recording:
        def __init__(self, number: int):
            self.number = number

    pool = object.__new__(graphs.GraphPool)
    pool.pending = {}
    replays = [graphs.PendingReplay(Recording(number)) for number in range(3)]  # pyright: ignore[reportArgumentType]
    for replay in replays:
        pool.add_pending(replay)
    assert pool.pending_after(0) == replays[1:]
    assert pool.pending_after(2) == []
    del replays[2], replay
    gc.collect()
    assert list(pool.pending) == [0, 1]  # it can no longer go back
