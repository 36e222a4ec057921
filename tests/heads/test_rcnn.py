"""Detectors over any backbone, against torchvision's own and the counts of the paper."""

import itertools
import json

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import weft
from weft import config
from weft.errors import WeftError
from weft.heads.rcnn import choose_anchors, make_detector

SMALL = dict(channels=16, box_width=32, proposals=50, roi_samples=32)
CETNET = {"cetnet_tiny": 43, "cetnet_small": 53, "cetnet_base": 94}  # millions, the paper's table of Mask R-CNN


def a_detector(head="mask-rcnn", classes=3, name="cetnet_nano", test=None, **args):
    backbone = weft.create_model(name, num_classes=0)
    return make_detector(backbone, head, classes, test=test or config.TestConfig(score=0.0), **SMALL | args)


def a_target(*boxes, size=(64, 96), masks=True):
    corners = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    shapes = torch.zeros(len(boxes), *size, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(shapes, corners.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    target = {"boxes": corners, "labels": torch.arange(len(boxes)) % 3 + 1}
    return target | ({"masks": shapes} if masks else {})


@pytest.mark.parametrize(("name", "millions"), CETNET.items())
def test_parameters_are_those_of_the_paper(name, millions):
    detector = make_detector(weft.create_model(name, num_classes=0, device="meta"), "mask-rcnn", 80)
    assert round(sum(p.numel() for p in detector.parameters()) / 1e6) == millions


def test_losses_and_answers_are_torchvisions():
    """The same weights in torchvision's Mask R-CNN, which resizes and normalises by itself."""
    ours = make_detector(timm.create_model("resnet18", num_classes=0), "mask-rcnn", 3, proposals=50)
    theirs = MaskRCNN(
        resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5),
        num_classes=4,
        min_size=64,
        max_size=96,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        _skip_resize=True,  # in training, where it would draw a size
        rpn_pre_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=50,
        rpn_post_nms_top_n_train=50,
        rpn_post_nms_top_n_test=50,
    )
    state = {key.replace(".body.trunk.", ".body."): value for key, value in ours.state_dict().items()}
    theirs.load_state_dict(state)
    pictures = [torch.randn(3, 64, 96), torch.randn(3, 64, 80)]
    targets = [a_target([8, 8, 60, 60], [50, 20, 90, 50]), a_target(size=(64, 80))]
    answers = []
    for detector in (ours, theirs):
        torch.manual_seed(0)
        answers.append(detector.train()(pictures, targets))
    assert answers[0].keys() == answers[1].keys()
    assert len(answers[0]) == 5
    for key, value in answers[0].items():
        torch.testing.assert_close(value, answers[1][key], msg=key)
    theirs.load_state_dict(state)  # running statistics moved twice
    found, expected = (detector.eval()(pictures[:1])[0] for detector in (ours, theirs))
    for key in ("boxes", "labels", "scores"):
        torch.testing.assert_close(found[key], expected[key], msg=key)


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
@pytest.mark.parametrize("head", ["faster-rcnn", "mask-rcnn"])
def test_trains_and_answers(head, norm):
    detector = a_detector(head, norm=norm)
    pictures = [torch.randn(3, 64, 96), torch.randn(3, 50, 70)]
    targets = [a_target([4, 4, 40, 44], masks=head == "mask-rcnn"), a_target(size=(50, 70), masks=head == "mask-rcnn")]
    losses = detector.train()(pictures, targets)
    sum(losses.values()).backward()
    assert len(losses) == (5 if head == "mask-rcnn" else 4)
    unused = [name for name, p in detector.named_parameters() if p.grad is None]
    assert not unused  # distributed training waits for every gradient
    for picture, answer in zip(pictures, detector.eval()(pictures), strict=True):
        height, width = picture.shape[1:]
        assert answer["boxes"].shape == (len(answer["labels"]), 4)
        assert answer["labels"].min() >= 1
        assert (answer["boxes"] >= 0).all()
        assert (answer["boxes"] <= torch.tensor([width, height] * 2)).all()
        assert ("masks" in answer) == (head == "mask-rcnn")


@pytest.mark.parametrize("norm", ["none", "batch", "group"])
def test_pictures_without_objects_give_gradients(norm):
    detector = a_detector(norm=norm).train()
    losses = detector([torch.randn(3, 64, 96)] * 2, [a_target()] * 2)
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert not [name for name, p in detector.named_parameters() if p.grad is None]


def test_half_precision_keeps_boxes_and_losses_whole():
    detector = a_detector()
    pictures, targets = [torch.randn(3, 64, 96)], [a_target([4, 4, 40, 44])]
    with torch.autocast("cpu", torch.bfloat16):
        losses = detector.train()(pictures, targets)
        answer = detector.eval()(pictures)[0]
    assert all(loss.dtype == torch.float32 for loss in losses.values())
    assert {answer[key].dtype for key in ("boxes", "scores", "masks")} == {torch.float32}
    rounded = answer["boxes"].bfloat16().float()
    assert len(rounded)
    assert (rounded != answer["boxes"]).any()
    sum(losses.values()).backward()


@pytest.mark.parametrize(
    "test",
    [config.TestConfig(score=0.0, detections=3), config.TestConfig(score=0.9), config.TestConfig(score=0.0, nms=0.1)],
)
def test_answers_obey_the_settings(test):
    answer = a_detector(test=test).eval()([torch.randn(3, 64, 96)])[0]
    assert len(answer["scores"]) <= test.detections
    assert (answer["scores"] > test.score).all()
    for label in answer["labels"].unique():
        boxes = answer["boxes"][answer["labels"] == label]
        left, top = torch.max(boxes[:, None, :2], boxes[None, :, :2]).unbind(-1)
        right, bottom = torch.min(boxes[:, None, 2:], boxes[None, :, 2:]).unbind(-1)
        both = (right - left).clamp(0) * (bottom - top).clamp(0)
        area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        iou = both / (area[:, None] + area[None] - both)
        assert (iou.fill_diagonal_(0) <= test.nms + 1e-5).all()


def test_is_built_again_from_json():
    args = json.loads(json.dumps(dict(SMALL, anchor_sizes=[[8, 12], [16, 24], [32, 48], [64, 96], [128, 192]])))
    one, other = (a_detector(**args) for _ in range(2))
    other.load_state_dict(one.state_dict())
    picture = torch.randn(3, 64, 96)
    torch.testing.assert_close(one.eval()([picture]), other.eval()([picture]))


@pytest.mark.parametrize(
    ("head", "args", "message"),
    [
        ("mask-rcn", {}, "mask-rcnn"),
        ("mask-rcnn", dict(chanels=64), "Did you mean 'channels'"),
        ("mask-rcnn", dict(channels=0), "channels=0"),
        ("mask-rcnn", dict(norm="layer"), "norm='layer'"),
        ("mask-rcnn", dict(anchor_sizes=[8, 16]), "5 sizes"),
        ("mask-rcnn", dict(anchor_sizes=[8, 16, 32, 64, [128, 256]]), "same number"),
        ("mask-rcnn", dict(anchor_sizes=[8, 16, 32, 64, "x"]), "positive"),
        ("mask-rcnn", dict(anchor_ratios=[-1]), "anchor_ratios"),
        ("mask-rcnn", dict(anchor_ratios=2), "anchor_ratios"),
        ("mask-rcnn", dict(box_loss="l2"), "box_loss='l2'.*'smooth-l1', 'l1'"),
        ("mask-rcnn", dict(roi_sampling=-1), "roi_sampling=-1"),
        ("mask-rcnn", dict(roi_aligned="yes"), "roi_aligned='yes'"),
        ("mask-rcnn", dict(low_quality_matches=1), "low_quality_matches=1"),
    ],
)
def test_wrong_arguments_are_told(head, args, message):
    with pytest.raises(WeftError, match=message) as caught:
        make_detector(nn.Identity(), head, 3, **args)
    assert "\n" not in str(caught.value)


@given(st.floats(1, 400), st.floats(1, 40))
def test_anchors_cover_the_objects(low, factor):
    sizes = choose_anchors({"5%": low, "50%": low * factor / 2, "95%": low * factor})
    assert len(sizes) == 5
    assert all(b >= 2 * a - 1 for a, b in itertools.pairwise(sizes))
    assert sizes[0] <= max(4, low)
    assert sizes[-1] >= low * factor - 1


def test_anchors_of_known_sets():
    assert choose_anchors({"5%": 10.0, "95%": 40.0}) == [8, 16, 32, 64, 128]  # nuclei at 256 pixels
    assert choose_anchors({"5%": 40.0, "95%": 400.0}) == [32, 64, 128, 256, 512]  # torchvision's own
