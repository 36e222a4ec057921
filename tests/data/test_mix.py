"""Mixup, cutmix, erasing and smoothing of whole batches, against timm's."""

import random

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup, cutmix_bbox_and_lam, mixup_target
from timm.data.random_erasing import RandomErasing

from tests.helpers.made_pictures import RNG
from weft.config import AugmentConfig
from weft.data.augment.mix import BatchAugmentation, cut_box, erased_box


def batch(n: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 24, 20, generator=generator), torch.arange(n) % 5


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
