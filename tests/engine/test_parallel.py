"""A model whose gradients several processes add up: what torch is asked to do, seen in a group of one process."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers import fake_graphs
from weft.engine.parallel import distribute, reducing
from weft.fast import replay


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rehearse(model: nn.Module) -> None:
    model(torch.ones(2, 512)).sum().backward()


def test_buckets_leave_before_the_backward_pass_ends(group):
    """Eight layers of 1 MiB: the first bucket is full when the last layer has its gradients."""
    layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model = distribute(layers, rehearse)
    seen: list[str] = []

    def send(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append("message")
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, send)
    layers[0].weight.register_hook(lambda grad: seen.append("first layer's gradient"))
    rehearse(model)
    assert seen.count("message") > 1
    assert seen.index("message") < seen.index("first layer's gradient") < len(seen) - 1
    seen.clear()
    with reducing(model, False):
        rehearse(model)
    assert seen == ["first layer's gradient"]  # gradients add up, and nothing is sent


def test_rehearsal_leaves_no_trace(group):
    model = nn.Sequential(nn.Linear(512, 4), nn.BatchNorm1d(4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    distribute(model, rehearse)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen = nn.Linear(512, 2), nn.Linear(512, 2), nn.Linear(512, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) + self.frozen(x)


def test_parameters_without_a_gradient_are_looked_for_where_there_are_some(group):
    model = HalfUsed()
    distributed = distribute(model, rehearse)
    assert distributed.find_unused_parameters
    for _ in range(3):  # torch would refuse the second pass
        rehearse(distributed)
    assert model.used.weight.grad is not None
    assert model.unused.weight.grad is None  # as in one process: the optimiser leaves it alone
    del model.unused
    assert not distribute(model, rehearse).find_unused_parameters


def test_replayed_model_gives_the_same_gradients(group, monkeypatch):
    fake_graphs.install(monkeypatch)
    monkeypatch.setattr(replay, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(replay, "free_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    model = nn.Sequential(nn.Linear(512, 8), nn.GELU(), nn.Linear(8, 2))
    replayed = replay.replay(model)
    distributed = distribute(replayed, rehearse)
    for scale in range(1, 6):
        x = torch.full((2, 512), 0.1 * scale)
        model.zero_grad()
        model(x).sum().backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        distributed(x).sum().backward()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))
    assert replayed.holds_memory
