"""Metrics of segmentation: those of the data set.

Pixels of all pictures are counted in one confusion matrix, in whole numbers, so no digit depends on how pictures were
grouped into batches or shared among processes.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from weft.data.loader import Batch
from weft.data.masks.values import IGNORE
from weft.tasks.metrics import mean_over
from weft.tasks.segment.losses import resized

LOSS_UNIT = 2.0**-16  # of a picture's summed loss
LEAST_PROBABILITY = 2.0**-126  # the smallest that float32 holds precisely; what is not even a number counts as this


class SegmentMeter:
    """Adds up the validation of one epoch: one confusion matrix over the pixels of all pictures, and the loss.

    Answers are brought to the size of the mask, bilinearly, before the class is chosen. `update` never waits for the
    device. With `keep`, `pictures` also has the numbers of each picture, for `weft.tasks.segment.evaluate`. Pixels of
    classes that are not `measured`, (K,) bool, are ignored as if they had no label.
    """

    def __init__(
        self,
        num_classes: int,
        device: torch.device | str = "cpu",
        keep: bool = False,
        measured: np.ndarray | None = None,
    ):
        self.num_classes, self.keep = num_classes, keep
        self.measured = np.ones(num_classes, bool) if measured is None else measured
        counts = np.ones(256, bool)
        counts[:num_classes], counts[IGNORE] = self.measured, False
        self.counts = torch.from_numpy(counts).to(device)  # by value of a mask
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64, device=device)  # truth, said
        self.units = torch.zeros(1, dtype=torch.int64, device=device)  # summed cross-entropy
        self.pictures: list[Tensor] = []  # (3, K) each: pixels that are of a class, that were given it, and both

    def update(self, answers: Sequence[Tensor], batch: Batch) -> None:
        """Adds (K, h, w) probabilities, and the (H, W) masks of the batch."""
        for answer, mask in zip(answers, batch.labels, strict=True):
            self.add(answer, mask.to(self.units.device, non_blocking=True))

    def add(self, answer: Tensor, mask: Tensor) -> None:
        """One picture: (K, h, w) and (H, W)."""
        answer, truth = resized(answer[None].float(), mask.shape)[0], mask.long()
        valid = self.counts[truth]
        own = answer.gather(0, (truth * valid)[None])[0]  # the probability of the right class
        losses = -own.nan_to_num(nan=0).clamp(min=LEAST_PROBABILITY).double().log() * valid
        self.units += (losses.sum() / LOSS_UNIT).round().long()
        confusion = self._confusion(truth, answer.max(dim=0).indices, valid)  # argmax takes four times as long on CPUs
        self.confusion += confusion
        if self.keep:
            self.pictures.append(torch.stack([confusion.sum(dim=1), confusion.sum(dim=0), confusion.diagonal()]))

    def _confusion(self, truth: Tensor, said: Tensor, valid: Tensor) -> Tensor:
        """(K, K) of one picture. `bincount` would wait for the device, to know the largest value."""
        size = self.num_classes**2
        cells = torch.where(valid, truth * self.num_classes + said, size).flatten()
        counts = cells.new_zeros(size + 1).scatter_add_(0, cells, torch.ones_like(cells))
        return counts[:size].view(self.num_classes, self.num_classes)

    def reduce(self, group: dist.ProcessGroup | None = None) -> None:
        """Adds up over the processes of `group` (all of them for None); each process calls it once, at the end."""
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(self.confusion, group=group)
            dist.all_reduce(self.units, group=group)

    def result(self) -> dict[str, float]:
        return segment_metrics(self.confusion.cpu().numpy(), int(self.units), self.measured)


def segment_metrics(confusion: np.ndarray, units: int, measured: np.ndarray) -> dict[str, float]:
    """`{"loss", "miou", "pixel_accuracy", "mean_accuracy"}` of a (K, K) confusion and the summed loss in units.

    `loss` is the mean cross-entropy of the labelled pixels. `miou` is the mean over the classes that occur in truth or
    answers, and are measured, `mean_accuracy` over those that occur in truth; a mean over nothing is 0.
    """
    truth, hits = confusion.sum(axis=1), confusion.diagonal()
    iou, defined = ious(truth, confusion.sum(axis=0), hits)
    pixels = max(int(truth.sum()), 1)
    return {
        "loss": units * LOSS_UNIT / pixels,
        "miou": mean_over(iou, defined & measured),
        "pixel_accuracy": int(hits.sum()) / pixels,
        "mean_accuracy": mean_over(hits / np.maximum(truth, 1), truth > 0),
    }


def ious(truth: np.ndarray, said: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Intersection over union of each class from pixel counts, and where it is defined."""
    union = truth + said - hits
    return hits / np.maximum(union, 1), union > 0
