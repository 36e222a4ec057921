"""Policy and colour jitter drawn for whole batches: timm's arguments and frequencies, Pillow's values."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import auto_augment
from torchvision.transforms import v2

from tests.data.test_device_policy import (
    MODES,
    MOVES,
    NAMES,
    USUAL,
    by_timm,
    check,
    clothes,
    noise,
    policy,
    preprocessing,
)
from weft import WeftError
from weft.config import AugmentConfig
from weft.data.augment.batch_policy import LEVELS, BatchJitter, BatchPolicy, batch_steps, can_batch
from weft.data.augment.device_policy import CODES
from weft.data.preprocessing import to_pillow
from weft.kernels.ops.augment import Code, Step

SIGNS = st.sampled_from([-1, 1])


def batch_policy(text: str = USUAL, channels: int = 3, **settings: Any) -> BatchPolicy:
    return BatchPolicy(AugmentConfig(policy=text, **settings), preprocessing(channels))


def jitter(strength: float, channels: int = 3) -> BatchJitter:
    return BatchJitter(AugmentConfig(color_jitter=strength), preprocessing(channels))


def steps_of(rows: np.ndarray) -> np.ndarray:
    """(count, steps, 4)"""
    return rows.reshape(len(rows), -1, len(Step))


def one_step(name: str, argument: float, mode: int) -> torch.Tensor:
    """(1, 4): an operation with timm's argument."""
    code = CODES[auto_augment.NAME_TO_OP[name]]
    angle = np.radians(argument) if code == Code.ROTATE else 0.0
    by = np.cos(angle) if code == Code.ROTATE else argument
    return torch.tensor([[code, by, np.sin(angle), mode]], dtype=torch.float32)


# What is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [USUAL, "rand-m9", "rand-m9-tweights"])
@given(level=st.floats(0, 15), sign=SIGNS)
@settings(max_examples=25, derandomize=True)
def test_arguments_are_timms(text: str, level: float, sign: int) -> None:
    ours = batch_policy(text)
    chosen = np.arange(len(ours.names))
    found = ours.arguments(chosen, np.full(len(chosen), level), np.full(len(chosen), sign))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_augment.random, "random", lambda: 0.9 if sign < 0 else 0.1)
        functions = [auto_augment.LEVEL_TO_ARG[name] or (lambda *_: (0.0,)) for name in ours.names]
        expected = [function(level, {})[0] for function in functions]
    assert list(found) == expected


def test_every_operation_has_a_level() -> None:
    assert {CODES[auto_augment.NAME_TO_OP[name]] for name in LEVELS} == {*Code} - {Code.NOTHING}


@pytest.mark.parametrize(
    "text", [USUAL, "rand-m7-n3-p0.8-mstd101", "rand-m9-mstd1-tweights", "rand-m14-p1-mmax12-mstd2"]
)
def test_frequencies_are_timms(text: str) -> None:
    """Which operations, how many, and the distribution of their arguments, next to timm's own draws."""
    count, ours = 6000, batch_policy(text, interpolation="random")
    found = steps_of(ours.draw(np.random.default_rng(1), count))
    theirs = policy(text, interpolation="random").draw(count, 1)
    done = (found[..., Step.CODE] != Code.NOTHING).sum(1)
    compare_counts(Counter(done.tolist()), Counter(map(len, theirs)))
    drawn = [step for each in theirs for step in each]
    compare_counts(
        Counter(found[..., Step.CODE][found[..., Step.CODE] > 0]), Counter(CODES[s.operation] for s in drawn)
    )
    for operation, code in CODES.items():
        mine = found[found[..., Step.CODE] == code]
        arguments = np.array([step.args for step in drawn if step.operation is operation])
        if not arguments.size or len(arguments) < 50:
            continue
        by = np.cos(np.radians(arguments[:, 0])) if code == Code.ROTATE else arguments[:, 0]
        spread = by.std() / np.sqrt(len(by)) + mine[:, Step.BY].std() / np.sqrt(len(mine)) + 1e-6
        assert abs(mine[:, Step.BY].mean() - by.mean()) < 4 * spread, code
        assert abs(mine[:, Step.BY].std() - by.std()) < 4 * spread, code
        for quantile in (0.01, 0.5, 0.99):
            at = np.quantile(by, quantile)
            assert abs((mine[:, Step.BY] <= at + 1e-6).mean() - (by <= at + 1e-6).mean()) < 4 / np.sqrt(len(by)), code
    moved = np.isin(found[..., Step.CODE], [CODES[auto_augment.NAME_TO_OP[name]] for name in MOVES])
    assert abs((found[moved][:, Step.MODE] == 3).mean() - 0.5) < 0.05
    assert {*found[moved][:, Step.MODE]} == {2, 3}


def compare_counts(ours: Counter, theirs: Counter) -> None:
    """Two draws of the same frequencies: each is within 4.5 standard deviations of the other."""
    for key in {*ours, *theirs}:
        a, b = ours[key], theirs[key]
        assert abs(a - b) <= 4.5 * np.sqrt(a + b), (key, a, b)


def test_pairs_are_independent_or_never_twice() -> None:
    codes = steps_of(batch_policy("rand-m9-p1").draw(np.random.default_rng(0), 9000))[..., Step.CODE]
    pairs = Counter(map(tuple, codes))
    assert sum((pairs[a, b] - 40) ** 2 / 40 for a in range(1, 16) for b in range(1, 16)) < 294  # p = 0.001
    codes = steps_of(batch_policy("rand-m9-p1-n15-tweights").draw(np.random.default_rng(0), 300))[..., Step.CODE]
    assert all({*row} == {*range(1, 16)} for row in codes)


def test_magnitude_without_noise_and_interpolation_as_asked() -> None:
    rows = steps_of(batch_policy("rand-m9-p1", interpolation="bilinear").draw(np.random.default_rng(0), 500))
    assert {*rows[..., Step.MODE].ravel()} == {2}
    assert {*rows[rows[..., Step.CODE] == Code.SHEAR_X][:, Step.BY]} == {np.float32(0.27), np.float32(-0.27)}


def test_rows_are_the_generators() -> None:
    for ours in (batch_policy(interpolation="random"), jitter(0.4)):
        first, same, other = (ours.draw(np.random.default_rng(seed), 16) for seed in (5, 5, 6))
        assert first.shape == (16, ours.columns)
        assert first.dtype == np.float32
        assert np.array_equal(first, same)
        assert not np.array_equal(first, other)


# What is done ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_pillows(name: str, channels: int) -> None:
    ours = batch_policy(channels=channels)

    @settings(max_examples=4, derandomize=True)
    @given(st.floats(0, 10), SIGNS, st.sampled_from(MODES), st.tuples(st.integers(1, 40), st.integers(1, 40)))
    def compare(level: float, sign: int, mode: int, shape: tuple[int, int]) -> None:
        by_level = LEVELS[name]
        amount = min(by_level.most, level / 10 * by_level.scale)
        argument = by_level.start + (by_level.direction or sign) * (int(amount) if by_level.whole else amount)
        argument = max(by_level.least, argument)
        argument = int(argument) if by_level.whole else float(np.float32(argument))
        args = (argument,) if by_level.scale else ()
        picture = noise(channels, *shape) // 2
        found = ours(picture[None], one_step(name, argument, mode))[0]
        check(found, by_timm(name, picture, args, mode), name in MOVES, mode, often=1.0)

    compare()


def test_pictures_have_their_own_steps() -> None:
    """Together as alone, and the given ones as before."""
    pictures, ours = noise(24, 3, 16, 12), batch_policy("rand-m9-n3-p0.9-mstd0.5-inc1", interpolation="random")
    rows, before = torch.from_numpy(ours.draw(np.random.default_rng(3), 24)), pictures.clone()
    alone = torch.cat([ours(pictures[i : i + 1], rows[i : i + 1]) for i in range(24)])
    assert ((ours(pictures, rows).int() - alone.int()).abs() > 2).float().mean() < 1e-3
    assert torch.equal(pictures, before)
    assert torch.equal(ours(pictures, torch.zeros_like(rows)), pictures)


@pytest.mark.parametrize("channels", [1, 3])
def test_jitter_is_torchvisions(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = jitter(0.4, channels), v2.ColorJitter(0.4, 0.4, 0.4)
    names = {Code.BRIGHTNESS: "brightness_factor", Code.CONTRAST: "contrast_factor", Code.COLOR: "saturation_factor"}
    rows = ours.draw(np.random.default_rng(0), 8)
    found = ours(clothes()[:, :channels], torch.from_numpy(rows))
    for picture, steps, mine in zip(clothes()[:, :channels], steps_of(rows), found, strict=True):
        factors = {names[Code(int(step[Step.CODE]))]: float(step[Step.BY]) for step in steps}
        order = [[*names.values()].index(name) for name in factors]
        monkeypatch.setattr(theirs, "make_params", lambda _, f=factors, o=order: dict(fn_idx=o, hue_factor=None, **f))
        expected = torch.from_numpy(np.array(theirs(to_pillow(picture)))).view(*picture.shape[1:], -1).permute(2, 0, 1)
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("strength", "low"), [(0.4, 0.6), (1.5, 0.0)])
def test_jitter_has_torchvisions_distribution(strength: float, low: float) -> None:
    steps = steps_of(jitter(strength).draw(np.random.default_rng(0), 6000))
    orders = Counter(map(tuple, steps[..., Step.CODE]))
    assert len(orders) == 6
    assert all(abs(count - 1000) < 130 for count in orders.values())
    factors = steps[..., Step.BY]
    middle, width = (1 + strength + low) / 2, 1 + strength - low
    assert low <= factors.min() < low + 0.01
    assert 1 + strength - 0.01 < factors.max() <= 1 + strength
    assert abs(factors.mean() - middle) < 0.01 * width
    assert abs(factors.std() - width / np.sqrt(12)) < 0.01 * width


# What can be done -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strength", "channels", "depth", "expected"),
    [
        (USUAL, 0.4, 3, 8, BatchPolicy),
        ("", 0.4, 1, 8, BatchJitter),
        ("", 0.0, 4, 16, type(None)),
        ("rand-m9-t3a", 0.0, 3, 8, None),
        ("trivial", 0.0, 3, 8, None),
        ("augmix", 0.0, 3, 8, None),
        ("original", 0.0, 3, 8, None),
        (USUAL, 0.0, 4, 8, None),
        ("", 0.4, 3, 16, None),
    ],
)
def test_what_can_be_done_in_batches(text: str, strength: float, channels: int, depth: int, expected: Any) -> None:
    config = AugmentConfig(policy=text, color_jitter=strength)
    assert can_batch(config, channels, depth) == (expected is not None)
    if expected is None:
        with pytest.raises(WeftError):
            batch_steps(config, preprocessing(channels, depth))
    else:
        assert isinstance(batch_steps(config, preprocessing(channels, depth)), expected)
