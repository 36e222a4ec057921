"""Losses of segmentation: cross-entropy of pixels, of the hardest ones, focal, and dice.

A picture's loss is the sum over its pixels divided by height times width. Pixels to be ignored add nothing, but count
in the divisor: so every labelled pixel weighs the same in every picture, and micro-batches add up.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config import Balance, LossConfig
from weft.data.masks.values import IGNORE
from weft.errors import WeftError

FLAT = 1e-6  # below this a pixel counts as no less wrong in the focal loss: the slope of a power may be infinite at 0

PixelLoss = Callable[[Tensor, Tensor, float], Tensor]
PictureLoss = Callable[[Tensor, Tensor], Tensor]  # (B, K, h, w) logits and (B, h, w) int64 masks to (B,) losses


def make_pixel_loss(
    config: LossConfig, *, classes: int, pixel_counts: Sequence[int] | None, balance: Balance
) -> PixelLoss:
    """The function `loss(logits, masks, denominator)`: a SUM over the pictures, divided by `denominator`.

    `logits` are (B, K, h, w), of the masks' size or brought to it bilinearly; `masks` are (B, h, w) with `IGNORE`.
    `ce+dice` is the sum of both. Smoothing is that of cross-entropy, alone or among others.

    Args:
        config: the kind of loss and its numbers.
        classes: K.
        pixel_counts: (K,) training pixels of each class, asked for by balance="loss".
        balance: "loss" weighs the pixels of rare classes up; dice, to which all classes are equal, takes no weights.
    """
    if balance not in ("none", "loss"):
        raise WeftError(f"data.balance={balance} is for classification; take loss, which weighs the pixels.")
    if balance == "loss" and pixel_counts is None:
        raise WeftError("data.balance=loss needs the number of pixels of each class, and nobody counted them.")
    weights = class_weights(pixel_counts, classes) if balance == "loss" and pixel_counts is not None else None
    entropy = _CrossEntropy(config.smoothing, weights)
    kinds: dict[str, list[PictureLoss]] = {
        "auto": [entropy.mean],
        "ce": [entropy.mean],
        "ohem": [partial(entropy.mean_of_hardest, config.ohem)],
        "focal": [partial(entropy.focal, config.focal_gamma)],
        "dice": [dice_losses],
        "ce+dice": [entropy.mean, dice_losses],
    }
    if config.kind not in kinds:
        raise WeftError(f"loss.kind={config.kind} is not for masks; choose one of {', '.join(kinds)}.")
    if config.smoothing and config.kind in ("focal", "dice"):
        raise WeftError(f"loss.smoothing is for cross-entropy; with loss.kind={config.kind} set it to 0.")
    parts = kinds[config.kind]

    def loss(logits: Tensor, masks: Tensor, denominator: float) -> Tensor:
        logits, masks = resized(logits, masks.shape[1:]), masks.long()
        return torch.stack([part(logits, masks) for part in parts]).sum() / denominator

    return loss


def class_weights(pixel_counts: Sequence[int], classes: int) -> Tensor:
    """(K,) 1 / log(1.02 + frequency) as in ENet, but 1 on average over the pixels, so that the loss keeps its scale.

    The rarest class weighs at most 35 times as much as the most frequent one: plain inverse frequencies, without such a
    limit, make a model see rare classes everywhere.
    """
    counts = torch.as_tensor(pixel_counts, dtype=torch.float64)
    if len(counts) != classes:
        raise WeftError(f"{len(counts)} numbers of pixels for {classes} classes.")
    frequency = counts / counts.sum().clamp(min=1)
    weights = 1 / (1.02 + frequency).log()
    average = (weights * frequency).sum()
    return weights / average if average > 0 else torch.ones_like(weights)


def resized(maps: Tensor, size: Sequence[int]) -> Tensor:
    """(B, K, *size) of (B, K, h, w), bilinearly; as they are where they have that size."""
    if tuple(maps.shape[2:]) == tuple(size):
        return maps
    return F.interpolate(maps, tuple(size), mode="bilinear", align_corners=False)


class _CrossEntropy:
    """Of each pixel, times the weight of its class; the weights move to the logits' device at the first batch."""

    def __init__(self, smoothing: float, weights: Tensor | None):
        self.smoothing = smoothing
        self.weights = None if weights is None else F.pad(weights, (0, IGNORE + 1 - len(weights)))  # (256,)

    def pixels(self, logits: Tensor, masks: Tensor) -> Tensor:
        """(B, h, w); 0 where ignored."""
        return F.cross_entropy(logits, masks, ignore_index=IGNORE, reduction="none", label_smoothing=self.smoothing)

    def weighted(self, losses: Tensor, masks: Tensor) -> Tensor:
        if self.weights is None:
            return losses
        self.weights = self.weights.to(losses)
        return losses * self.weights[masks]

    def mean(self, logits: Tensor, masks: Tensor) -> Tensor:
        return self.weighted(self.pixels(logits, masks), masks).mean(dim=(1, 2))

    def mean_of_hardest(self, part: float, logits: Tensor, masks: Tensor) -> Tensor:
        """Of each picture's labelled pixels, those `part` that have the largest losses; a mean over that part.

        Classes weigh what is counted, not what is hardest: rare classes would crowd out all others.
        """
        losses, masks = self.pixels(logits, masks).flatten(1), masks.flatten(1)
        most = math.ceil(part * losses.shape[1])
        hardest, where = losses.topk(most, dim=1)  # (B, most) each, falling
        wanted = ((masks != IGNORE).sum(dim=1).double() * part).ceil()  # (B,)
        counted = torch.arange(most, device=masks.device) < wanted[:, None]
        return (self.weighted(hardest, masks.gather(1, where)) * counted).sum(dim=1) / most

    def focal(self, gamma: float, logits: Tensor, masks: Tensor) -> Tensor:
        """Lin et al., "Focal loss for dense object detection", over classes that exclude each other."""
        losses = self.pixels(logits, masks)
        missing = -torch.expm1(-losses)  # of the probability of the right class
        return self.weighted(missing.clamp(min=FLAT) ** gamma * losses, masks).mean(dim=(1, 2))


def dice_losses(logits: Tensor, masks: Tensor) -> Tensor:
    """(B,) 1 - Dice coefficient of a picture's labelled pixels, a mean over the classes that occur in the picture.

    Others have no coefficient that could get better. A picture without labelled pixels has a loss of 0.
    """
    number = torch.arange(logits.shape[1], device=logits.device)[:, None, None]
    truth = masks[:, None] == number  # (B, K, h, w)
    said = logits.softmax(dim=1) * (masks != IGNORE)[:, None]
    pixels = truth.sum(dim=(2, 3))  # (B, K)
    common = (said * truth).sum(dim=(2, 3))
    occurs = pixels > 0
    coefficients = 2 * common / (said.sum(dim=(2, 3)) + pixels).clamp(min=1)
    return ((1 - coefficients) * occurs).sum(dim=1) / occurs.sum(dim=1).clamp(min=1)
