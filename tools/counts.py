"""Writes docs/counts.md: every row of the papers' tables that gives a cost, counted again. Run by `make docs`."""

from pathlib import Path
from typing import Any

import timm

import weft  # noqa: F401  registers the models
from weft.catalog.cost import count_macs_by_kind, count_parameters
from weft.catalog.papers import PAPERS, Paper, PaperRow
from weft.heads import make_segmenter

PAGE = Path(__file__).parents[1] / "docs" / "counts.md"
HEAD = """# Counts: the papers' figures and ours

Written by `tools/counts.py`; `tests/catalog/test_papers.py` counts every row again. Parameters are in millions; MACs,
the multiply-accumulates of one picture, in thousand millions. A difference is ours against the paper's, whose figures
are rounded or cut off to the digits shown; a hyphen stands for what a paper does not give. MACs are those of
convolutions, linear layers and all other matrix products; norms, activations and pooling are not counted.
"""
COLUMNS = "| table | row | switches | pixels | parameters | paper | difference | MACs | paper | difference |"


def count(row: PaperRow) -> tuple[int, int, int]:
    """Parameters, MACs, and MACs without the products of attention."""
    model = timm.create_model(row.model, device="meta", num_classes=0 if row.head else row.classes, **row.switches)
    if row.head:
        model = make_segmenter(model, row.head, row.classes)
    layers, attention = count_macs_by_kind(model, (3, *_sides(row.img_size)))
    return count_parameters(model), layers + attention, layers


def line(paper: Paper, row: PaperRow, parameters: int, macs: int, macs_of_layers: int) -> str:
    """A row of the page. MACs are counted as the paper does it, and with attention behind a slash if it does not."""
    counts_attention = paper.counts_attention or row.note == "attention counted"
    compared = macs if counts_attention else macs_of_layers
    shown = _number(compared / 1e9) if counts_attention else f"{_number(compared / 1e9)} / {_number(macs / 1e9)}"
    label = f"{row.label} ({row.note})" if row.note else row.label
    head = dict(head=row.head, classes=row.classes) if row.head else {}
    height, width = _sides(row.img_size)
    pixels = str(height) if height == width else f"{height} x {width}"
    cells = [row.table, label, f"`{_call(row.model, {**row.switches, **head})}`", pixels]
    cells += [f"{parameters / 1e6:.3f}", *_against(parameters / 1e6, row.paper_parameters)]
    cells += [shown, *_against(compared / 1e9, row.paper_macs)]
    return f"| {' | '.join(cells)} |"


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
    rule = "|" + " --- |" * (COLUMNS.count("|") - 1)
    return f"\n{title}\n\n{paper.remark}\n\n{COLUMNS}\n{rule}"


def main() -> None:
    lines = [HEAD.rstrip()]
    for paper in PAPERS:
        lines += [head(paper), *(line(paper, row, *count(row)) for row in paper.rows)]
    PAGE.write_text("\n".join(lines) + "\n")
    print(f"Wrote {PAGE.name}")


if __name__ == "__main__":
    main()
