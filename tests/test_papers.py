"""Parameters to the unit and MACs to a thousandth, against what was measured on the released code."""

import pytest
import timm
import torch

import weft
from weft.analysis.catalog import catalog, count_catalog
from weft.analysis.cost import count_macs, count_parameters

COUNTS = [  # model, arguments, picture size, parameters, MACs in G
    ("cvt_13", {}, 224, 19_997_480, 4.566),
    ("cvt_13", {}, 384, 19_997_480, 16.269),
    ("cvt_21", {}, 224, 31_622_696, 7.178),
    ("cvt_21", {}, 384, 31_622_696, 24.849),
    ("cvt_w24", {}, 224, 277_196_392, 60.917),
    ("cvt_w24", {}, 384, 277_196_392, 194.222),
    ("cvt_13_nas", {}, 224, 18_209_192, 5.077),
    ("cvt_13", dict(stride_kv=1), 224, 19_997_480, 6.643),  # table 7a
    ("cvt_13", dict(embed="patch"), 224, 19_561_064, 4.426),  # table 6a
    ("cvt_13", dict(embed="patch", pos_embed="every"), 224, 19_987_944, 4.426),  # table 6b
    ("cvt_13", dict(pos_embed="every"), 224, 20_424_360, 4.566),  # table 6c
    ("ceit_tiny", {}, 224, 6_356_904, 1.395),
    ("ceit_tiny", dict(img_size=384), 384, 6_429_864, 5.103),
    ("ceit_small", {}, 224, 24_204_840, 4.760),
    ("ceit_small", dict(img_size=384), 384, 24_350_760, 15.980),
    ("ceit_base", {}, 224, 94_405_416, 17.749),
    ("ceit_tiny", dict(i2t_channels=32), 224, 6_253_832, None),
    ("ceit_small", dict(i2t_channels=32), 224, 24_003_464, None),
    ("ceit_base", dict(i2t_channels=32), 224, 94_007_432, None),
]
BUFFERS = {  # BatchNorm statistics, elements
    "cvt_13": 25_767,
    "cvt_21": 41_919,
    "cvt_w24": 134_472,
    "ceit_tiny": 41_637,
    "ceit_small": 83_109,
    "ceit_base": 166_053,
}


@pytest.mark.parametrize(("name", "args", "size", "parameters", "macs"), COUNTS)
def test_counts(name, args, size, parameters, macs):
    model = timm.create_model(name, device="meta", **args)
    assert count_parameters(model) == parameters
    if macs is not None:
        assert count_macs(model, (3, size, size)) / 1e9 == pytest.approx(macs, rel=1e-3)


@pytest.mark.parametrize(("name", "elements"), BUFFERS.items())
def test_buffers(name, elements):
    assert sum(b.numel() for b in timm.create_model(name, device="meta").buffers()) == elements


@pytest.mark.parametrize("name", ["cvt_nano", "ceit_nano"])
def test_nano_is_small_and_keeps_a_grid(name):
    assert count_parameters(timm.create_model(name, device="meta")) <= 1_500_000
    for size in (28, 32, 64, 96):
        model = timm.create_model(name, img_size=size).eval()
        *_, last = model.forward_intermediates(torch.zeros(1, 3, size, size), intermediates_only=True)
        assert min(last.shape[2:]) >= 4


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
    counted = {name for name, *_ in COUNTS} | {"cvt_nano", "ceit_nano"}
    assert counted == set(weft.list_models())


def test_stored_catalog_is_what_counting_gives():
    assert catalog() == count_catalog(), "run `make catalog`"
    assert {info.name.split(".")[0] for info in catalog()} == set(weft.list_models())
