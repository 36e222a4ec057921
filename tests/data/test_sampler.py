"""What a plan draws, as properties over sizes, worlds and steps; and against timm's repeated augmentation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data.distributed_sampler import RepeatAugSampler

from weft.data.sampler import WINDOW, SamplingPlan
from weft.errors import WeftError

sizes = st.integers(1, 60)


def epoch(plan: SamplingPlan, number: int = 0) -> list[int]:
    steps = range(number * plan.steps_per_epoch, (number + 1) * plan.steps_per_epoch)
    return [draw.index for step in steps for draw in plan.step(step)]


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(1, 20), st.integers(1, 5), st.integers(0, 400), st.integers(1, 4), st.booleans())
def test_union_over_ranks_does_not_depend_on_world(n, batch, world, step, repeats, weighted) -> None:
    world = min(world, batch)
    options = dict(batch=batch, seed=3, repeats=repeats, weights=np.arange(1, n + 1) if weighted else None)
    alone = SamplingPlan(np.arange(n), **options).step(step)
    parts = [SamplingPlan(np.arange(n), rank=rank, world=world, **options).step(step) for rank in range(world)]
    assert [draw for i in range(len(parts[0])) for part in parts for draw in part[i : i + 1]] == alone
    assert len(alone) == batch
    assert {len(part) for part in parts} <= {batch // world, -(-batch // world)}


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(1, 70), st.integers(0, 5), st.booleans())
def test_an_epoch_draws_nothing_twice_before_everything_once(n, batch, number, sharded) -> None:
    indices = np.arange(n) * 3 + 1
    drawn = epoch(SamplingPlan(indices, batch=batch, seed=1, blocks=np.arange(n) // 4 if sharded else None), number)
    assert set(drawn) <= set(indices.tolist())
    assert max(map(drawn.count, drawn)) - min(drawn.count(i) for i in indices) <= 1
    assert len(drawn) == max(1, n // batch) * batch


def test_steps_are_pure_functions() -> None:
    plan = SamplingPlan(np.arange(100), batch=8, seed=5)
    forward = [plan.step(step) for step in range(30)]
    assert [SamplingPlan(np.arange(100), batch=8, seed=5).step(step) for step in reversed(range(30))][::-1] == forward
    assert forward != [SamplingPlan(np.arange(100), batch=8, seed=6).step(step) for step in range(30)]
    seeds = [draw.seed for step in forward for draw in step]
    assert len(set(seeds)) == len(seeds)
    assert epoch(plan, 0) != epoch(plan, 1)


def test_repeats_as_in_timm() -> None:
    """timm's sampler for 2 ranks and ours: as many pictures, as often, side by side over the ranks."""
    theirs = [list(RepeatAugSampler(range(600), 2, rank, num_repeats=3, selected_round=100)) for rank in range(2)]
    plans = [SamplingPlan(np.arange(600), batch=100, seed=0, rank=rank, world=2, repeats=3) for rank in range(2)]
    ours = [epoch(plan) for plan in plans]
    for ranks in (theirs, ours):
        together = np.array(ranks).T.flatten()  # in the order of the global batch
        assert len(together) == 600
        np.testing.assert_array_equal(together, np.repeat(together[::3], 3))
        assert len(set(together.tolist())) == 200
    assert len({draw.seed for draw in plans[0].step(0)}) == 50  # each repeat is augmented differently


def test_weights_are_the_frequencies() -> None:
    weights = np.array([0.0, 1.0, 2.0, 5.0])
    drawn = epoch(SamplingPlan(np.arange(4), batch=40000, seed=0, weights=weights))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 40000, weights / 8, atol=0.01)


def test_shards_are_read_a_few_at_a_time() -> None:
    blocks = np.repeat(np.arange(100), 10)
    order = blocks[epoch(SamplingPlan(np.arange(1000), batch=10, seed=0, blocks=blocks))]
    windows = [set(order[i : i + 10 * WINDOW].tolist()) for i in range(0, 1000, 10 * WINDOW)]
    assert sum(map(len, windows)) == 100  # no shard in two windows
    assert len(set(order[:40].tolist())) > 8  # and shards are mixed within one
    assert order[: 10 * WINDOW].max() > WINDOW  # which are not the first ones


@pytest.mark.parametrize(
    "options",
    [
        dict(indices=np.arange(0)),
        dict(batch=0),
        dict(rank=2, world=2),
        dict(batch=2, world=3),
        dict(weights=np.zeros(5)),
        dict(weights=np.ones(4)),
        dict(weights=np.array([1, 1, 1, 1, np.nan])),
    ],
)
def test_what_does_not_fit_is_refused(options: dict) -> None:
    with pytest.raises(WeftError):
        SamplingPlan(**{"indices": np.arange(5), "batch": 4, "seed": 0, **options})
