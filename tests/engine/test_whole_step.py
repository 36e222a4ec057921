"""Whole steps that are recorded and replayed give the bits of steps that are not.

Without a GPU a recording is a list of torch's operations, and a replay runs them again (tests/helpers/fake_graphs.py).
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import fake_graphs
from tests.helpers.small_runs import differences, make_pictures, tiny_run
from weft.engine import whole_step
from weft.engine.loop import Trainer
from weft.engine.state import load_tensors, read_header, snapshot
from weft.engine.whole_step import RecordedStep
from weft.fast.replay import WARM_UPS

RANDOM = dict(
    augment__mixup=0.8,
    augment__cutmix=1.0,
    augment__erase=0.5,
    augment__pad=2,
    augment__crop="random",
    model__drop_path=0.2,
    loss__smoothing=0.1,
    run__ema=0.9,
    optim__clip=1.0,
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


class Graph(fake_graphs.FakeGraph):
    """A recording that shares its memory with no other."""

    made = 0
    replays = 0

    def __init__(self):
        super().__init__()
        self.recording = SimpleNamespace(pool=SimpleNamespace(recordings=[]))
        Graph.made += 1

    def replay(self):
        Graph.replays += 1
        super().replay()


@pytest.fixture
def recorded(monkeypatch):
    """Lets a trainer on the CPU record its steps; what it computes while it records is undone, as on a GPU."""
    fake_graphs.install(monkeypatch)
    trainers = []
    original = Trainer.__init__

    def init(self, run):
        original(self, run)
        trainers.append(self)

    @contextmanager
    def capturing(graph, pool):
        trainer = trainers[-1]
        parts = trainer.model, trainer.run.ema, trainer.optimizer
        before, drawn = snapshot(*parts), torch.get_rng_state()
        pointers = [tensor.data_ptr() for state in trainer.optimizer.state.values() for tensor in state.values()]
        with fake_graphs.Log(graph):
            yield
        with torch.no_grad():
            put_back(before, trainer)
        torch.set_rng_state(drawn)
        after = [tensor.data_ptr() for state in trainer.optimizer.state.values() for tensor in state.values()]
        assert pointers == after

    @contextmanager
    def on_stream(device):
        yield

    Graph.made = Graph.replays = 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(Trainer, "can_replay", lambda self: True)
    monkeypatch.setattr(whole_step, "capturing", capturing)
    monkeypatch.setattr(whole_step, "GraphPool", object)
    monkeypatch.setattr(whole_step, "on_stream_for_recordings", on_stream)
    return trainers


def put_back(tensors, trainer) -> None:
    """Into the same memory: `load_tensors` gives the optimiser other tensors."""
    own = {f"model.{key}": value for key, value in trainer.model.state_dict().items()}
    if trainer.run.ema is not None:
        own |= {f"ema.{key}": value for key, value in trainer.run.ema.module.state_dict().items()}
    for name, parameter in trainer.model.named_parameters():
        own |= {f"optim.{name}:{key}": value for key, value in trainer.optimizer.state.get(parameter, {}).items()}
    for key, value in own.items():
        value.copy_(tensors[key])


@pytest.mark.parametrize("keep", ["device", "no"])
@pytest.mark.parametrize("settings", [RANDOM, dict(RANDOM, run__micro_batch=3), dict(optim__name="sgd")])
def test_recorded_steps_give_the_same_bits(pictures, tmp_path, keep, settings, request):
    plain = tiny_run(pictures, tmp_path / "plain", data__keep=keep, **settings).folder
    trainers = request.getfixturevalue("recorded")
    run = tiny_run(pictures, tmp_path / "run", data__keep=keep, **settings).folder
    steps = read_header(run)["progress"].step
    assert Graph.made == 1
    assert Graph.replays == steps - 1 - WARM_UPS > 0  # the first step makes the optimiser's state
    assert trainers[-1].recorded.holds_memory
    assert not differences(plain, run)


def test_state_that_has_moved_is_recorded_anew(pictures, tmp_path, recorded):
    trained = []
    original = Trainer.train_step

    def train_step(self, step, batch):
        if len(trained) == 2 * WARM_UPS:  # as after a step that failed: the optimiser has other tensors
            load_tensors(snapshot(self.model, self.run.ema, self.optimizer), self.model, self.run.ema, self.optimizer)
        trained.append(step)
        original(self, step, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", train_step)
        run = tiny_run(pictures, tmp_path / "run", epochs=4, data__keep="device").folder
    assert Graph.made == 2
    assert Graph.replays == read_header(run)["progress"].step - 1 - 2 * WARM_UPS


def test_what_cannot_be_recorded_is_computed_all_the_same(monkeypatch, recorded):
    @contextmanager
    def refusing(graph, pool):
        raise RuntimeError("operation not permitted when stream is capturing")
        yield

    monkeypatch.setattr(whole_step, "capturing", refusing)
    step = RecordedStep(lambda x: x + 1, lambda: ())
    with pytest.warns(UserWarning, match="launched one by one: operation not permitted"):
        found = [step([torch.tensor([float(i)])]).item() for i in range(WARM_UPS + 2)]
    assert found == [i + 1.0 for i in range(WARM_UPS + 2)]
    assert step.failed
    assert not step.holds_memory


def test_other_shapes_are_recorded_anew(recorded, monkeypatch):
    @contextmanager
    def capturing(graph, pool):
        with fake_graphs.Log(graph):
            yield

    monkeypatch.setattr(whole_step, "capturing", capturing)
    step = RecordedStep(lambda x: x * 2, lambda: ())
    for size in [2] * 5 + [3] + [2] * 5:
        x = torch.randn(size)
        assert torch.equal(step([x]), 2 * x)
    assert Graph.made == 2
