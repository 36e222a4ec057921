"""The interface of what is exported: a model from pictures as they are to answers as users want them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from weft.data.loader import Batch
from weft.export.preprocess import GraphPreprocessing
from weft.run.predictor import Predictor

Answers = Mapping[str, np.ndarray]  # by the names of the outputs, the first axis being the pictures


@dataclass(frozen=True)
class Gap:
    """Distance of two answers to the same pictures."""

    largest: float = 0.0  # of probabilities
    changed: int = 0  # labels, pixels or objects that are others
    answers: int = 0  # of how many
    moved: float = 0.0  # of boxes: pixels, at most

    def __add__(self, other: "Gap") -> "Gap":
        largest, moved = np.maximum((self.largest, self.moved), (other.largest, other.moved)).tolist()  # NaN stays NaN
        return Gap(largest, self.changed + other.changed, self.answers + other.answers, moved)

    @property
    def part(self) -> float:
        """The part of the answers that changed."""
        return self.changed / max(1, self.answers)


class ExportForm(nn.Module):
    """A `Predictor` as one module: (B, H, W, C) pictures of one size, whatever that is, to a tuple of answers.

    The pictures are uint8, or float32 from 0 to 1 where the run was trained on deeper ones.
    """

    outputs: Mapping[str, str]  # their names, and what they are
    counted: ClassVar[str]  # what an answer is, in words: "pictures"
    multiple: ClassVar[int] = 1  # of which the sides are that the network sees; pictures are padded to it

    def __init__(self, predictor: Predictor):
        super().__init__()
        self.predictor = predictor
        self.model, self.preprocessing = predictor.model, GraphPreprocessing(predictor.preprocessing)

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        return self.answer(pictures, *self.prepared(pictures))

    def prepared(self, pictures: Tensor) -> tuple[Tensor, ...]:
        """Pictures as the preprocessing makes them; where the network wants multiples, that padded as well."""
        x = self.preprocessing(pictures)
        return (x,) if self.multiple == 1 else (x, self.padded(x))

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[3] % self.multiple, 0, -x.shape[2] % self.multiple))

    def answer(self, pictures: Tensor, *prepared: Tensor) -> tuple[Tensor, ...]:
        """The answers to pictures that were `prepared`; of all but the last of these the size alone is looked at."""
        raise NotImplementedError

    def own_answers(self, inferred: Any, shown: Sequence[Tensor], size: tuple[int, int]) -> Answers:
        """Answers of `Task.infer` to pictures of this `size`, of which the preprocessing made `shown`, in this form."""
        raise NotImplementedError

    def difference(self, one: Answers, other: Answers) -> Gap:
        raise NotImplementedError

    def as_inferred(self, answers: Answers, batch: Batch) -> Any:
        """Answers of the graph to a batch as `Task.infer` would have given them, for the task's metrics."""
        raise NotImplementedError

    def thresholds(self) -> dict[str, float]:
        """Numbers that decide about answers."""
        return {}
