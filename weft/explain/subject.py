"""The model that is looked into."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.data.preprocessing import Preprocessing


@dataclass(frozen=True)
class Subject:
    """A model to look into, in eval mode on its device, and how it sees pictures."""

    name: str
    model: nn.Module  # of a detector the backbone
    preprocessing: Preprocessing
    classes: list[str]
    task: str = "classify"  # as explain.json has it
    scores_classes: bool = True  # False: it gives features alone, as a detector's backbone does
    per_pixel: bool = False  # classes are scored for each pixel, {"out": (B, K, h, w)}; else for the picture, (B, K)
    multilabel: bool = False
    trained: bool = True
    asked: int | None = None  # the class whose Grad-CAM is wanted; None: of each picture the likeliest

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def per_picture(self) -> bool:
        """Whether classes are scored for the picture as a whole."""
        return self.scores_classes and not self.per_pixel

    def see(self, pictures: Tensor) -> Tensor:
        """(B, C, h, w) pictures as the model takes them, on its device: one batch at a time, to save memory."""
        return self.preprocessing.normalise(pictures.to(self.device))
