"""Models whose speed can be measured: Weft's and timm's, with arguments after a colon, and transformers' CvT."""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import timm
from torch import Tensor, nn

from weft.config import split_model
from weft.errors import WeftError, did_you_mean
from weft.models.registry import check_name, list_models, takes_size
from weft.study.search.space import create_network

HUGGING_FACE = {"hf:cvt-13": [1, 2, 10], "hf:cvt-21": [1, 4, 16]}  # blocks of the three stages


def check_names(names: Sequence[str]) -> None:
    """Raises for a name that neither Weft nor timm nor our list of transformers' models has, or a wrong argument."""
    for name in names:
        if not name.startswith("hf:"):
            model, args = split_model(name)
            check_name(model)
            if args:
                create_network(model, {**args, "device": "meta"})
        elif name not in HUGGING_FACE:
            known = ", ".join(HUGGING_FACE)
            raise WeftError(
                f"There is no model {name!r}; from transformers, Weft measures {known}."
                + did_you_mean(name, HUGGING_FACE)
            )
        else:
            try:
                importlib.import_module("transformers")
            except ImportError:
                raise WeftError(f"{name} needs transformers: pip install transformers.") from None


def is_ours(name: str) -> bool:
    return name not in HUGGING_FACE and split_model(name)[0].split(".")[0] in _our_names()


@cache
def _our_names() -> frozenset[str]:
    return frozenset(list_models())


def build(name: str, img_size: int) -> nn.Module:
    """A model with random weights for 1,000 classes and pictures of this size."""
    if name in HUGGING_FACE:
        return _Cvt(HUGGING_FACE[name])
    model, args = split_model(name)
    size: dict[str, Any] = {"img_size": img_size} if _takes_size(model) else {}
    return timm.create_model(model, **{**size, **args})


_takes_size = cache(takes_size)


def own_size(name: str) -> int:
    """The side of the pictures that a model was made for."""
    check_names([name])
    cfg = None if name in HUGGING_FACE else timm.get_pretrained_cfg(split_model(name)[0])
    return cfg.input_size[-1] if cfg else 224


class _Cvt(nn.Module):
    """transformers' CvT, with logits as its answer."""

    def __init__(self, depth: list[int]) -> None:
        super().__init__()
        from transformers import CvtConfig, CvtForImageClassification

        settings: dict[str, Any] = dict(depth=depth, num_labels=1000)
        self.model = CvtForImageClassification(CvtConfig(**settings))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits
