"""A Weft model as the backbone of torchvision's Mask R-CNN, with a feature pyramid between; trains on cell nuclei.

    python examples/detection_torchvision.py [--model cetnet_nano] [--steps 1]

A step on four pictures takes a few seconds on two CPU cores.
"""

import argparse

import numpy as np
import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign, masks_to_boxes
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

import weft  # noqa: F401  registers the models
from weft.data.demo import nuclei


class Backbone(nn.Module):
    """A Weft model with a `stem_stride` and a feature pyramid: what torchvision calls a backbone with FPN."""

    def __init__(self, name: str, out_channels: int = 128):
        super().__init__()
        self.body = timm.create_model(name, features_only=True, stem_stride=4)
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels, LastLevelMaxPool())
        self.out_channels = out_channels  # torchvision asks for it

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn({str(i): level for i, level in enumerate(self.body(x))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cetnet_nano")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--size", type=int, default=128, help="side of the pictures")
    args = parser.parse_args()
    torch.manual_seed(0)

    pictures, targets = load(args.size)
    model = build(args.model, args.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.05)
    model.train()
    for step in range(1, args.steps + 1):
        batch = torch.randperm(len(pictures))[:4].tolist()
        losses = model([pictures[i] for i in batch], [targets[i] for i in batch])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        parts = "  ".join(f"{name.removeprefix('loss_')} {value.item():.3f}" for name, value in losses.items())
        print(f"step {step:3d}  loss {loss.item():.3f}  {parts}")

    model.eval()
    with torch.inference_mode():
        (found,) = model(pictures[:1])
    print(f"{len(found['boxes'])} boxes found in the first picture, {len(targets[0]['boxes'])} nuclei are there")


def build(name: str, size: int) -> MaskRCNN:
    backbone = Backbone(name)
    levels = len(backbone.body.feature_info.channels())
    sides = [(8 * 2**i,) for i in range(levels + 1)]  # nuclei are small; the pyramid adds one level on top
    return MaskRCNN(
        backbone,
        num_classes=2,  # background and nucleus
        rpn_post_nms_top_n_train=200,  # small numbers, for a CPU; leave these two out on a GPU
        box_batch_size_per_image=32,
        min_size=size,
        max_size=size,
        rpn_anchor_generator=AnchorGenerator(sides, ((0.5, 1.0, 2.0),) * len(sides)),
        box_roi_pool=MultiScaleRoIAlign([str(i) for i in range(levels)], output_size=7, sampling_ratio=2),
        mask_roi_pool=MultiScaleRoIAlign([str(i) for i in range(levels)], output_size=14, sampling_ratio=2),
    )


def load(size: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Upper left corners of 16 pictures from 0 to 1, and for each its boxes, labels and masks."""
    pictures, targets = [], []
    for grey, ids in zip(*(array[:16, :size, :size] for array in nuclei("train")), strict=True):
        ids = torch.from_numpy(ids.copy())
        masks = ids == ids.unique()[1:].view(-1, 1, 1)  # (nuclei, size, size); 0 is the background
        boxes = masks_to_boxes(masks)
        boxes[:, 2:] += 1  # the far edge of the last pixel
        picture = torch.from_numpy(grey.astype(np.float32) / max(int(grey.max()), 1))
        pictures.append(picture.expand(3, -1, -1))
        targets.append(dict(boxes=boxes, labels=torch.ones(len(boxes), dtype=torch.int64), masks=masks.byte()))
    return pictures, targets


if __name__ == "__main__":
    main()
