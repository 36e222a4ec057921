"""Costs of every published network and of every row of the papers' tables."""

import pytest
import timm
import torch

import weft
from tests.helpers.variants import NANO
from tools import counts
from weft.catalog.catalog import catalog, count_catalog
from weft.catalog.cost import count_parameters
from weft.catalog.papers import PAPERS, PaperRow

STORED = counts.PAGE.read_text().splitlines()
LAST_SIDES = {"cvt_nano": 4, "ceit_nano": 7, "vitae_nano": 4, "vt_resnet_nano": 7, "cetnet_nano": 2}  # at 28 pixels
ROWS = {f"{paper.name} {row.table} {row.label}": (paper, row) for paper in PAPERS for row in paper.rows}
REPLACEMENTS = [row for paper in PAPERS for row in paper.replacements]


def is_quick(row: PaperRow) -> bool:
    """The networks themselves; those of ablations, of larger pictures and under heads take seconds each."""
    return not row.switches and not row.head and row.img_size == 224


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=() if is_quick(row) else pytest.mark.slow) for key, (_, row) in ROWS.items()]
)
def test_rows_of_the_papers(key):
    """Parameters to the unit, MACs to a thousandth, and the same figures in docs/counts.md."""
    paper, row = ROWS[key]
    parameters, macs, macs_of_layers = counts.count(row)
    assert parameters == row.parameters
    assert macs / 1e9 == pytest.approx(row.macs, abs=6e-4)
    assert counts.line(paper, row, parameters, macs, macs_of_layers) in STORED, "run `make docs`"


@pytest.mark.slow
@pytest.mark.parametrize("row", REPLACEMENTS, ids=lambda row: f"{row.table} {row.part} {row.after} {row.note}")
def test_what_vt_replaces(row):
    found = counts.count_replacement(row)
    assert tuple(parameters for parameters, _ in found) == row.parameters
    assert [macs / 1e9 for _, macs in found] == pytest.approx(row.macs, abs=6e-4)
    assert counts.replacement_line(row, found) in STORED, "run `make docs`"


def test_last_stages_of_resnets():
    """As is known, 8.394 M and 411.0 M, 13.114 M and 642.3 M; and the parts of a VT-ResNet are all that it has."""
    for name, parameters, macs in (("resnet18", 8_393_728, 411.0e6), ("resnet34", 13_114_368, 642.3e6)):
        found = counts.count_part(counts.build(name, {}), "layer4", 224)
        assert found == (parameters, pytest.approx(macs, rel=1e-3))
    model = counts.build("vt_resnet18", {})
    whole, modules, trunk = (counts.count_part(model, name, 224)[1] for name in ("", "vt", "resnet"))
    assert whole == modules + trunk + model.head.weight.numel()


def test_counts_page_has_nothing_else():
    assert len(ROWS) == sum(len(paper.rows) for paper in PAPERS)  # no two rows with one name
    assert STORED[: STORED.index("")] == counts.HEAD.splitlines()[:1]
    for paper in PAPERS:
        assert all(part in STORED for part in counts.head(paper).splitlines())
    assert all(part in STORED for part in counts.replacements_head().splitlines())
    rows, tables = len(ROWS) + len(REPLACEMENTS), len(PAPERS) + 1
    assert sum(part.startswith("| ") for part in STORED) == rows + 2 * tables  # each with head and rule


@pytest.mark.parametrize("name", NANO)
def test_nano_is_small_and_keeps_a_grid(name):
    """The last map of a picture of 28 pixels is of use still."""
    assert count_parameters(timm.create_model(name, device="meta")) <= 1_500_000
    for size in (28, 32, 64, 96):
        model = timm.create_model(name, img_size=size).eval()
        *_, last = model.forward_intermediates(torch.zeros(1, 3, size, size), intermediates_only=True)
        assert min(last.shape[2:]) >= LAST_SIDES[name] * size // 32


def test_every_model_is_counted_here():
    """Weft's own sizes are in no paper."""
    counted = {row.model for _, row in ROWS.values()} & {*weft.list_models()}  # others are timm's
    assert counted == {name for name in weft.list_models() if not name.endswith(("nano", "mini"))}


def test_stored_catalog_has_every_model():
    for info in catalog():
        model = timm.create_model(info.name, device="meta")
        assert count_parameters(model) == info.parameters, "run `make catalog`"
        assert model.pretrained_cfg["input_size"][1] == info.img_size
    assert {info.name.split(".")[0] for info in catalog()} == set(weft.list_models())


@pytest.mark.slow
def test_stored_catalog_is_what_counting_gives():
    assert catalog() == count_catalog(), "run `make catalog`"
