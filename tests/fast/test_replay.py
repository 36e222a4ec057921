"""`weft.replay`: the same outputs, weights and gradients, from a recording where there is a GPU."""

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.helpers.fake_graphs import State, install
from weft.fast import replay
from weft.fast.recording.graphs import capture_key, without_autocast_cache, writable_copy
from weft.fast.replay import WARM_UPS, state_key
from weft.kernels.switch import switched

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_without_a_gpu_it_is_the_model():
    model = weft.create_model("ceit_nano").eval()
    fast = weft.replay(model)
    picture = torch.randn(2, 3, 32, 32)
    assert not fast.training
    with torch.no_grad():
        assert torch.equal(fast(picture), model(picture))
    assert fast(picture).requires_grad  # with gradients as ever
    assert fast.num_classes == model.num_classes
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018


def test_a_copy_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        x = torch.ones(2)
        given = writable_copy(x)
    with torch.no_grad():
        given.copy_(torch.zeros(2))
    with torch.inference_mode():
        given.copy_(x)
    assert given.tolist() == [1, 1]


def test_circumstances_that_need_a_recording_of_their_own():
    x, found = torch.ones(2, 3), []
    found.append(capture_key(x))
    found.append(capture_key(x.double()))
    found.append(capture_key(torch.ones(3, 2)))
    with torch.inference_mode():
        found.append(capture_key(x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(capture_key(x))
    assert len(set(found)) == 6
    assert capture_key(torch.zeros(3, 2).T) == found[0]
    picture = torch.ones(2, 3, 4, 5)
    assert capture_key(picture) != capture_key(picture.to(memory_format=torch.channels_last))


def test_states_that_need_a_recording_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    found = [state_key(model)]
    model[1].eval()
    found.append(state_key(model))
    model[0].weight.requires_grad_(False)
    found.append(state_key(model))
    model[0].weight.data = model[0].weight.data.clone()
    found.append(state_key(model))
    model[1].running_mean = torch.ones(2)
    found.append(state_key(model))
    model[1].momentum = 0.5
    found.append(state_key(model))
    with torch.no_grad():
        model[0].weight.zero_()  # in place
        model[1].running_mean.zero_()
    assert state_key(model) == found[-1]
    assert len(set(found)) == 6


def test_mistakes():
    with pytest.raises(weft.WeftError, match="takes a model, not str"):
        weft.replay("cvt_13")  # pyright: ignore[reportArgumentType]
    with pytest.raises(weft.WeftError, match="already"):
        weft.replay(weft.replay(nn.Identity()))
    with pytest.raises(weft.WeftError, match="most=0"):
        weft.replay(torch.nn.Identity(), most=0)
    wrapped = object.__new__(torch.nn.parallel.DistributedDataParallel)
    with pytest.raises(weft.WeftError, match="goes inside"):
        weft.replay(wrapped)


# Recordings without a GPU ----------------------------------------------------------------------------------------


@pytest.fixture
def generator(monkeypatch) -> State:
    """Lets the tensors of a CPU pass for those of a GPU."""
    monkeypatch.setattr(replay, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(replay, "free_cache", lambda: None)
    monkeypatch.setattr(replay, "warm_up", lambda model, x: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return install(monkeypatch)


@pytest.fixture
def fast(generator) -> replay.Replayed:
    torch.manual_seed(0)
    return weft.replay(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), most=2)


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]


def warm_up(fast: replay.Replayed, *batches: int) -> None:
    for batch in batches:
        for _ in range(WARM_UPS):
            assert "Replay" not in type(fast(torch.randn(batch, 3)).grad_fn).__name__
    fast.zero_grad()


def test_training_is_replayed_after_three_passes(fast):
    warm_up(fast, 5)
    for _ in range(3):
        x = torch.randn(5, 3)
        y, wanted = fast(x), fast.model(x)
        assert type(y.grad_fn).__name__ == "ReplayFunctionBackward"
        assert torch.equal(y, wanted)
        y.square().sum().backward()
        found = gradients(fast)
        fast.zero_grad()
        wanted.square().sum().backward()
        for a, b in zip(found, gradients(fast), strict=True):
            torch.testing.assert_close(a, b)
        fast.zero_grad()


def test_gradients_add_up_over_passes_and_shapes(fast):
    warm_up(fast, 5, 4)
    batches = [torch.randn(size, 3) for size in (5, 4, 5, 5, 4)]
    for x in batches:
        fast(x).square().sum().backward()
    found = gradients(fast)
    fast.zero_grad()
    torch.stack([fast.model(x).square().sum() for x in batches]).sum().backward()
    for a, b in zip(found, gradients(fast), strict=True):
        torch.testing.assert_close(a, b)


def test_a_pass_that_waits_for_its_backward_is_not_overwritten(fast):
    warm_up(fast, 5)
    a, b = torch.randn(5, 3), torch.randn(5, 3)
    first, second = fast(a), fast(b)
    assert "Replay" not in type(second.grad_fn).__name__
    (first.square().sum() + second.square().sum()).backward()
    found = gradients(fast)
    fast.zero_grad()
    fast.model(torch.cat([a, b])).square().sum().backward()
    for one, other in zip(found, gradients(fast), strict=True):
        torch.testing.assert_close(one, other)
    third = fast(a)
    assert "Replay" in type(third.grad_fn).__name__
    del first, second, third
    gc.collect()
    assert "Replay" in type(fast(b).grad_fn).__name__  # its backward pass can no longer come


def test_a_second_backward_pass_is_refused(fast):
    warm_up(fast, 5)
    y = fast(torch.randn(5, 3)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        y.backward()


def test_only_the_last_shapes_are_kept(fast):
    warm_up(fast, 1, 2, 3)
    for batch in (1, 2, 3, 2):
        fast(torch.randn(batch, 3)).sum().backward()
    assert [key[0][0] for key in fast._training] == [3, 2]
    assert "Replay" not in type(fast(torch.randn(1, 3)).grad_fn).__name__  # starts anew, so that shapes do not thrash
    assert fast.holds_memory
    fast.forget()
    assert not fast.holds_memory


def test_there_are_no_second_derivatives(fast):
    warm_up(fast, 5)
    weight = fast.model[0].weight
    (grad,) = torch.autograd.grad(fast(torch.randn(5, 3)).square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_frozen_models_are_answered(fast):
    fast.requires_grad_(False)
    fast.eval()
    x = torch.randn(5, 3)
    assert torch.equal(fast(x), fast.model(x))
    assert len(fast._inference) == 1


def test_recorded_answers_are_those_of_their_weights_and_modes(fast):
    fast.eval()
    x = torch.randn(5, 3)
    with torch.no_grad():
        first = fast(x)
        fast.model[0].weight.data = fast.model[0].weight + 1
        second = fast(x)
        assert not torch.equal(first, second)
        assert torch.equal(second, fast.model(x))
        with switched(False):
            fast(x)
    assert len(fast._inference) == 2
    assert len({key[6] for key in fast._inference}) == 2  # kernels on and off


@pytest.mark.parametrize(
    "error", [RuntimeError("not permitted when capturing"), RuntimeError(), TypeError("no tensor")]
)
@pytest.mark.parametrize("trains", [True, False])
def test_what_cannot_be_recorded_is_launched(fast, generator, monkeypatch, error, trains):
    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(replay, "Recording", fails)
    fast.train(trains)
    x = torch.randn(5, 3)
    with torch.set_grad_enabled(trains), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(WARM_UPS + 3):
            assert torch.equal(fast(x), fast.model(x))
    assert len(told) == 1  # tried once
    assert "launched one by one" in str(told[0].message)
    assert generator.restored


def test_what_cannot_be_recorded_leaves_the_others_alone(fast, monkeypatch):
    """Whenever it comes again."""
    warm_up(fast, 5, 4)

    def fails(*args: Any) -> Any:
        raise RuntimeError("not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(replay, "Recording", fails)
        with pytest.warns(UserWarning, match="not permitted"):
            fast(torch.randn(4, 3)).sum().backward()
    warm_up(fast, 5)
    fast(torch.randn(5, 3)).sum().backward()
    for _ in range(WARM_UPS + 2):
        fast(torch.randn(4, 3)).sum().backward()
    assert fast.holds_memory


def test_a_failure_forgets_what_drew_from_the_former_generator(fast, monkeypatch):
    warm_up(fast, 5, 4)
    fast(torch.randn(5, 3)).sum().backward()

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(replay, "Recording", fails)
    with pytest.warns(UserWarning, match="no memory"):
        fast(torch.randn(4, 3)).sum().backward()
    assert not fast.holds_memory
    assert [key[0][0] for key in fast._training] == [4]


def test_weights_are_cast_anew_in_a_recording():
    """Casts that autocast keeps from before are freed at its end."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)
        with without_autocast_cache(x):
            before = model(x)
            model.weight.add_(1)
            assert not torch.equal(model(x), before)
    assert before.dtype == torch.bfloat16


# On a GPU -------------------------------------------------------------------------------------------------------


@needs_gpu
def test_replays_equal_the_model_for_every_shape():
    model = weft.fuse(weft.create_model("cvt_nano")).cuda()
    fast = weft.replay(model, most=2)
    with torch.inference_mode():
        for batch, side in [(2, 32), (3, 48), (2, 32), (1, 64), (2, 32)]:
            pictures = torch.randn(batch, 3, side, side, device="cuda")
            found = fast(pictures)
            torch.testing.assert_close(found, model(pictures))
            assert len(fast._inference) <= 2
            assert found.data_ptr() != fast(torch.zeros_like(pictures)).data_ptr()


@needs_gpu
@pytest.mark.parametrize("name", ["ceit_nano", "cvt_nano", "cetnet_nano", "vt_resnet_nano"])
def test_replayed_training_arrives_at_the_same_weights(name):
    """With stochastic depth, losses that are kept alive, and gradients added up over batches of two sizes."""
    torch.manual_seed(0)
    model = weft.create_model(name, drop_path_rate=0.2).cuda().train()
    other = copy.deepcopy(model)
    fast = weft.replay(other)
    for run, net in ((model, model), (fast, other)):
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        for step in range(8):
            for part, batch in enumerate((4, 4, 3)):
                torch.manual_seed(10 * step + part)
                x = torch.randn(batch, 3, 64, 64, device="cuda")
                with torch.autocast("cuda", torch.bfloat16):
                    loss = F.cross_entropy(run(x).float(), torch.arange(batch, device="cuda"))
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(found is not None for found in fast._training.values())
    assert len(fast._training) == 2
    # Kernels that add up in any order give other last digits each time.
    for (key, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-4, msg=key)


@needs_gpu
def test_replayed_answers_under_autocast_follow_the_weights():
    model = nn.Linear(64, 64).cuda()
    fast, x = weft.replay(model.eval()), torch.randn(8, 64, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                assert torch.equal(fast(x), model(x))
            model.weight.add_(1)
            torch.empty(2**20, device="cuda").fill_(7)  # where casts lay that were freed


@needs_gpu
def test_a_model_that_asks_the_gpu_is_not_replayed():
    class Asks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            y = F.dropout(super().forward(input), 0.5)
            return y if y.sum().item() < 1e9 else -y

    fast = weft.replay(Asks(4, 4).cuda())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(WARM_UPS + 2):
            fast(torch.randn(2, 4, device="cuda")).sum().backward()
    assert [str(w.message) for w in told if "launched one by one" in str(w.message)]
    assert list(fast._training.values()) == [None]
    assert torch.rand(2, device="cuda").isfinite().all()  # random numbers can still be drawn
