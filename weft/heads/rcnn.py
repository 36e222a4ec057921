"""Faster R-CNN and Mask R-CNN: torchvision's, over the features of any backbone.

| part | here | as in |
|---|---|---|
| pyramid | 1x1 and 3x3 convolutions of `channels` at strides 4 to 32, a pooled fifth level | Lin et al. 2017 |
| box head | two layers of `box_width`; with a norm four convolutions and one layer | torchvision, versions 1 and 2 |
| mask head | four convolutions, up by 2, one mask of 28 x 28 for each class | He et al. 2017 |
| proposals | 1000 kept of 2000 (training) or 1000 (test) per level | mmdetection, which the papers used |

Deviation from mmdetection: background has its own box and mask outputs, as everywhere in torchvision, some thousand
weights that are not trained.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.mask_rcnn import MaskRCNN, MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from weft.config import TestConfig
from weft.errors import WeftError, check_choice, check_positive
from weft.heads import DETECTORS, check_args
from weft.heads.features import Features
from weft.heads.fpn import group_norm

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

    def __post_init__(self) -> None:
        check_positive(
            channels=self.channels, box_width=self.box_width, proposals=self.proposals, roi_samples=self.roi_samples
        )
        check_choice("norm", self.norm, tuple(NORMS))
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
    anchors = AnchorGenerator(args.levels, (tuple(args.anchor_ratios),) * LEVELS)
    settings: dict[str, Any] = dict(
        rpn_anchor_generator=anchors,
        rpn_head=RPNHead(width, anchors.num_anchors_per_location()[0], conv_depth=1 if norm is None else 2),
        rpn_pre_nms_top_n_train=2 * args.proposals,
        rpn_pre_nms_top_n_test=args.proposals,
        rpn_post_nms_top_n_train=args.proposals,
        rpn_post_nms_top_n_test=args.proposals,
        box_head=_box_head(args),
        box_predictor=FastRCNNPredictor(args.box_width, classes + 1),
        box_score_thresh=test.score,
        box_nms_thresh=test.nms,
        box_detections_per_img=test.detections,
        box_batch_size_per_image=args.roi_samples,
    )
    pyramid = FeaturePyramid(features, width, norm)
    if head == "faster-rcnn":
        detector: GeneralizedRCNN = FasterRCNN(pyramid, **settings)
    else:
        mask_head = MaskRCNNHeads(width, [width] * 4, 1, norm_layer=norm)
        detector = MaskRCNN(
            pyramid, mask_head=mask_head, mask_predictor=MaskRCNNPredictor(width, width, classes + 1), **settings
        )
    detector.transform = AsGiven()
    heads: Any = detector.rpn.head, detector.roi_heads.box_predictor, detector.roi_heads.mask_predictor
    for part in heads:
        if part is not None:
            part.register_forward_hook(_in_float32)
    return detector


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
