"""The models as a table: what each costs, where it comes from, what it reached, which weights exist."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import timm

from weft.analysis.cost import count_macs, count_parameters
from weft.models import ceit, cvt

FAMILIES: dict[str, ModuleType] = {"ceit": ceit, "cvt": cvt}


@dataclass(frozen=True)
class ModelInfo:
    """One model at one training of its paper."""

    name: str  # what `timm.create_model` takes
    parameters: int
    macs: int  # of one picture, attention included
    img_size: int
    paper: str
    top1: float | None  # published ImageNet-1k top-1 in percent
    hub: str | None  # repository that `pretrained=True` loads
    files: str | None  # where the authors' files are, for `weft convert`


def describe(name: str) -> list[ModelInfo]:
    """One entry for each published training of the model `name`, small pictures first."""
    tagged = timm.list_models(f"{name}.*", include_tags=True) or [name]
    return sorted((_info(tag) for tag in tagged), key=lambda info: (info.img_size, info.top1 or 0.0))


def _info(name: str) -> ModelInfo:
    model = timm.create_model(name, device="meta")
    cfg: Any = model.pretrained_cfg
    channels, size, _ = cfg["input_size"]
    return ModelInfo(
        name=name,
        parameters=count_parameters(model),
        macs=count_macs(model, (channels, size, size)),
        img_size=size,
        paper=f"{type(model).__name__}, {cfg['paper_ids']}",
        top1=FAMILIES[name.split("_")[0]].PUBLISHED_TOP1.get(name),
        hub=cfg.get("hf_hub_id"),
        files=cfg.get("origin_url"),
    )
