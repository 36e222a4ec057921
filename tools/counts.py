"""Writes docs/counts.md: every row of the papers' tables that gives a cost, counted again. Run by `make docs`."""

from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft  # noqa: F401  registers the models
from weft.catalog.cost import count_macs_by_kind, count_parameters
from weft.catalog.papers import PAPERS, Paper, PaperRow, Replacement
from weft.heads import DETECTORS, make_segmenter
from weft.heads.rcnn import make_detector

PAGE = Path(__file__).parents[1] / "docs" / "counts.md"
HEAD = """# Counts: the papers' figures and ours

Written by `tools/counts.py`; `tests/catalog/test_papers.py` counts every row again. Parameters are in millions; MACs,
the multiply-accumulates of one picture, in thousand millions. A difference is ours against the paper's, whose figures
are rounded or cut off to the digits shown; a hyphen stands for what a paper does not give. MACs are those of
convolutions, linear layers and all other matrix products; norms, activations and pooling are not counted.
"""
COLUMNS = "| table | row | switches | pixels | parameters | paper | difference | MACs | paper | difference |"
REPLACED = "| table | part | before | after | pixels | parameters | times less | paper | MACs | times less | paper |"
REPLACED_REMARK = (
    "What VT puts in the place of a part of a network: costs of both, and how many times less the second has. An FPN "
    "is all between the backbone and the semantic head."
)
PARTS = {"stage 5": ("layer4", "vt"), "FPN": ("head.pyramid", "head.pyramid")}  # in the model before and after

HEADS = {"FPN": ("fpn", "vt-fpn")}


class DetectorPass(nn.Module):
    """A detector on one picture, as mmdetection counts it: 1,000 proposals have a box, the first 100 of them a mask."""

    def __init__(self, detector: Any):
        super().__init__()
        self.detector = detector

    def forward(self, picture: Tensor) -> None:
        rpn, heads = self.detector.rpn, self.detector.roi_heads
        maps = list(self.detector.backbone(picture).values())
        width = maps[0].shape[1]
        rpn.head(maps)
        heads.box_predictor(heads.box_head(picture.new_empty(1000, width, 7, 7)))
        heads.mask_predictor(heads.mask_head(picture.new_empty(100, width, 14, 14)))


def build(name: str, switches: dict[str, Any], head: str = "", classes: int = 1000) -> nn.Module:
    model = timm.create_model(name, device="meta", num_classes=0 if head else classes, **switches)
    if head in DETECTORS:
        return DetectorPass(make_detector(model, head, classes))
    return make_segmenter(model, head, classes) if head else model


def count(row: PaperRow) -> tuple[int, int, int]:
    """Parameters, MACs, and MACs without the products of attention."""
    model = build(row.model, row.switches, row.head, row.classes)
    layers, attention = count_macs_by_kind(model, (3, *_sides(row.img_size)))
    return count_parameters(model), layers + attention, layers


def count_replacement(row: Replacement) -> list[tuple[int, int]]:
    """Parameters and MACs of the part before, and of what takes its place."""
    heads, names = HEADS.get(row.part, ("", "")), PARTS.get(row.part, ("", ""))
    models = build(row.before, {}, heads[0]), build(row.after, row.switches, heads[1])
    return [count_part(model, name, row.img_size) for model, name in zip(models, names, strict=True)]


def count_part(model: nn.Module, name: str, img_size: int | tuple[int, int]) -> tuple[int, int]:
    """Parameters and MACs of the module `name` within a model, or for "" of all of it."""
    counter = FlopCounterMode(display=False)
    parameter = next(model.parameters())
    with counter:
        model.eval()(parameter.new_empty(1, 3, *_sides(img_size)))
    part = model.get_submodule(name)
    names = [f"{name}.{child}" for child, _ in part.named_children()] if isinstance(part, nn.ModuleList) else [name]
    paths = [".".join(filter(None, [type(model).__name__, each])) for each in names]  # a list is never called itself
    flops = counter.get_flop_counts()
    return count_parameters(part), sum(sum(flops[path].values()) for path in paths) // 2


def line(paper: Paper, row: PaperRow, parameters: int, macs: int, macs_of_layers: int) -> str:
    """A row of the page. MACs are counted as the paper does it, and with attention behind a slash if it does not."""
    counts_attention = paper.counts_attention or row.note == "attention counted"
    compared = macs if counts_attention else macs_of_layers
    shown = _number(compared / 1e9) if counts_attention else f"{_number(compared / 1e9)} / {_number(macs / 1e9)}"
    label = f"{row.label} ({row.note})" if row.note else row.label
    head = dict(head=row.head, classes=row.classes) if row.head else {}
    cells = [row.table, label, f"`{_call(row.model, {**row.switches, **head})}`", _pixels(row.img_size)]
    cells += [f"{parameters / 1e6:.3f}", *_against(parameters / 1e6, row.paper_parameters)]
    cells += [shown, *_against(compared / 1e9, row.paper_macs)]
    return f"| {' | '.join(cells)} |"


def replacement_line(row: Replacement, found: list[tuple[int, int]]) -> str:
    """A row of the table of what VT replaces."""
    part = f"{row.part} ({row.note})" if row.note else row.part
    heads = [{"head": head} for head in HEADS.get(row.part, ())] or [{}, {}]
    before, after = _call(row.before, heads[0]), _call(row.after, {**row.switches, **heads[1]})
    cells = [row.table, part, f"`{before}`", f"`{after}`", _pixels(row.img_size)]
    papers = (row.paper_parameters, row.paper_macs)
    for (first, second), unit, paper in zip(zip(*found, strict=True), (1e6, 1e9), papers, strict=True):
        cells += [
            f"{first / unit:.3f}, {second / unit:.3f}",
            f"{first / second:.2f}",
            "-" if paper is None else f"{paper:g}",
        ]
    return f"| {' | '.join(cells)} |"


def _pixels(img_size: int | tuple[int, int]) -> str:
    height, width = _sides(img_size)
    return str(height) if height == width else f"{height} x {width}"


def _sides(img_size: int | tuple[int, int]) -> tuple[int, int]:
    return (img_size, img_size) if isinstance(img_size, int) else img_size


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _against(ours: float, theirs: float | None) -> tuple[str, str]:
    return ("-", "-") if theirs is None else (f"{theirs:g}", f"{100 * (ours / theirs - 1):+.1f} %")


def _call(model: str, switches: dict[str, Any]) -> str:
    return ", ".join([model, *(f"{key}={value!r}" for key, value in switches.items())])


def head(paper: Paper) -> str:
    title = f"## {paper.name} ([arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv}))"
    return f"\n{title}\n\n{paper.remark}\n\n{_table_head(COLUMNS)}"


def replacements_head() -> str:
    return f"\n{REPLACED_REMARK}\n\n{_table_head(REPLACED)}"


def _table_head(columns: str) -> str:
    return columns + "\n|" + " --- |" * (columns.count("|") - 1)


def main() -> None:
    lines = [HEAD.rstrip()]
    for paper in PAPERS:
        lines += [head(paper), *(line(paper, row, *count(row)) for row in paper.rows)]
        if paper.replacements:
            lines += [replacements_head(), *(replacement_line(r, count_replacement(r)) for r in paper.replacements)]
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"Wrote {PAGE.name}")


if __name__ == "__main__":
    main()
