"""Losses of classification, balanced against rare classes where asked."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.config import Balance, LossConfig
from weft.errors import WeftError

Loss = Callable[[Tensor, Tensor, float], Tensor]


MOST_POSITIVE_WEIGHT = 20.0


def make_loss(
    config: LossConfig, *, multilabel: bool, class_counts: np.ndarray, balance: Balance, pictures: int = 0
) -> Loss:
    """The function `loss(logits, targets, denominator)`: a SUM over the pictures, divided by `denominator`.

    With the number of pictures in the whole batch as denominator, the losses of its micro-batches add up to the loss
    of the batch, and so do their gradients, however unequal the micro-batches are.

    `targets` are (B,) classes or (B, classes) probabilities. Label smoothing is already in them: it belongs to
    `BatchAugmentation`, so that it is applied once.

    Args:
        config: the kind of loss.
        multilabel: targets are (B, classes), each between 0 and 1 for itself.
        class_counts: (classes,) training pictures of each class.
        balance: "loss" weighs rare classes up, "logit-adjust" shifts the logits; the others change nothing here.
        pictures: how many training pictures there are; only multi-label counts do not tell.
    """
    binary = multilabel or config.kind == "bce"
    if balance == "logit-adjust" and binary:
        raise WeftError("data.balance=logit-adjust needs loss.kind=ce and one label per picture; take loss or sampler.")
    counts = torch.as_tensor(class_counts, dtype=torch.float64)
    if balance == "logit-adjust":  # Menon et al., "Long-tail learning via logit adjustment": predictions do not see it
        return _Loss(binary, shift=(counts.clamp(min=1) / counts.sum()).log().float())
    if balance == "loss":
        if multilabel:
            return _Loss(binary, positive=_positive_weights(counts, pictures))
        return _Loss(binary, weights=_class_weights(counts))
    return _Loss(binary)


def _class_weights(counts: Tensor) -> Tensor:
    """Inverse frequency, 1 on average over the pictures; a class without pictures gets 1."""
    present = (counts > 0).sum()
    return torch.where(counts > 0, counts.sum() / (present * counts.clamp(min=1)), 1.0).float()


def _positive_weights(counts: Tensor, pictures: int) -> Tensor:
    """Negatives per positive, so that both weigh the same, within limits: one positive must not drown a batch."""
    if pictures < counts.max():
        raise WeftError(f"{int(counts.max())} pictures of one class among {pictures}: give make_loss their number.")
    ratio = (pictures - counts) / counts.clamp(min=1)
    return ratio.clamp(1 / MOST_POSITIVE_WEIGHT, MOST_POSITIVE_WEIGHT).float()


class _Loss:
    """Cross-entropy or, where `binary`, one yes or no for each class, a picture's loss being the mean over them.

    The (classes,) tensors move to the logits' device at the first batch, and stay there.
    """

    def __init__(
        self, binary: bool, shift: Tensor | None = None, positive: Tensor | None = None, weights: Tensor | None = None
    ):
        self.binary = binary
        self.tensors = (shift, positive, weights)

    def __call__(self, logits: Tensor, targets: Tensor, denominator: float) -> Tensor:
        shift, positive, weights = self.tensors = tuple(t if t is None else t.to(logits.device) for t in self.tensors)
        logits = logits.float() if shift is None else logits.float() + shift
        if self.binary:
            soft = targets if targets.ndim == 2 else F.one_hot(targets, logits.shape[1])
            each = F.binary_cross_entropy_with_logits(logits, soft.float(), pos_weight=positive, reduction="none")
            losses = each.mean(dim=1)  # (B,)
        else:
            losses = F.cross_entropy(logits, targets, reduction="none")  # (B,)
        if weights is not None:  # a picture of mixed classes weighs the mean of theirs, and its target stays the same
            losses = losses * (weights[targets] if targets.ndim == 1 else targets.float() @ weights)
        return losses.sum() / denominator
