"""docs/papers.md: it has every table and figure in order, is what the script writes, and its commands plan."""

import re

import pytest

from tests.tools.test_docs import DOCS, commands
from tools import papers
from weft.catalog.papers import PAPERS
from weft.cli.app import app, take_keys
from weft.data.boxes.coco import BOX_SETS
from weft.data.masks.sets import MASK_SETS
from weft.data.sources.named import OTHERS, TORCHVISION
from weft.run.recipes import recipe_names
from weft.study.ablate.published import check_published
from weft.study.ablate.tables import find_table, table_names

HAS = {  # how many tables and figures each paper has in its main part
    "CeiT": (8, 4),
    "ViTAE": (5, 4),
    "VT": (10, 6),
    "CvT": (8, 3),
    "CETNet": (8, 2),
}
ENTRIES = [entry for paper in PAPERS for entry in papers.entries(paper.name)]


@pytest.mark.parametrize("paper", HAS)
def test_every_table_and_figure_is_there_in_order(paper):
    for kind, last in zip(("Table", "Figure"), HAS[paper], strict=True):
        found = [
            entry.where.partition(", section")[0] for entry in papers.entries(paper) if entry.where.startswith(kind)
        ]
        assert [int(number) for where in found for number in re.findall(r"\d+", where)] == [*range(1, last + 1)]


def test_every_table_of_ablate_is_there_once():
    assert sorted(name for entry in ENTRIES for name in entry.tables) == table_names()
    for paper in PAPERS:
        for entry in papers.entries(paper.name):
            for table in map(find_table, entry.tables):
                assert (table.paper, f"table {table.table}" if table.table.isdigit() else table.table) == (
                    paper.name,
                    entry.where.lower(),
                )


def test_page_is_what_the_script_writes(monkeypatch):
    """But for the hours, which take minutes to count."""
    monkeypatch.setattr(papers, "count", lambda row, size: 1.0)

    def without_hours(text):
        return re.sub(r"[\d,.]+ hours", "hours", text)

    stale = "stale: run `python -m tools.papers`"
    assert without_hours(papers.page()) == without_hours(papers.PAGE.read_text()), stale


@pytest.mark.slow
def test_hours_are_what_the_script_counts():
    assert papers.page() == papers.PAGE.read_text(), "stale: run `python -m tools.papers`"


def test_hours(monkeypatch):
    """CeiT-T for 310 epochs at 50 TFLOP/s, as the head of its recipe has it; CvT-13 as it was measured."""
    measured = {key: speed for key, speed in papers.measured().items() if key[0] != "ceit_tiny"}
    monkeypatch.setattr(papers, "measured", lambda: measured)
    table = find_table("ceit-imagenet")
    row = next(row for row in table.rows if row.name == "CeiT-T")
    assert papers.hours(table, row, "imagenet") == (pytest.approx(18.5, abs=0.1), False)
    row = next(row for row in find_table("cvt-stride").rows if row.name == "b: stride 2")
    speed = papers.measured()["cvt_13", "", 224]
    expected = 310 * 1_281_167 / speed / 3600
    assert papers.hours(find_table("cvt-stride"), row, "imagenet") == (pytest.approx(expected), True)


def test_hours_of_steps(monkeypatch):
    """CvT trains 10,000 steps of 512 on CIFAR and 500 on Flowers, whatever number of epochs these are."""
    monkeypatch.setattr(papers, "count", lambda row, size: 1.0)
    table = find_table("cvt-transfer")
    row = next(row for row in table.rows if row.name == "CvT-13")
    long, short = (papers.hours(table, row, name)[0] for name in ("cifar100", "flowers102"))
    assert long == pytest.approx(10_000 * 512 * 6e9 / papers.FLOPS / 3600)
    assert short == pytest.approx(long / 20)


def test_commands_plan():
    """Those of `weft ablate` name data that Weft opens and recipes that fit; test_docs.py parses all of them."""
    planned = 0
    for words in commands((DOCS / "papers.md").read_text()):
        if words[0] not in ("ablate", "recipes") or len(words) == 1:
            continue
        _, bound, _ = app.parse_args(take_keys(words), exit_on_error=False, print_error=False)
        if words[0] == "ablate" and bound.arguments.get("as_published"):
            table = find_table(bound.arguments["table"])
            check_published(table)
            assert bound.arguments["data"].partition(":")[0] in {*TORCHVISION, *OTHERS, *MASK_SETS, *BOX_SETS}
            planned += 1
        if words[0] == "recipes":
            assert words[1] in dict(recipe_names())
    assert planned == len(table_names())
