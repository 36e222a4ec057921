"""Costs of every published network and of every row of the papers' tables, and what else the papers fix."""

import pytest
import timm
import torch

import weft
from tools import counts
from weft.catalog.catalog import catalog, count_catalog
from weft.catalog.cost import count_parameters
from weft.catalog.papers import PAPERS

STORED = counts.PAGE.read_text().splitlines()
BUFFERS = {  # BatchNorm statistics, elements
    "cvt_13": 25_767,
    "cvt_21": 41_919,
    "cvt_w24": 134_472,
    "ceit_tiny": 41_637,
    "ceit_small": 83_109,
    "ceit_base": 166_053,
}


ROWS = {f"{paper.name} {row.table} {row.label}": (paper, row) for paper in PAPERS for row in paper.rows}


@pytest.mark.parametrize("key", ROWS)
def test_rows_of_the_papers(key):
    """Parameters to the unit, MACs to a thousandth, and the same figures in docs/counts.md."""
    paper, row = ROWS[key]
    parameters, macs, macs_of_layers = counts.count(row)
    assert parameters == row.parameters
    assert macs / 1e9 == pytest.approx(row.macs, abs=6e-4)
    assert counts.line(paper, row, parameters, macs, macs_of_layers) in STORED, "run `make docs`"


def test_counts_page_has_nothing_else():
    assert len(ROWS) == sum(len(paper.rows) for paper in PAPERS)  # no two rows with one name
    assert STORED[: STORED.index("")] == counts.HEAD.splitlines()[:1]
    for paper in PAPERS:
        assert all(part in STORED for part in counts.head(paper).splitlines())
    assert sum(part.startswith("| ") for part in STORED) == len(ROWS) + 2 * len(PAPERS)  # each with head and rule


@pytest.mark.parametrize(("name", "elements"), BUFFERS.items())
def test_buffers(name, elements):
    assert sum(b.numel() for b in timm.create_model(name, device="meta").buffers()) == elements


@pytest.mark.parametrize(
    ("name", "side"), [("cvt_nano", 4), ("ceit_nano", 7), ("vitae_nano", 4), ("vt_resnet_nano", 7), ("cetnet_nano", 2)]
)
def test_nano_is_small_and_keeps_a_grid(name, side):
    """`side` is that of the last map of a picture of 28 pixels."""
    assert count_parameters(timm.create_model(name, device="meta")) <= 1_500_000
    for size in (28, 32, 64, 96):
        model = timm.create_model(name, img_size=size).eval()
        *_, last = model.forward_intermediates(torch.zeros(1, 3, size, size), intermediates_only=True)
        assert min(last.shape[2:]) >= side * size // 32


def test_drop_path_is_the_papers():
    """Linear from 0: over the last stage of CvT, over all blocks of CeiT."""
    rates = [[b.drop_path.drop_prob for b in stage.blocks] for stage in timm.create_model("cvt_13").stages]
    assert rates[0] == [0.0]
    assert rates[1] == [0.0, 0.0]
    torch.testing.assert_close(torch.tensor(rates[2]), torch.linspace(0, 0.1, 10))
    rates = [b.drop_path.drop_prob for b in timm.create_model("ceit_tiny").blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.1, 12))


def test_initialisation_is_the_papers():
    cvt, ceit = timm.create_model("cvt_13"), timm.create_model("ceit_tiny")
    linear = cvt.stages[2].blocks[0].attn.proj_q
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not linear.bias.any()
    assert cvt.head.bias.any()  # the released code leaves this one as torch made it
    assert not ceit.head.bias.any()
    leff = ceit.blocks[0].leff.linear1.linear  # a convolution in the released code: uniform, std 1 / sqrt(3 fan_in)
    assert leff.weight.std().item() == pytest.approx((3 * 192) ** -0.5, rel=0.05)
    assert leff.bias.any()
    assert not ceit.lca.pos_layer_embed.any()
    for token in (cvt.stages[2].cls_token, ceit.cls_token, ceit.pos_embed.grid):
        assert token.std().item() == pytest.approx(0.02, rel=0.2)


def test_every_model_is_counted_here():
    """Weft's own nano sizes are in no paper."""
    counted = {row.model for _, row in ROWS.values() if not row.model.startswith("swin")}  # timm's
    assert counted == {name for name in weft.list_models() if not name.endswith("nano")}


def test_stored_catalog_has_every_model():
    for info in catalog():
        model = timm.create_model(info.name, device="meta")
        assert count_parameters(model) == info.parameters, "run `make catalog`"
        assert model.pretrained_cfg["input_size"][1] == info.img_size
    assert {info.name.split(".")[0] for info in catalog()} == set(weft.list_models())


@pytest.mark.slow
def test_stored_catalog_is_what_counting_gives():
    assert catalog() == count_catalog(), "run `make catalog`"
