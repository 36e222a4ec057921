"""Distillation: a student learns from a teacher's answers as well as from the labels.

Soft: the student's probabilities should be the teacher's, both softened by a temperature (Hinton et al.; VT with
weights of 0.8 and 0.2). Hard: the teacher's decision is a label (DeiT, half and half). The weights are the caller's.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config import LossConfig
from weft.data.preprocessing import Preprocessing
from weft.errors import WeftError


class Teacher(Protocol):
    """A classifier with its own preprocessing, such as a `Predictor`."""

    model: nn.Module
    classes: list[str]
    preprocessing: Preprocessing

    @property
    def multilabel(self) -> bool: ...


class Distillation:
    """`distillation(pictures, logits, denominator)`: a sum over the pictures, divided by `denominator`, as any loss.

    The teacher sees the very batch that the student sees, mixed and erased, but with its own mean, deviation and size.
    """

    def __init__(
        self,
        config: LossConfig,
        teacher: Teacher,
        *,
        classes: Sequence[str],
        preprocessing: Preprocessing,
        device: torch.device,
    ):
        check_distillation(config, teacher.multilabel)
        self.hard, self.temperature = config.distill == "hard", config.temperature
        _check_classes(config.teacher, teacher.classes, classes)
        own = teacher.preprocessing
        if own.channels != preprocessing.channels:
            raise WeftError(
                f"loss.teacher={config.teacher} takes {own.channels} channels, the pictures have"
                f" {preprocessing.channels}; choose another teacher, or set data.channels."
            )
        self.teacher = teacher.model.requires_grad_(False)
        self.size = own.size
        # (p - mean) / std of the student to that of the teacher, as (C, 1, 1) factor and shift
        mean, std, own_mean, own_std = (
            torch.tensor(values, dtype=torch.float64, device=device).view(-1, 1, 1)
            for values in (preprocessing.mean, preprocessing.std, own.mean, own.std)
        )
        self.factor, self.shift = (std / own_std).float(), ((mean - own_mean) / own_std).float()

    def __call__(self, pictures: Tensor, logits: Tensor, denominator: float) -> Tensor:
        answer, said = self._ask(pictures, logits.dtype), logits.float()
        if self.hard:
            return F.cross_entropy(said, answer.argmax(dim=1), reduction="sum") / denominator
        t = self.temperature
        teacher, student = (answer / t).log_softmax(dim=1), (said / t).log_softmax(dim=1)
        return F.kl_div(student, teacher, reduction="sum", log_target=True) * t * t / denominator

    @torch.no_grad()
    def _ask(self, pictures: Tensor, dtype: torch.dtype) -> Tensor:
        """(B, classes) logits of the teacher, computed in the student's precision."""
        x = pictures.float() * self.factor + self.shift
        if x.shape[2:] != self.size:
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True)
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            return self.teacher(x).float()


def check_distillation(config: LossConfig, multilabel: bool) -> None:
    """Raises for a temperature that is none, and where the data or the teacher have several labels per picture."""
    if config.temperature <= 0:
        raise WeftError(f"loss.temperature={config.temperature:g} must be a positive number.")
    if multilabel:
        raise WeftError(f"loss.teacher={config.teacher}: distillation needs one label per picture.")


def _check_classes(name: str, known: Sequence[str], classes: Sequence[str]) -> None:
    if len(known) != len(classes):
        raise WeftError(f"loss.teacher={name} knows {len(known)} classes, the data have {len(classes)}.")
    numbered = list(known) == [str(i) for i in range(len(known))]  # without names their number has to do
    odd = [(a, b) for a, b in zip(known, classes, strict=True) if a != b]
    if odd and not numbered:
        raise WeftError(
            f"loss.teacher={name} has other classes than the data: {len(odd)} differ, such as {odd[0][0]!r} where the"
            f" data have {odd[0][1]!r}."
        )
