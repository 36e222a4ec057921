"""Grad-CAM (Selvaraju et al. 2017, arXiv 1610.02391): the places of a layer's map that speak for a class."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.explain.maps import as_map, default_layer, record_outputs, tensor_of


def grad_cam(
    model: nn.Module, pictures: Tensor, layer: str = "", classes: Sequence[int] | Tensor | None = None
) -> Tensor:
    """(B, h, w): the map of `layer`, channels weighed by the mean gradient of the class's score; what is negative is 0.

    Args:
        model: in eval mode; a classifier, or a segmenter, whose score is the sum over the pixels given to the class.
        pictures: (B, C, H, W), normalised.
        layer: the name of a module; by default `default_layer(model)`.
        classes: one for each picture; by default the likeliest, of a segmenter the one with most pixels.
    """
    layer = layer or default_layer(model)
    with torch.enable_grad(), record_outputs(model, [layer]) as out:
        pictures = pictures.detach().requires_grad_()  # so that there are gradients where all weights are frozen
        scores = class_scores(model(pictures), classes)
        output = tensor_of(out[layer], layer)
        (gradient,) = torch.autograd.grad(scores.sum(), output, allow_unused=True, materialize_grads=True)
    size = pictures.shape[2], pictures.shape[3]
    a, weights = as_map(output.detach(), size, model, layer), as_map(gradient, size, model, layer)  # (B, h, w, C)
    return (a * weights.mean(dim=(1, 2), keepdim=True)).sum(dim=3).clamp(min=0)


def class_scores(answer: Any, classes: Sequence[int] | Tensor | None) -> Tensor:
    """(B,): what the model says for the classes, from (B, K) logits or a segmenter's {"out": (B, K, h, w)}."""
    logits = answer["out"] if isinstance(answer, dict) else answer
    if logits.dim() == 4:
        given = logits.argmax(dim=1)  # (B, h, w)
        if classes is None:
            classes = given.flatten(1).mode(dim=1).values
        chosen = torch.as_tensor(classes, device=logits.device)
        of_class = logits[torch.arange(len(logits)), chosen]  # (B, h, w)
        return (of_class * (given == chosen[:, None, None])).sum(dim=(1, 2))
    if classes is None:
        classes = logits.argmax(dim=1)
    return logits[torch.arange(len(logits)), torch.as_tensor(classes, device=logits.device)]
