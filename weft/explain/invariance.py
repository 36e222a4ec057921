"""Whether answers stay when pictures are scaled or shifted: the invariances that convolutions are to bring along."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import WeftError, check_positive, check_ratio

SCALES = (0.5, 0.75, 1.25, 1.5)
SHIFTS = (1, 2, 4, 8)
DIRECTIONS = ((0, 1), (0, -1), (1, 0), (-1, 0))


@dataclass(frozen=True)
class Robustness:
    """The effect of a change on the answers to `n` pictures."""

    kind: str  # "scale" or "shift"
    change: float  # the factor; or pixels, and the answers to shifts to all four sides
    agreement: float  # part of the answers that stay
    accuracy: float | None  # of the answers after the change; None without labels
    accuracy_before: float | None
    n: int


@torch.no_grad()
def robustness(
    answer: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor | None]],
    scales: Sequence[float] = SCALES,
    shifts: Sequence[int] = SHIFTS,
) -> list[Robustness]:
    """How far a classifier's answers depend on how large things are and where they are.

    Args:
        answer: a model in evaluation mode, or else what gives (B, K) logits for (B, C, H, W) pictures.
        batches: pictures, and their labels or None.
        scales, shifts: factors and pixels to try.
    """
    if isinstance(answer, nn.Module) and answer.training:
        raise WeftError("robustness takes a model in evaluation mode; call model.eval() first.")
    for factor in scales:
        check_ratio(scales=factor)
    for pixels in shifts:
        check_positive(shifts=pixels)
    changes = [("scale", factor) for factor in scales] + [("shift", pixels) for pixels in shifts]
    stayed, right, tried = Counter(), Counter(), Counter()
    n = right_before = 0
    labelled = True
    for pictures, labels in batches:
        before = answer(pictures).argmax(dim=1)
        n, labelled = n + len(pictures), labelled and labels is not None
        right_before += 0 if labels is None else int((before == labels).sum())
        for change in changes:
            for changed in changed_pictures(pictures, *change):
                after = answer(changed).argmax(dim=1)
                tried[change] += len(pictures)
                stayed[change] += int((after == before).sum())
                right[change] += 0 if labels is None else int((after == labels).sum())
    if n == 0:
        raise WeftError("robustness was given no pictures.")
    return [
        Robustness(
            kind=change[0],
            change=float(change[1]),
            agreement=stayed[change] / tried[change],
            accuracy=right[change] / tried[change] if labelled else None,
            accuracy_before=right_before / n if labelled else None,
            n=n,
        )
        for change in changes
    ]


def changed_pictures(pictures: Tensor, kind: str, change: float) -> Iterator[Tensor]:
    """Scaled once, or shifted four times, to every side."""
    if kind == "scale":
        yield scaled(pictures, change)
    else:
        for down, right in DIRECTIONS:
            yield shifted(pictures, int(change) * down, int(change) * right)


def scaled(pictures: Tensor, factor: float) -> Tensor:
    """Things `factor` times as large around the middle of (B, C, H, W) pictures, which keep their size.

    What lies beyond the border is mirrored at it.
    """
    _, _, height, width = pictures.shape
    size = max(round(height * factor), 1), max(round(width * factor), 1)
    resized = F.interpolate(pictures, size=size, mode="bilinear", antialias=True) if factor != 1 else pictures
    return _cut(resized, (size[0] - height) // 2, (size[1] - width) // 2, height, width)


def shifted(pictures: Tensor, down: int, right: int) -> Tensor:
    """(B, C, H, W) pictures moved by whole pixels; what lies beyond the border is mirrored at it."""
    return _cut(pictures, -down, -right, pictures.shape[2], pictures.shape[3])


def _cut(pictures: Tensor, top: int, left: int, height: int, width: int) -> Tensor:
    """A part of pictures, or more than that: they go on mirrored beyond their borders."""
    rows = _mirrored(torch.arange(top, top + height, device=pictures.device), pictures.shape[2])
    columns = _mirrored(torch.arange(left, left + width, device=pictures.device), pictures.shape[3])
    return pictures[:, :, rows[:, None], columns]


def _mirrored(index: Tensor, side: int) -> Tensor:
    """Places at 0 to side - 1 that mirrors at the first and the last one show at `index`."""
    if side == 1:
        return torch.zeros_like(index)
    back = index % (2 * side - 2)
    return torch.minimum(back, 2 * side - 2 - back)
