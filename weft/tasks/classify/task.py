"""Classification: what happens to a batch, the loss that training minimises, the numbers that validation reports.

A metric is the same to the last digit however the pictures were grouped into batches or shared among processes: what
is added up are whole numbers only, the loss included, which is counted in units of 2**-24.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config import Balance, Config, LossConfig
from weft.data.augment.device_policy import DevicePolicy
from weft.data.augment.mix import BatchAugmentation
from weft.data.augment.picture import Augmentation
from weft.data.loader import Batch
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError

Loss = Callable[[Tensor, Tensor, float], Tensor]

LOSS_UNIT = 2.0**-24
WORST_LOSS = 10_000.0  # of one picture: what an infinite or undefined loss counts, so that a mean exists
MOST_POSITIVE_WEIGHT = 20.0
EVAL_BATCH = 128  # of validation, `weft eval` and `weft predict` alike, so that their digits agree


class Classify:
    """One label for a picture, or several: a `Task`."""

    name, counts_hits = "classify", True
    can_replay = True
    eval_batch = EVAL_BATCH

    def __init__(
        self,
        config: Config,
        *,
        classes: list[str],
        multilabel: bool,
        preprocessing: Preprocessing,
        device: torch.device,
        dtype: torch.dtype,
        loss: Loss,
        distillation: Callable[[Tensor, Tensor, float], Tensor] | None = None,
    ):
        self.config, self.classes, self.multilabel = config, classes, multilabel
        self.preprocessing, self.device, self.dtype = preprocessing, device, dtype
        self.score = "map" if multilabel else "top1"
        self.augmentation = Augmentation(config.augment, preprocessing)
        on_device = config.augment.policy and config.augment.on_device == "yes"
        self.policy = DevicePolicy(config.augment, preprocessing) if on_device else None
        self.mix = BatchAugmentation(config.augment, config.loss.smoothing, len(classes), multilabel)
        self.label_loss, self.distillation = loss, distillation

    def augmented(self, batch: Batch, seed: int) -> Tensor:
        """(B, C, h, w) pictures on the device, after the policy where that is done there."""
        pictures = batch.pictures.to(self.device, non_blocking=True)
        return self.policy(pictures, seed) if self.policy else pictures

    def prepare(self, batch: Batch, seed: int) -> tuple[Tensor, Tensor]:
        """Pictures and targets on the device, normalised and mixed: the whole batch, before it is cut into parts."""
        pictures = self.preprocessing.normalise(self.augmented(batch, seed))
        pictures, targets = self.mix(pictures, batch.labels.to(self.device, non_blocking=True), seed)
        if self.config.run.channels_last:
            pictures = pictures.contiguous(memory_format=torch.channels_last)
        return pictures, targets

    def loss(
        self, forward: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, denominator: float
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = forward(x)
        loss = self.label_loss(logits, y, denominator)
        if self.distillation:
            weight = self.config.loss.distill_weight
            loss = (1 - weight) * loss + weight * self.distillation(x, logits, denominator)
        return loss, count_hits(logits.detach(), y)

    def infer(self, model: nn.Module, pictures: Tensor) -> Tensor:
        """(B, classes) logits."""
        x = self.preprocessing.normalise(pictures.to(self.device, non_blocking=True))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return model(x)

    def meter(self) -> "Meter":
        return Meter(len(self.classes), self.multilabel, self.device)

    def dummy_batch(self, count: int) -> Batch:
        """A batch of grey pictures, of the right size and type."""
        shape = (count, self.preprocessing.channels, *self.preprocessing.size)
        eight_bit = self.preprocessing.depth == 8
        pictures = torch.full(shape, 127 if eight_bit else 0.5, dtype=torch.uint8 if eight_bit else torch.float32)
        labels = torch.zeros(count, len(self.classes)) if self.multilabel else torch.zeros(count, dtype=torch.int64)
        return Batch(pictures, labels, torch.zeros(count, dtype=torch.int64), [])


# Loss -------------------------------------------------------------------------------------------------------------


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


def balance_weights(labels: np.ndarray, multilabel: bool) -> np.ndarray:
    """(N,) how often to draw each picture so that the classes come equally often; 1 on average.

    A picture of several classes counts as one of its rarest; those of no class are a class of their own.
    """
    if multilabel:
        labels = np.concatenate([labels, ~labels.any(axis=1, keepdims=True)], axis=1).astype(bool)
        frequency = np.where(labels, labels.sum(axis=0), len(labels)).min(axis=1)
    else:
        frequency = np.bincount(labels)[labels]
    weights = 1 / frequency
    return weights / weights.mean()


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


# Metrics ----------------------------------------------------------------------------------------------------------


def picture_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) float64 losses: cross-entropy with (B,) labels; mean binary cross-entropy with (B, classes) labels."""
    if labels.ndim == 2:
        losses = F.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="none").mean(dim=1)
    else:
        losses = F.cross_entropy(logits.double(), labels, reduction="none")
    return losses.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS).clamp(max=WORST_LOSS)


def ranks(logits: Tensor, labels: Tensor) -> Tensor:
    """(B,) how many classes come before the label; 0 is a hit. Of equal logits the lower class comes first.

    A row with a NaN is wrong at any rank.
    """
    own = logits.gather(1, labels[:, None])  # (B, 1)
    number = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (number < labels[:, None]))
    return before.sum(dim=1) + logits.isnan().any(dim=1) * logits.shape[1]


def count_hits(logits: Tensor, targets: Tensor) -> Tensor:
    """How many pictures get their (strongest) class; with several labels, how many get one of them first."""
    first = logits.argmax(1)
    if targets.ndim == 1:
        return (first == targets).sum().float()
    return (targets.gather(1, first[:, None]) == targets.amax(1, keepdim=True)).sum().float()


class Meter:
    """Adds up the validation of one epoch: loss and top-1 and top-5, or, where multi-label, loss, mAP and F1.

    `add` never waits for the device. Single-label state is four whole numbers, for any number of classes; mAP is
    no sum, so multi-label scores are kept, in the memory of the host. `Evaluation.metrics()` gives the same digits.
    """

    def __init__(self, num_classes: int, multilabel: bool = False, device: torch.device | str = "cpu"):
        self.num_classes, self.multilabel = num_classes, multilabel
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # pictures, loss in units, top-1, top-5
        self.logits: list[Tensor] = []  # multi-label: (B, classes) each
        self.labels: list[Tensor] = []

    def update(self, answers: Tensor, batch: Batch) -> None:
        self.add(answers, batch.labels.to(self.totals.device, non_blocking=True))

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """(B, classes) logits, and (B,) classes or (B, classes) zeros and ones."""
        logits = logits.detach().float()
        units = (picture_losses(logits, labels) / LOSS_UNIT).round().long().sum()
        pictures = torch.full_like(units, len(labels))
        if self.multilabel:
            self.totals += torch.stack([pictures, units, units * 0, units * 0])
            self.logits.append(logits.to("cpu", non_blocking=True))
            self.labels.append((labels > 0.5).to("cpu", non_blocking=True))
        else:
            rank = ranks(logits, labels)
            self.totals += torch.stack([pictures, units, (rank < 1).sum(), (rank < 5).sum()])

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Adds up over the processes of `group` (all of them for None); each process calls it once, at the end."""
        if not dist.is_initialized() or dist.get_world_size(group) == 1:
            return
        if self.multilabel:
            scores, truth = self.scores()
            self.logits = _gather(scores, self.totals.device, group)
            self.labels = [part.bool() for part in _gather(truth.to(torch.uint8), self.totals.device, group)]
        dist.all_reduce(self.totals, group=group)

    def scores(self) -> tuple[Tensor, Tensor]:
        """Multi-label: (N, classes) logits and (N, classes) bool labels, on the host."""
        if self.totals.is_cuda:
            torch.cuda.synchronize(self.totals.device)  # the copies may still be on their way
        empty = torch.zeros(0, self.num_classes)
        return torch.cat([empty, *self.logits]), torch.cat([empty.bool(), *self.labels])

    def result(self) -> dict[str, float]:
        """`{"loss", "top1"}` and, from five classes on, `"top5"`; or `{"loss", "map", "f1"}`, F1 over all decisions."""
        n, units, top1, top5 = self.totals.tolist()
        loss = {"loss": units * LOSS_UNIT / max(n, 1)}
        if self.multilabel:
            scores, truth = (part.numpy() for part in self.scores())
            precision = average_precisions(scores, truth)
            return {**loss, "map": mean_over(precision, truth.sum(axis=0) > 0), "f1": micro_f1(scores > 0, truth)}
        hits = {"top1": top1 / max(n, 1), "top5": top5 / max(n, 1)}
        return {**loss, **(hits if self.num_classes >= 5 else {"top1": hits["top1"]})}


def average_precisions(scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """(classes,) area under the precision-recall steps of (N, classes) scores; 0 for a class without pictures.

    Pictures of equal score count together, so their order does not matter.
    """
    return np.array([_average_precision(s, t) for s, t in zip(np.nan_to_num(scores).T, truth.T, strict=True)])


def _average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)[: len(order)]  # of the pictures of equal score
    hits = np.cumsum(truth[order])[last]
    if not len(hits) or not hits[-1]:
        return 0.0
    precision = hits / (np.flatnonzero(last) + 1)
    return float((np.diff(hits, prepend=0) * precision).sum() / hits[-1])


def micro_f1(predicted: np.ndarray, truth: np.ndarray) -> float:
    """F1 over all decisions of all classes together."""
    return float(2 * (predicted & truth).sum() / max(predicted.sum() + truth.sum(), 1))


def mean_over(values: np.ndarray, which: np.ndarray) -> float:
    """Mean of the values at `which`; 0 where there is none."""
    return float(values[which].mean()) if which.any() else 0.0


def _gather(rows: Tensor, device: torch.device, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The rows of every process, in the order of the processes, which may have different numbers of them."""
    world = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)], device=device), group=group)
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype, device=device)
    padded[: len(rows)] = rows.to(device)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(count)].cpu() for part, count in zip(parts, counts, strict=True)]
