"""The papers' ablation tables: every row can be made, costs what it must, and is printed as the paper has it."""

import ast
from functools import cache

import pytest
import timm
import torch

from weft import WeftError
from weft.catalog.cost import count_parameters
from weft.catalog.papers import PAPERS
from weft.config import Config, override
from weft.study.ablate.costs import as_lists, cost_in_paper, count_cost, measure_throughput
from weft.study.ablate.published import check_published, published_config, published_length
from weft.study.ablate.tables import COLUMNS, Network, TableRow, find_table, table_names

TABLES = [find_table(name) for name in table_names()]
ROWS = [pytest.param(table, row, id=f"{table.name}-{row.name}") for table in TABLES for row in table.rows]
WANTED = {  # every table of the papers with results
    "CeiT": ["4", "5", "6", "7", "8"],
    "ViTAE": ["2", "3", "4", "5", "figure 1"],
    "VT": ["2", "3", "4", "5", "6", "7", "8", "9", "10"],
    "CvT": ["3", "4", "5", "6", "7", "8"],
    "CETNet": ["1", "2", "3", "4", "5", "6", "7", "8"],
}
COMPARE = [  # networks of many sizes, which have no stand-ins
    *("ceit-imagenet", "ceit-transfer", "cetnet-imagenet", "cetnet-mask-rcnn-1x", "cetnet-mask-rcnn-3x"),
    *("cetnet-upernet", "cvt-imagenet", "cvt-transfer", "vitae-cifar", "vitae-imagenet", "vitae-transfer"),
    *("vt-coco-stuff", "vt-imagenet", "vt-lip"),
]
PUBLISHED = {  # parameters of the networks that the papers compare with, from their own publications
    "deit_tiny_patch16_224": 5_717_416,
    "deit_small_patch16_224": 22_050_664,
    "deit_base_patch16_224": 86_567_656,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
}


def in_papers(table, row):
    """The row of weft.catalog.papers, whose costs test_papers.py counts, with the same network."""
    for paper in PAPERS if row.full is not None else ():
        for known in paper.rows:
            same = known.model == row.full.model and as_lists(known.switches) == as_lists(row.full.switches)
            if (
                same
                and known.img_size == row.settings.get("augment.img_size", 224)
                and not known.head
                and paper.name == table.paper
            ):
                yield known


def test_every_table_is_there():
    for paper, tables in WANTED.items():
        assert set(tables) <= {table.table for table in TABLES if table.paper == paper}, paper


@pytest.mark.parametrize("table", TABLES, ids=table_names())
def test_every_row_can_be_made(table):
    """Of the paper's size, unless test_papers.py makes it, and as the stand-in, which answers 28 pixels."""
    for row in table.rows:
        assert bool(row.missing) != bool(row.full)
        assert (row.nano is None) == (table.name in COMPARE or bool(row.missing))
        if table.name in COMPARE:  # made where their parameters are counted, and by `find_table`
            continue
        if not list(in_papers(table, row)) and row.full.model not in PUBLISHED:
            timm.create_model(row.full.model, device="meta", **row.full.switches)
        answer(row.nano.model, repr(dict(row.nano.switches)))
        override(Config(), row.settings)


@cache
def answer(model: str, switches: str) -> None:
    size = {} if model.startswith("resnet") else {"img_size": 28}
    small = timm.create_model(model, num_classes=10, **size, **ast.literal_eval(switches)).eval()
    with torch.no_grad():
        logits = small(torch.randn(2, 3, 28, 28))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    assert 0.5e6 < count_parameters(small) < 12e6


def test_printed_costs():
    """What the tables print is what weft.catalog.papers has from the papers, too."""
    pairs = []
    for table, row in (case.values for case in ROWS):
        for known in (known for known in in_papers(table, row) if known.table == table.table):
            pairs += [(row.paper.get("parameters"), known.paper_parameters), (row.paper.get("macs"), known.paper_macs)]
    both = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    assert len(both) > 30
    assert [(ours, theirs) for ours, theirs in both if ours not in (theirs, round(theirs))] == []  # 23 M and 23.4 M


HOPELESS = {
    *("shallow, wide", "shallow, wide, patches", "shallow, wide, CvT's embedding", "CE-Swin-T", "VT-R50"),
    "CvT-13 at 384",  # 25 M in CETNet's paper, 20 M in its own
    *("DeiT-T, teacher", "MobileNetV2 (1.4)", "ConViT-Ti"),  # as cited; timm's have 5.9, 6.1 and 5.7 M
}


def has_known_parameters(table, row) -> bool:
    """Where papers.py does not say that no reading meets them, and the network is not somebody's else under a head."""
    made = row.full is not None and not row.full.head
    return made and "parameters" in row.paper and row.name not in HOPELESS and table.name != "cetnet-patterns"


@pytest.mark.parametrize(("table", "row"), [case for case in ROWS if has_known_parameters(*case.values)])
def test_parameters_are_those_of_the_paper(table, row):
    """Within 3 %."""
    known = [known.parameters for known in in_papers(table, row)]
    count = known or [count_parameters(timm.create_model(row.full.model, device="meta", **row.full.switches))]
    assert count[0] / 1e6 == pytest.approx(row.paper["parameters"], rel=0.03)


@pytest.mark.parametrize(("model", "parameters"), PUBLISHED.items())
def test_networks_of_others(model, parameters):
    assert count_parameters(timm.create_model(model, device="meta")) == parameters


@pytest.mark.parametrize("name", ["ceit-i2t", "ceit-leff", "ceit-lca"])
def test_ceit_without_its_parts_is_deit(name):
    base = next(row for row in find_table(name).rows if row.name == "DeiT-T")
    model = timm.create_model(base.full.model, device="meta", **base.full.switches)
    assert count_parameters(model) == PUBLISHED["deit_tiny_patch16_224"]


def test_known_costs_are_not_counted_again(monkeypatch):
    monkeypatch.setattr("weft.study.ablate.costs.count_cost", None)
    cost = cost_in_paper(TableRow("patches", Network("cvt_13", {"embed": "patch"}), None))
    assert (cost.parameters, cost.macs) == (19_561_064, 4.426)


@pytest.mark.parametrize(
    ("table", "row", "macs"),
    [  # as printed: the same networks at other sizes, with other classes
        ("vt-coco-stuff", "R50, VT-FPN", 113),
        ("vt-lip", "R50, VT-FPN", 26.4),
        ("cetnet-upernet", "CETNet-S", 990),
        ("cetnet-mask-rcnn-3x", "CETNet-T", 261),
        ("cetnet-mask-rcnn-1x", "Swin-T", 264),
    ],
)
def test_costs_with_a_head_are_those_of_its_table(table, row, macs):
    found = find_table(table)
    row = next(each for each in found.rows if each.name == row)
    assert row.paper["macs"] == macs
    assert cost_in_paper(row, found.source).macs == pytest.approx(macs, rel=0.01)


def test_network_that_cannot_be_made_has_no_costs():
    """Its row fails; the others are not held up."""
    odd, fits = Network("cvt_nano", {"num_heads": [3, 3, 3]}), Network("vt_resnet_nano")
    assert count_cost(odd, 28) is None
    speeds = measure_throughput(
        {"odd": odd, "fits": fits}, dict(odd=28, fits=28), 10, 1, torch.device("cpu"), threads=1
    )  # grey pictures
    assert speeds["odd"] is None
    assert speeds["fits"] > 0


@pytest.mark.parametrize(("plain_one", "with_tokens"), [("R18", "VT-R18"), ("R34", "VT-R34")])
def test_stand_ins_of_vt_cost_as_much_as_those_of_resnets(plain_one, with_tokens):
    rows = {row.name: row for row in find_table("vt-resnet").rows}
    one, other = (count_cost(rows[name].nano, 32, 10).macs for name in (plain_one, with_tokens))
    assert one == pytest.approx(other, rel=0.2)


def test_costs_at_another_size():
    smaller = count_cost(Network("deit_tiny_patch16_224"), 32).parameters
    assert smaller == PUBLISHED["deit_tiny_patch16_224"] - 192 * (14 * 14 - 2 * 2)  # fewer positions


# As published -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES, ids=table_names())
def test_papers_recipes_are_whole(table):
    """Every row that the paper trained has settings that fit together; and weights come from a row that is trained."""
    assert table.data
    check_published(table)
    names = [row.name for row in table.trained(published=True)]
    for row in table.trained(published=True):
        assert not row.init or names.index(row.init) < names.index(row.name)
        assert not row.init or row.recipe.endswith("-384")
    assert {key for row in table.rows for key in row.paper} <= {*table.columns, *table.sets}


@pytest.mark.parametrize(
    ("table", "row", "epochs", "batch", "size"),
    [  # the papers' texts; CeiT and CvT cool down for ten epochs, in their code
        ("ceit-leff", "3 x 3, BN", 310, 1024, 224),
        ("ceit-convergence", "CeiT-B, 1x", 100 * (1 + 10 / 300), 1024, 224),
        ("ceit-convergence", "DeiT-S, 3x", 310, 1024, 224),
        ("ceit-imagenet", "CeiT-S at 384", 30, 1024, 384),
        ("ceit-transfer", "CeiT-T", 100, 512, 224),
        ("vitae-cells", "NC pre, BN", 100 * (1 + 10 / 300), 512, 224),
        ("vitae-efficiency", "ViTAE-T, 20 % of the data", 500 * (1 + 10 / 300), 512, 224),
        ("vitae-cifar", "ViTAE-T", 1010, 512, 224),
        ("vt-tokens", "VT-R34, 64 tokens", 90, 256, 224),
        ("vt-imagenet", "VT-R50", 400, 2048, 224),
        ("vt-lip", "R50, VT-FPN", 150, 96, 473),
        ("cvt-imagenet", "CvT-21", 310, 2048, 224),
        ("cetnet-patterns", "C-T-C-T-C-T-C-T", 300, 1024, 224),
        ("cetnet-mask-rcnn-3x", "CETNet-S", 36, 16, 800),
        ("cetnet-upernet", "CETNet-B", 127, 16, 512),
    ],
)
def test_lengths_of_the_papers(table, row, epochs, batch, size):
    found = find_table(table)
    row = next(each for each in found.rows if each.name == row)
    config = published_config(row, row.full)
    assert published_length(found, row, config, 1_281_167)[0] == pytest.approx(epochs)
    assert (config.run.batch, config.augment.img_size) == (batch, size)


@pytest.mark.parametrize(
    ("table", "data", "score", "column"),
    [
        ("ceit-transfer", "cifar100:somewhere", "top1", "cifar100"),
        ("ceit-transfer", "my_pictures", "top1", ""),
        ("cvt-position", "my_pictures", "top1", "top1"),
        ("cvt-position", "masks", "miou", "top1"),
        ("cetnet-mask-rcnn-1x", "coco:somewhere", "mask_ap", "mask_ap"),
        ("cetnet-mask-rcnn-1x", "boxes", "box_ap", "box_ap"),
        ("vt-lip", "lip:somewhere", "miou", "miou"),
    ],
)
def test_figure_that_is_compared(table, data, score, column):
    assert find_table(table).score_column(data, score) == column


# Own tables, and bad ones -----------------------------------------------------------------------------------------

GOOD = """
title: Mine
model: cvt_nano
rows:
  - name: none
  - name: every
    switches: {pos_embed: every}
"""


def test_own_table(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD)
    table = find_table(str(tmp_path / "mine.yaml"))
    assert (table.name, table.base, table.source) == ("mine", "none", "")
    assert [row.base for row in table.rows] == ["none", "none"]
    assert table.rows[1].full == Network("cvt_nano", {"pos_embed": "every"})
    assert table.rows[1].nano is None


def test_missing_row_stays(tmp_path):
    (tmp_path / "mine.yaml").write_text(GOOD + "  - name: third\n    missing: nobody has written it\n")
    row = find_table(str(tmp_path / "mine.yaml")).rows[2]
    assert (row.full, row.nano, row.missing) == (None, None, "nobody has written it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("title: Mine", "titel: Mine"), ["title is missing"]),
        (("title: Mine", "title: Mine\ncolour: red"), ["unknown key 'colour'"]),
        (("title: Mine", "title: [Mine]"), ["title", "is not text"]),
        (("title: Mine", "title: Mine\ncolumns: [speed]"), ["columns", "'speed'", *COLUMNS]),
        (("title: Mine", "title: Mine\nbase: ever"), ["base", "'ever'", "Did you mean 'every'?"]),
        (("model: cvt_nano", "model: cvt_nan"), ["row 'none'", "model", "'cvt_nan'", "Did you mean 'cvt_nano'?"]),
        (("switches: {pos_embed: every}", "nano: cvt_nan"), ["row 'every'", "nano", "'cvt_nan'"]),
        (("model: cvt_nano\n", ""), ["row 'none'", "model is missing"]),
        (("name: every", "name: none"), ["two rows are called 'none'"]),
        (("pos_embed: every", "pos_embd: every"), ["row 'every'", "'pos_embd'", "Did you mean 'pos_embed'?"]),
        (("pos_embed: every", "pos_embed: sometimes"), ["row 'every'", "pos_embed", "sometimes"]),
        (("switches: {pos_embed: every}", "switchs: {}"), ["row 2", "'switchs'", "Did you mean 'switches'?"]),
        (("switches: {pos_embed: every}", "switches: every"), ["row 2", "switches", "is not a mapping"]),
        (("switches: {pos_embed: every}", "fraction: 2"), ["row 'every'", "fraction", "at most 1"]),
        (("switches: {pos_embed: every}", "epochs: 0"), ["row 'every'", "epochs"]),
        (("switches: {pos_embed: every}", "epochs: true"), ["row 2", "epochs", "is not a number"]),
        (("switches: {pos_embed: every}", "settings: {optim.lrr: 1}"), ["row 'every'", "settings", "optim.lrr"]),
        (("switches: {pos_embed: every}", "paper: {top1: 80}"), ["row 'every'", "paper", "'top1'"]),
        (("switches: {pos_embed: every}", "base: nobody"), ["row 'every': base", "'nobody'"]),
        (("switches: {pos_embed: every}", "only: sometimes"), ["row 'every'", "only", "published, short"]),
        (("title: Mine", "title: Mine\ndata: [cifar10]\nsteps: {cifar100: 5}"), ["steps", "cifar100", "`data`"]),
        (("title: Mine", "title: Mine\nsettings: {model.hed: fpn}"), ["row 'none'", "settings", "model.hed"]),
        (("  - name: none", "  - name: none\n    only: published"), ["base", "not in short studies"]),
        (("switches: {pos_embed: every}", "nano: {modl: cvt_nano}"), ["row 'every': nano", "'modl'"]),
        (("  - name: none", "  - none"), ["row 1", "must be a mapping"]),
        (("rows:", "rows: []\nother:"), ["unknown key 'other'"]),
        (("title: Mine", "title: Mine: yes"), ["not a valid YAML file (line 2)"]),
    ],
)
def test_bad_table(tmp_path, change, words):
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD.replace(*change))
    with pytest.raises(WeftError) as error:
        find_table(str(file))
    said = str(error.value)
    assert "\n" not in said
    assert all(word in said for word in [str(file), *words]), said


def test_unknown_table():
    with pytest.raises(WeftError, match=r"cvt-positions.*Did you mean 'cvt-position'\?"):
        find_table("cvt-positions")
    with pytest.raises(WeftError, match=r"nowhere\.yaml does not exist"):
        find_table("nowhere.yaml")
