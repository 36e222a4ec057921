"""Mixup, cutmix, erasing and smoothing of whole batches, against timm's."""

import random

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing

from tests.helpers.made_pictures import RNG, preprocessing
from weft.config import AugmentConfig
from weft.data.augment.mix import BatchAugmentation, cut_box, erased_box, erased_boxes
from weft.kernels.ops.mix import Mix


def batch(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 24, 20, generator=generator), torch.arange(n) % 5


@pytest.mark.parametrize(("part_done", "mixed"), [(0.0, True), (0.59, True), (0.6, False), (1.0, False)])
def test_mixing_ends_before_the_run_does(part_done: float, mixed: bool) -> None:
    ours = BatchAugmentation(AugmentConfig(mixup=0.8, mix_until=0.6), 0.0, 5, False)
    ours.part_done = part_done
    pictures, labels = batch()
    assert torch.equal(ours(pictures, labels, 3)[0], pictures) != mixed
    rows = ours.draw_rows(np.random.default_rng(3), 8, 24, 20)
    assert (rows[:, Mix.KEPT] < 1).all() == mixed


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixing_is_timms(kind: str, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's Mixup with our draws in the place of its own."""
    config = AugmentConfig(mixup=0.8, cutmix=1.0, switch_prob=float(kind == "cutmix"), mix_prob=float(kind != "none"))
    ours = BatchAugmentation(config, smoothing, 5, False)
    for seed in range(5):
        pictures, labels = batch()
        lam, box = ours.draw(np.random.default_rng(seed), 24, 20)
        theirs = Mixup(0.8, 1.0, label_smoothing=smoothing, num_classes=5)
        monkeypatch.setattr(theirs, "_params_per_batch", lambda lam=lam, box=box: (lam, box is not None))
        monkeypatch.setattr("timm.data.mixup.cutmix_bbox_and_lam", lambda *_, lam=lam, box=box, **__: (box, lam))
        before = pictures.clone()
        found = ours(pictures, labels, seed)
        assert torch.equal(pictures, before)
        for mine, expected in zip(found, theirs(pictures, labels), strict=True):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-6)


def test_cut_boxes_are_timms(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(50):
        lam, y, x = RNG.random(), int(RNG.integers(24)), int(RNG.integers(20))
        draws = iter((y, x))
        monkeypatch.setattr(np.random, "randint", lambda *_, draws=draws, **__: next(draws))
        assert cut_box(lam, 24, 20, y, x) == tuple(cutmix_bbox_and_lam((24, 20), lam)[0])


def test_erasing_has_timms_statistics() -> None:
    """Share of pictures erased, and mean area: ours and timm's over many draws."""
    pictures = torch.zeros(2000, 1, 20, 24)
    ours, _ = BatchAugmentation(AugmentConfig(erase=0.4), 0.0, 5, False)(pictures, torch.zeros(2000).long(), 0)
    random.seed(0)
    theirs = RandomErasing(0.4, mode="pixel", device="cpu")(pictures.clone())
    for erased in (ours, theirs):
        hit = (erased != 0).flatten(1).any(1)
        assert abs(hit.float().mean() - 0.4) < 0.03
        assert abs(erased[erased != 0].std() - 1) < 0.02
    areas = [(erased != 0).float().flatten(1).mean(1) for erased in (ours, theirs)]
    assert abs(areas[0].mean() - areas[1].mean()) < 0.006
    assert not pictures.any()
    boxes = [erased_box(np.random.default_rng(seed), 20, 24) for seed in range(200)]
    assert all(b is not None and 0 <= b[0] < b[1] <= 20 and 0 <= b[2] < b[3] <= 24 for b in boxes)


def test_labels_without_mixing() -> None:
    pictures, labels = batch()
    assert BatchAugmentation(AugmentConfig(), 0.0, 5, False)(pictures, labels, 0)[1] is labels
    smooth = BatchAugmentation(AugmentConfig(), 0.1, 5, False)(pictures, labels, 0)[1]
    torch.testing.assert_close(smooth, mixup_target(labels, 5, smoothing=0.1))


def test_several_labels_per_picture_mix() -> None:
    pictures, _ = batch()
    labels = torch.randint(0, 2, (8, 5)).float()
    ours = BatchAugmentation(AugmentConfig(mixup=1.0), 0.1, 5, True)
    lam, _ = ours.draw(np.random.default_rng(4), 24, 20)
    smooth = labels * 0.9 + 0.05
    torch.testing.assert_close(ours(pictures, labels, 4)[1], lam * smooth + (1 - lam) * smooth.flip(0))


# For steps that are recorded ------------------------------------------------------------------------------------


def rows_for(ours: BatchAugmentation, seed: int, count: int, height: int, width: int) -> torch.Tensor:
    """The rows of what `ours` draws when it is called with this seed."""
    generator = np.random.default_rng(seed)
    rows = torch.zeros(count, Mix.COLUMNS)
    if ours.config.erase:
        generator.integers(2**63)
        for row in rows:
            if generator.random() <= ours.config.erase and (box := erased_box(generator, height, width)):
                row[Mix.ERASED : Mix.KEPT] = torch.tensor(box)
    lam, box = ours.draw(generator, height, width) if ours.config.mixup or ours.config.cutmix else (1.0, None)
    rows[:, Mix.KEPT :] = torch.tensor([lam, 1 - lam, *(box or [0] * 4)])
    return rows


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("mixup", "cutmix", "mix_prob"), [(0.8, 0, 1), (0, 1.0, 1), (0.8, 1.0, 0.5), (0, 0, 1)])
def test_rows_say_what_a_seed_says(
    mixup: float, cutmix: float, mix_prob: float, smoothing: float, multilabel: bool
) -> None:
    config = AugmentConfig(mixup=mixup, cutmix=cutmix, mix_prob=mix_prob)
    ours = BatchAugmentation(config, smoothing, 5, multilabel)
    pictures, labels = batch()
    labels = torch.nn.functional.one_hot(labels, 5) if multilabel else labels
    for seed in range(8):
        before = pictures.clone()
        found = ours.apply(pictures, labels, rows_for(ours, seed, 8, 24, 20))
        for mine, expected in zip(found, ours(pictures, labels, seed), strict=True):
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected)
        assert torch.equal(pictures, before)


def test_rows_erase_what_a_seed_erases() -> None:
    """The same boxes; the noise is the device's own."""
    ours = BatchAugmentation(AugmentConfig(erase=0.7), 0.0, 5, False)
    pictures, labels = torch.zeros(64, 3, 24, 20), torch.zeros(64).long()
    found, same = ours.apply(pictures, labels, rows_for(ours, 3, 64, 24, 20))
    assert torch.equal(found != 0, ours(pictures, labels, 3)[0] != 0)
    assert abs(found[found != 0].std() - 1) < 0.02
    assert same is labels
    torch.manual_seed(1)
    again = ours.apply(pictures, labels, rows_for(ours, 3, 64, 24, 20))[0]
    assert not torch.equal(found, again)


def test_finishing_normalises_first() -> None:
    ours = BatchAugmentation(AugmentConfig(mixup=0.8), 0.1, 5, False)
    pictures, labels = torch.randint(0, 256, (8, 3, 24, 20), dtype=torch.uint8), batch()[1]
    before, rows = preprocessing(size=(24, 20)), rows_for(ours, 1, 8, 24, 20)
    found = ours.finish(pictures, labels, rows, before)
    for mine, expected in zip(found, ours(before.normalise(pictures), labels, 1), strict=True):
        assert torch.equal(mine, expected)


def test_erasing_comes_before_mixing() -> None:
    ours = BatchAugmentation(AugmentConfig(erase=1.0, mixup=1.0), 0.0, 5, False)
    rows = torch.zeros(2, Mix.COLUMNS)
    rows[0, Mix.ERASED : Mix.KEPT] = torch.tensor([1, 3, 2, 5])
    rows[:, Mix.KEPT], rows[:, Mix.GIVEN] = 0.75, 0.25
    found, _ = ours.apply(torch.zeros(2, 1, 6, 6), torch.tensor([0, 1]), rows)
    assert torch.count_nonzero(found[0]) == torch.count_nonzero(found[1]) == 6
    torch.testing.assert_close(found[0], 3 * found[1])


@pytest.mark.parametrize(("height", "width"), [(20, 24), (1, 1), (2, 40), (224, 224)])
def test_boxes_of_a_batch_are_those_of_pictures(height: int, width: int) -> None:
    """Distributions of sides and places, and how often nothing fits."""
    generator, count = np.random.default_rng(0), 3000
    alone = [erased_box(generator, height, width) or (0, 0, 0, 0) for _ in range(count)]
    for mine, expected in zip(erased_boxes(generator, count, height, width).T, np.array(alone).T, strict=True):
        assert mine.min() >= 0
        assert mine.max() <= max(height, width)
        for quantile in (0.05, 0.3, 0.5, 0.7, 0.95):
            at = np.quantile(expected, quantile)
            assert abs((mine <= at).mean() - (expected <= at).mean()) < 0.05
    areas = [
        (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        for boxes in (erased_boxes(generator, count, height, width), np.array(alone))
    ]
    assert abs(areas[0].mean() - areas[1].mean()) <= 0.05 * areas[1].mean() + 1e-9
    assert abs((areas[0] == 0).mean() - (areas[1] == 0).mean()) < 0.05


def test_rows_are_drawn_with_timms_frequencies() -> None:
    ours = BatchAugmentation(
        AugmentConfig(erase=0.3, mixup=0.8, cutmix=1.0, mix_prob=0.8, switch_prob=0.4), 0.1, 5, False
    )
    drawn = np.stack([ours.draw_rows(np.random.default_rng(seed), 8, 24, 20) for seed in range(1000)])
    assert drawn.dtype == np.float32
    assert abs((drawn[..., 1] > drawn[..., 0]).mean() - 0.3) < 0.03
    batches = drawn[:, 0]
    assert (drawn[:, :, Mix.KEPT :] == drawn[:, :1, Mix.KEPT :]).all()
    assert np.allclose(batches[:, Mix.KEPT] + batches[:, Mix.GIVEN], 1)
    cut = batches[:, Mix.CUT + 1] > batches[:, Mix.CUT]
    assert abs(cut.mean() - 0.8 * 0.4) < 0.05
    assert abs((batches[:, Mix.KEPT] == 1).mean() - 0.2) < 0.05
    top, bottom, left, right = batches[cut, Mix.CUT :].T
    np.testing.assert_allclose(
        batches[cut, Mix.GIVEN], (bottom - top) * (right - left) / (24 * 20), rtol=1e-4, atol=1e-6
    )
