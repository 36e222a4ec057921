"""The models as a table: what each costs, where it comes from, what it reached, which weights exist.

Counting takes seconds per model, so the table is stored in catalog.json; `make catalog` counts again, and a test
compares the two.
"""

import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path


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
    released: bool = False  # weights that come with the package


def catalog(filter: str = "") -> list[ModelInfo]:
    """The stored table, or the part of it whose names match a pattern such as "cvt*" or contain `filter`."""
    stored = json.loads((files("weft.catalog") / "catalog.json").read_text())
    pattern = filter if "*" in filter else f"*{filter}*"
    return [ModelInfo(**entry) for entry in stored if fnmatch(entry["name"], pattern)]


def count_catalog() -> list[ModelInfo]:
    """The table, counted: one entry for each published training, family by family, small models first."""
    import timm

    from weft.models.registry import FAMILIES

    infos = []
    for module, family in FAMILIES.items():
        names = timm.list_models(module=module, include_tags=True)
        counted = [_count(name, family.PUBLISHED_TOP1) for name in names]
        infos += sorted(counted, key=lambda info: (info.parameters, info.img_size, info.top1 or 0.0))
    return infos


def _count(name: str, published_top1: dict[str, float]) -> ModelInfo:
    import timm

    from weft.catalog.cost import count_macs, count_parameters
    from weft.models.weights.release import released

    model = timm.create_model(name, device="meta")
    cfg = timm.get_pretrained_cfg(name)
    assert cfg is not None, name
    channels, size, _ = cfg.input_size
    return ModelInfo(
        name=name,
        parameters=count_parameters(model),
        macs=count_macs(model, (channels, size, size)),
        img_size=size,
        paper=f"{'CETNet' if name.startswith('ce_') else type(model).__name__}, {cfg.paper_ids}",  # ce_: other hosts
        top1=published_top1.get(name),
        hub=cfg.hf_hub_id,
        files=cfg.origin_url,
        released=name in released(),
    )


if __name__ == "__main__":
    path = Path(__file__).with_name("catalog.json")
    path.write_text(json.dumps([asdict(info) for info in count_catalog()], indent=2) + "\n")
    print(f"Wrote {path.name}")
