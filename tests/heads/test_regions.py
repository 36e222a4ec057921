"""The second readings of torchvision's stages: by hand, and by a plain loop over mmdetection's rule."""

import itertools

import pytest
import torch
from torchvision.models.detection import roi_heads
from torchvision.ops import MultiScaleRoIAlign, box_iou, roi_align

import weft
from weft.heads.rcnn import make_detector
from weft.heads.regions import BOX_LOSSES, STRIDES, PlainL1, best_of_objects, region_pool

SIDE = 256  # of the picture
MMDETECTION = dict(roi_aligned=True, roi_sampling=0, box_loss="l1", low_quality_matches=True)


def a_detector(**args):
    torch.manual_seed(0)
    backbone = weft.create_model("cvt_nano", num_classes=0)
    return make_detector(backbone, "mask-rcnn", 3, channels=16, box_width=32, proposals=50, roi_samples=32, **args)


def a_batch():
    torch.manual_seed(1)
    boxes = torch.tensor([[8.0, 8, 60, 60], [40, 20, 90, 50]])
    masks = torch.zeros(2, 64, 96, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": masks[:0]}
    return torch.randn(2, 3, 64, 96).unbind(), [{"boxes": boxes, "labels": torch.tensor([1, 3]), "masks": masks}, empty]


# RoIAlign -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aligned", [True, False])
def test_answers_do_not_depend_on_the_first_picture(aligned):
    """torchvision guesses the strides of the maps from it, and 24 rows of 65, of which 31 are padding, look like 2."""
    first, picture = torch.randn(3, 65, 48), torch.randn(3, 128, 96)
    fresh, used = (a_detector(roi_aligned=aligned).eval() for _ in range(2))
    with torch.no_grad():
        used([first])
        expected, found = fresh([picture])[0], used([picture])[0]
    assert len(expected["scores"])
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize(("aligned", "off"), [(True, 0.0), (False, 0.5)])
@pytest.mark.parametrize(("side", "stride"), [(41.5, 4), (130.0, 8)])
def test_aligned_corners_are_at_their_places(side, stride, aligned, off, sampling):
    """A map that says where its pixels are gives the middles of the bins, or those half a pixel of the map off."""
    maps = {
        name: ((torch.arange(SIDE // step) + 0.5) * step).expand(1, 1, SIDE // step, SIDE // step)
        for name, step in STRIDES.items()
    }
    left = 50.25
    found = region_pool(7, sampling, aligned)(
        maps, [torch.tensor([[left, 60, left + side, 60 + side]])], [(SIDE, SIDE)]
    )
    middles = left + (torch.arange(7) + 0.5) * side / 7
    torch.testing.assert_close(found[0, 0, 3], middles + off * stride)


def test_levels_are_torchvisions_and_values_those_of_its_function():
    torch.manual_seed(0)
    maps = {name: torch.randn(2, 3, 512 // step, 512 // step) for name, step in STRIDES.items()}
    sides = [1.0, 55, 56, 111, 112, 223, 224, 447, 448, 500]
    boxes = [torch.tensor([[5.0, 3, 5 + side, 3 + side] for side in some]) for some in (sides, sides[::-1][:4])]
    found = region_pool(7, 0, True)(maps, boxes, [(512, 512)] * 2)
    mapper = MultiScaleRoIAlign([*STRIDES], 7, 2)
    mapper(maps, boxes, [(512, 512)] * 2)
    levels = mapper.map_levels(boxes).tolist()
    assert set(levels) == {0, 1, 2, 3}
    pictures = [0] * len(boxes[0]) + [1] * len(boxes[1])
    for i, (box, level, picture) in enumerate(zip(torch.cat(boxes), levels, pictures, strict=True)):
        one = maps[str(level)][picture : picture + 1]
        expected = roi_align(one, [box[None]], 7, 1 / STRIDES[str(level)], sampling_ratio=0, aligned=True)
        torch.testing.assert_close(found[i : i + 1], expected)


def test_no_regions_are_no_error():
    maps = {name: torch.randn(1, 3, 64 // step, 64 // step, requires_grad=True) for name, step in STRIDES.items()}
    found = region_pool(14, 0, True)(maps, [torch.zeros(0, 4)], [(64, 64)])
    assert found.shape == (0, 3, 14, 14)
    found.sum().backward()


# Losses of boxes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loss", "expected"), [("smooth-l1", (0.5 * 0.1**2 * 9 + 2 - 1 / 18) / 3), ("l1", 2.1 / 3)])
def test_losses_of_boxes_by_hand(loss, expected):
    """Of three regions one holds an object, of class 2; it is off by 0.1 in one corner and by 2 in another."""
    given = torch.zeros(3, 12)
    given[1, 8:10] = torch.tensor([0.1, -2.0])
    labels, targets = [torch.tensor([0, 2, 0])], [torch.zeros(3, 4)]
    with a_detector(box_loss=loss).roi_heads.box_loss():
        found = roi_heads.fastrcnn_loss(torch.zeros(3, 3), given, labels, targets)[1]
    assert found.item() == pytest.approx(expected)


def test_l1_is_that_of_both_stages_and_of_nothing_else(monkeypatch):
    """What the losses are given is kept, and L1 computed from it."""
    detector, kept = a_detector(box_loss="l1").train(), {}
    second = roi_heads.fastrcnn_loss

    def watched(logits, boxes, labels, targets):
        kept["second"] = boxes.reshape(len(boxes), -1, 4), torch.cat(labels), torch.cat(targets)
        return second(logits, boxes, labels, targets)

    sampler = detector.rpn.fg_bg_sampler

    def sampled(labels):
        kept["sampled"] = sampler(labels)
        return kept["sampled"]

    encode = detector.rpn.box_coder.encode

    def encoded(*args):
        kept["first"] = encode(*args)
        return kept["first"]

    def answered(module, inputs, outputs):
        boxes = [maps.unflatten(1, (3, 4)).permute(0, 3, 4, 1, 2).flatten(1, 3) for maps in outputs[1]]
        kept["answers"] = torch.cat(boxes, 1).flatten(0, 1)

    monkeypatch.setattr(roi_heads, "fastrcnn_loss", watched)
    detector.rpn.head.register_forward_hook(answered)
    detector.rpn.fg_bg_sampler = sampled
    monkeypatch.setattr(detector.rpn.box_coder, "encode", encoded)
    pictures, targets = a_batch()
    torch.manual_seed(2)
    losses = detector(pictures, targets)
    boxes, labels, wanted = kept["second"]
    rows = labels.nonzero()[:, 0]
    expected = (boxes[rows, labels[rows]] - wanted[rows]).abs().sum() / len(labels)
    torch.testing.assert_close(losses["loss_box_reg"], expected)
    assert expected > 0
    positive, negative = (torch.cat(part).bool() for part in kept["sampled"])
    off = (kept["answers"] - torch.cat(kept["first"]))[positive].abs().sum()
    torch.testing.assert_close(losses["loss_rpn_box_reg"], off / (positive.sum() + negative.sum()))
    detector.roi_heads.box_loss = detector.rpn.box_loss = BOX_LOSSES["smooth-l1"]
    torch.manual_seed(2)
    smooth = detector(pictures, targets)
    other = {name for name in losses if not torch.equal(losses[name], smooth[name])}
    assert other == {"loss_box_reg", "loss_rpn_box_reg"}


def test_l1_ends_with_its_block():
    one, other = torch.tensor([0.05]), torch.zeros(1)
    with PlainL1():
        assert torch.nn.functional.smooth_l1_loss(one, other).item() == pytest.approx(0.05)
    assert torch.nn.functional.smooth_l1_loss(one, other).item() == pytest.approx(0.05**2 / 2)


# Low-quality matches ------------------------------------------------------------------------------------------------

OBJECTS = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]])
PROPOSALS = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9.9], [50, 50, 60, 54], [80, 80, 90, 90]])


@pytest.mark.parametrize(("low", "objects", "classes"), [(False, [0, 0], [1, 1, 0, 0]), (True, [0, 1], [1, 2, 0, 0])])
def test_the_best_proposal_of_an_object_is_its_own(low, objects, classes):
    """The second proposal overlaps the first object by 0.99 and the second one by 0.91, more than any other does.

    The third one is the best of the third object, with 0.4: too little for either rule.
    """
    heads = a_detector(low_quality_matches=low).roi_heads
    given = torch.cat([PROPOSALS, OBJECTS])  # as torchvision adds them
    matched, labels = heads.assign_targets_to_proposals([given], [OBJECTS], [torch.tensor([1, 2, 3])])
    assert matched[0][:2].tolist() == objects
    assert labels[0].tolist() == [*classes, 1, 2, 3]
    assert matched[0][4:].tolist() == [0, 1, 2]


def by_the_rule(proposals, objects, least):
    """MaxIoUAssigner's last step, as mmdetection describes it: for each object, its nearest proposals to itself."""
    found = {}
    iou = box_iou(objects, proposals)
    for i, row in enumerate(iou):
        if len(row) and row.max() >= least:
            found |= dict.fromkeys((row == row.max()).nonzero()[:, 0].tolist(), i)
    return dict(sorted(found.items()))


@pytest.mark.parametrize(("seed", "objects"), [*itertools.product(range(10), [0, 1, 6])])
def test_low_quality_matches_are_mmdetections(seed, objects):
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(40 + objects, 2, generator=generator) * 3
    boxes = torch.cat([corners, corners + 6 + torch.rand(40 + objects, 2, generator=generator) * 3], 1)
    proposals, truth = boxes[:40], boxes[40:]
    proposals = torch.cat([proposals, proposals[:5]])  # ties
    chosen, owners = best_of_objects(torch.cat([proposals, truth]), truth, 0.5)
    assert dict(zip(chosen.tolist(), owners.tolist(), strict=True)) == by_the_rule(proposals, truth, 0.5)
    nothing, _ = best_of_objects(truth, truth, 0.5)  # no proposals beside the objects themselves
    assert not len(nothing)


# All together -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [MMDETECTION, *({key: value} for key, value in MMDETECTION.items())])
def test_every_reading_trains_and_answers(args):
    detector = a_detector(**args).train()
    pictures, targets = a_batch()
    losses = detector(pictures, targets)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert not [name for name, p in detector.named_parameters() if p.grad is None]
    assert len(detector.eval()(pictures)) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert all(loss.dtype == torch.float32 for loss in detector.train()(pictures, targets).values())


def test_readings_have_the_same_weights():
    ours, usual = a_detector(**MMDETECTION), a_detector()
    for (name, one), (other_name, other) in zip(ours.state_dict().items(), usual.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
