"""Metrics of classification.

A metric is the same to the last digit however the pictures were grouped into batches or shared among processes: what
is added up are whole numbers only, the loss included, which is counted in units of 2**-24.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.data.loader import Batch
from weft.tasks.metrics import mean_over

LOSS_UNIT = 2.0**-24
WORST_LOSS = 10_000.0  # of one picture: what an infinite or undefined loss counts, so that a mean exists


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


class ClassifyMeter:
    """Adds up the validation of one epoch: loss and top-1 and top-5, or, where multi-label, loss, mAP and F1.

    `add` never waits for the device. Single-label state is four whole numbers, for any number of classes; mAP is
    no sum, so multi-label scores are kept, in the memory of the host. `Evaluation.metrics()` gives the same digits.

    `measured`, (classes,) bool, leaves pictures of other classes out, or, where multi-label, the other classes.
    """

    def __init__(
        self,
        num_classes: int,
        multilabel: bool = False,
        device: torch.device | str = "cpu",
        measured: np.ndarray | None = None,
    ):
        self.num_classes, self.multilabel = num_classes, multilabel
        measured = np.ones(num_classes, bool) if measured is None else measured
        self.measured = None if measured.all() else torch.from_numpy(measured).to(device)  # most often all of them are
        self.columns = torch.from_numpy(np.flatnonzero(measured)).to(device)
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # pictures, loss in units, top-1, top-5
        self.logits: list[Tensor] = []  # multi-label: (B, classes) each
        self.labels: list[Tensor] = []

    def update(self, answers: Tensor, batch: Batch) -> None:
        self.add(answers, batch.labels.to(self.totals.device, non_blocking=True))

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """(B, classes) logits, and (B,) classes or (B, classes) zeros and ones."""
        logits, counts = logits.detach().float(), torch.ones(len(labels), dtype=torch.bool, device=labels.device)
        if self.measured is not None and self.multilabel:
            logits, labels = logits[:, self.columns], labels[:, self.columns]
        elif self.measured is not None:
            counts = self.measured[labels]
        units = ((picture_losses(logits, labels) / LOSS_UNIT).round().long() * counts).sum()
        pictures = counts.sum()
        if self.multilabel:
            self.totals += torch.stack([pictures, units, units * 0, units * 0])
            self.logits.append(logits.to("cpu", non_blocking=True))
            self.labels.append((labels > 0.5).to("cpu", non_blocking=True))
        else:
            rank = ranks(logits, labels)
            self.totals += torch.stack([pictures, units, ((rank < 1) & counts).sum(), ((rank < 5) & counts).sum()])

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
        empty = torch.zeros(0, len(self.columns))
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
