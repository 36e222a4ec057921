"""Faster R-CNN and Mask R-CNN: torchvision's, over the features of any backbone.

| part | here | as in |
|---|---|---|
| pyramid | 1x1 and 3x3 convolutions of `channels` at strides 4 to 32, a pooled fifth level | Lin et al. 2017 |
| box head | two layers of `box_width`; with a norm four convolutions and one layer | torchvision, versions 1 and 2 |
| mask head | four convolutions, up by 2, one mask of 28 x 28 for each class | He et al. 2017 |
| proposals | 1000 kept of 2000 (training) or 1000 (test) per level | mmdetection, which the papers used |

`roi_aligned`, `roi_sampling`, `box_loss` and `low_quality_matches` are torchvision's by default; `weft.heads.regions`
has the other reading of each, mmdetection's. What differs from that even then stands in docs/detection.md.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from weft.config import TestConfig
from weft.errors import WeftError, check_choice, check_positive, check_switch
from weft.heads import DETECTORS, check_args
from weft.heads.features import Features
from weft.heads.fpn import group_norm
from weft.heads.regions import BOX_LOSSES, Proposals, Regions, region_pool

LEVELS = 5  # strides 4, 8, 16, 32, 64
SMALLEST_ANCHOR, LARGEST_FIRST_ANCHOR = 4, 32
NORMS = {"none": None, "batch": nn.BatchNorm2d, "group": group_norm}


@dataclass(frozen=True)
class RCNNArgs:
    """The arguments of the head, `model.head_args`; all can be written as JSON."""

    channels: int = 256  # of the pyramid and of what follows it
    anchor_sizes: list[Any] = field(default_factory=lambda: [32, 64, 128, 256, 512])  # or a list for each level
    anchor_ratios: list[float] = field(default_factory=lambda: [0.5, 1.0, 2.0])  # height / width
    norm: Literal["none", "batch", "group"] = "none"  # of pyramid, box head and mask head
    box_width: int = 1024
    proposals: int = 1000  # kept of each picture for the second stage
    roi_samples: int = 512  # proposals of each picture that the second stage learns from
    roi_aligned: bool = False  # the corners of regions at their places; False: half a pixel of the map off
    roi_sampling: int = 2  # points on each side of a bin of a region; 0: as many as it has pixels of the map
    box_loss: Literal["smooth-l1", "l1"] = "smooth-l1"  # of both stages
    low_quality_matches: bool = False  # an object's best proposal is its own, even if it overlaps another one more

    def __post_init__(self) -> None:
        check_positive(
            channels=self.channels, box_width=self.box_width, proposals=self.proposals, roi_samples=self.roi_samples
        )
        check_choice("norm", self.norm, tuple(NORMS))
        check_choice("box_loss", self.box_loss, tuple(BOX_LOSSES))
        check_switch(roi_aligned=self.roi_aligned, low_quality_matches=self.low_quality_matches)
        if self.roi_sampling != 0:
            check_positive(roi_sampling=self.roi_sampling)
        if not isinstance(self.anchor_ratios, list | tuple):
            raise WeftError(f"anchor_ratios={self.anchor_ratios!r} is not a list; give one such as [0.5, 1, 2].")
        if not isinstance(self.anchor_sizes, list | tuple) or len(self.anchor_sizes) != LEVELS:
            raise WeftError(f"anchor_sizes={self.anchor_sizes!r}: give {LEVELS} sizes in pixels, one for each level.")
        if len({len(level) for level in self.levels}) > 1:
            raise WeftError(f"anchor_sizes={self.anchor_sizes!r}: all levels must have the same number of sizes.")
        for name, numbers in (("anchor_ratios", self.anchor_ratios), ("anchor_sizes", sum(self.levels, ()))):
            if not numbers or not all(isinstance(n, int | float) and n > 0 for n in numbers):
                raise WeftError(f"{name}={getattr(self, name)!r} must be positive numbers.")

    @property
    def levels(self) -> tuple[tuple[float, ...], ...]:
        """The sizes of the anchors at each level."""
        return tuple(tuple(size) if isinstance(size, list | tuple) else (size,) for size in self.anchor_sizes)


def make_detector(
    backbone: nn.Module, head: str, classes: int, *, test: TestConfig | None = None, **head_args: Any
) -> GeneralizedRCNN:
    """torchvision's detector over a timm model; `head_args` are those of `RCNNArgs`.

    In training `detector(pictures, targets)` gives a dictionary of losses. In evaluation `detector(pictures)` gives
    {"boxes" (n, 4), "labels" (n,), "scores" (n,), "masks" (n, 1, 28, 28)} for each picture, a mask being
    probabilities inside its box. Pictures are a list of normalised (C, h, w) of any size; labels begin at 1.
    """
    check_choice("model.head", head, DETECTORS)
    check_args(head, head_args, [item.name for item in fields(RCNNArgs)])
    args, features = RCNNArgs(**head_args), Features(backbone)
    with torch.device(next(features.parameters()).device):
        return _built(features, head, classes, args, test or TestConfig())


def _built(features: Features, head: str, classes: int, args: RCNNArgs, test: TestConfig) -> GeneralizedRCNN:
    width, norm = args.channels, NORMS[args.norm]
    proposals = _proposals(args)
    box_head, box_predictor = _box_head(args), FastRCNNPredictor(args.box_width, classes + 1)
    pyramid = FeaturePyramid(features, width, norm)
    masks: dict[str, Any] = {}
    if head == "mask-rcnn":
        masks = dict(
            mask_roi_pool=region_pool(14, args.roi_sampling, args.roi_aligned),
            mask_head=MaskRCNNHeads(width, [width] * 4, 1, norm_layer=norm),
            mask_predictor=MaskRCNNPredictor(width, width, classes + 1),
        )
    regions = Regions(
        region_pool(7, args.roi_sampling, args.roi_aligned),
        box_head,
        box_predictor,
        fg_iou_thresh=0.5,
        bg_iou_thresh=0.5,
        batch_size_per_image=args.roi_samples,
        positive_fraction=0.25,
        bbox_reg_weights=None,
        score_thresh=test.score,
        nms_thresh=test.nms,
        detections_per_img=test.detections,
        box_loss=args.box_loss,
        low_quality_matches=args.low_quality_matches,
        **masks,
    )
    for part in (proposals.head, box_predictor, masks.get("mask_predictor")):
        if part is not None:
            part.register_forward_hook(_in_float32)
    return GeneralizedRCNN(pyramid, proposals, regions, AsGiven())


def _proposals(args: RCNNArgs) -> Proposals:
    anchors = AnchorGenerator(args.levels, (tuple(args.anchor_ratios),) * LEVELS)
    depth = 1 if args.norm == "none" else 2
    return Proposals(
        anchors,
        RPNHead(args.channels, anchors.num_anchors_per_location()[0], conv_depth=depth),
        fg_iou_thresh=0.7,
        bg_iou_thresh=0.3,
        batch_size_per_image=256,
        positive_fraction=0.5,
        pre_nms_top_n={"training": 2 * args.proposals, "testing": args.proposals},
        post_nms_top_n={"training": args.proposals, "testing": args.proposals},
        nms_thresh=0.7,
        box_loss=args.box_loss,
    )


def _box_head(args: RCNNArgs) -> nn.Module:
    norm = NORMS[args.norm]
    if norm is None:
        return TwoMLPHead(args.channels * 7 * 7, args.box_width)
    return FastRCNNConvFCHead((args.channels, 7, 7), [args.channels] * 4, [args.box_width], norm_layer=norm)


def _in_float32(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    """Boxes are decoded in the precision of the outputs, and bfloat16 knows 800 and 804 but nothing in between."""
    if isinstance(outputs, Tensor):
        return outputs.float()
    return type(outputs)(_in_float32(module, inputs, output) for output in outputs)


class FeaturePyramid(nn.Module):
    """The backbone's features as maps of one width: {"0" to "3": strides 4 to 32, "pool": 64}."""

    def __init__(self, body: Features, channels: int, norm: Any = None) -> None:
        super().__init__()
        self.body, self.out_channels = body, channels
        self.fpn = FeaturePyramidNetwork(body.channels, channels, extra_blocks=LastLevelMaxPool(), norm_layer=norm)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(level), maps) for level, maps in enumerate(self.body(x))))


class AsGiven(GeneralizedRCNNTransform):
    """Pads pictures to one size, a multiple of 32: they come resized and normalised, and so do targets and answers.

    Masks stay 28 x 28, so that 100 of them do not take 100 times the picture's memory on the device.
    """

    def __init__(self) -> None:
        super().__init__(min_size=0, max_size=0, image_mean=[], image_std=[])

    def normalize(self, image: Tensor) -> Tensor:
        return image

    def resize(self, image: Tensor, target: Any = None) -> Any:
        return image, target

    def postprocess(self, result: Any, image_shapes: Any, original_image_sizes: Any) -> Any:
        return result


def choose_anchors(quantiles: Mapping[Any, float]) -> list[int]:
    """The size of the anchors at each level, from quantiles of the objects' sizes (root of the area) in training.

    The first is the power of two at or below the smallest quantile, from 4 to 32; the others double or, where 16
    times the first does not reach the largest quantile, grow as fast as is needed for that.
    """
    low, high = min(quantiles.values()), max(quantiles.values())
    first = 2 ** math.floor(math.log2(max(low, SMALLEST_ANCHOR)))
    first = min(first, LARGEST_FIRST_ANCHOR)
    growth = max(2.0, (high / first) ** (1 / (LEVELS - 1)))
    return [round(first * growth**level) for level in range(LEVELS)]
