"""`weft ablate` from command to report, with workers that train nothing; and what the table says of known scores."""

import json
import re

import pytest
import timm
import torch

from tests.helpers.made_data import tree
from tests.helpers.play_workers import play, times_trained  # noqa: F401  a fixture
from tests.helpers.small_runs import CVT, command, make_pictures, make_squares, refused
from weft.catalog.cost import count_parameters
from weft.heads import make_segmenter
from weft.study.ablate.costs import Cost
from weft.study.ablate.plan import AblationPlan, AblationRequest, read_plan
from weft.study.ablate.report import Forest, as_markdown, result_row
from weft.study.ablate.run import cells_of
from weft.study.ablate.summary import summarise
from weft.study.ablate.tables import Network, Table, TableRow, find_table, table_names
from weft.study.cells.cell import Result
from weft.study.cells.setup import open_study_data

# What is said of known scores ----------------------------------------------------------------------------------------

TABLE = Table(
    name="mine",
    title="Mine",
    base="base",
    paper="CvT",
    table="5",
    columns=("parameters", "top1"),
    rows=(
        TableRow("base", Network("m"), None, base="base", paper={"parameters": 20, "top1": 80.0}),
        TableRow("better", Network("m"), None, base="base", paper={"top1": 81.5}),
        TableRow("same", Network("m"), None, base="base"),
        TableRow("broken", Network("m"), None, base="base"),
        TableRow("absent", None, None, base="base", paper={"top1": 70.0}, missing="nobody wrote it"),
    ),
)
PLAN = AblationPlan(
    AblationRequest("data", epochs=3),
    fingerprint="",
    recipe="quick",
    img_size=32,
    classes=10,
    channels=3,
    pictures=100,
    settings={},
    networks={row.name: Network("m", {"row": row.name}) for row in TABLE.rows},
    epochs=3,
    costs={"base": Cost(1_500_000, 0.0254, 1234.5)},
)
SCORES = {"base": [0.50, 0.60, 0.70], "better": [0.55, 0.65, 0.76], "same": [0.51, 0.59, 0.70]}


def study_of(seeds: int):
    cells = cells_of(TABLE, PLAN, seeds)
    results = {}
    for (name, seed), cell in cells.items():
        known = {"metrics": {"top1": SCORES[name][seed]}} if name in SCORES else {"error": "does not run"}
        results[cell.key] = Result(cell, **known)
    return summarise(TABLE, PLAN, cells, results, {"base": Cost(19_997_480, 4.566)}, seeds)


def test_verdicts():
    lines = {line.row.name: line for line in study_of(3).lines}
    assert {name: line.verdict for name, line in lines.items()} == {
        "base": "base",
        "better": "larger than noise",  # five or six points with every seed
        "same": "within noise",
        "broken": "failed: does not run",
        "absent": "not here: nobody wrote it",
    }
    assert lines["better"].difference.mean == pytest.approx(0.16 / 3)
    assert (lines["base"].mean, lines["base"].sd) == (pytest.approx(0.6), pytest.approx(0.1))
    assert lines["better"].paper_difference == 1.5


def test_one_seed_gives_no_verdict():
    lines = {line.row.name: line for line in study_of(1).lines}
    assert lines["better"].verdict == "too few seeds: no verdict"
    assert result_row(lines["better"])[2] == "+5.00"


def test_rows_are_compared_over_seeds_that_both_have():
    cells = cells_of(TABLE, PLAN, 3)
    known = {("base", 0): 0.5, ("base", 2): 0.7, ("better", 1): 0.1, ("better", 2): 0.8}
    results = {cells[at].key: Result(cells[at], metrics={"top1": score}) for at, score in known.items()}
    better = summarise(TABLE, PLAN, cells, results, {}, 3).lines[1]
    assert better.difference.mean == pytest.approx(0.1)


def test_every_row_is_in_the_report_with_the_papers_figures():
    text = as_markdown(study_of(3))
    assert "# Mine (CvT, table 5)" in text
    assert "| base | 60.00 ± 10.00 % | - | 80.0 | - | base |" in text
    assert "| base | 20 M | - | 20.00 M | 4.57 G | 1.50 M | 25.4 M | 1,234 |" in text
    assert "| better | 65.33 ± 10.50 % | +5.33 [+3.90, +6.77] | 81.5 | +1.5 | larger than noise |" in text
    assert "| absent | - | - | 70.0 | -10.0 | not here: nobody wrote it |" in text
    assert "9 of 12 cells are done" in text


def test_rows_have_the_name_of_what_was_trained():
    """And the paper's beside it, where its network was too large."""
    networks = {**PLAN.networks, "better": Network("small")}
    plan = PLAN.__class__(**{**vars(PLAN), "networks": networks})
    cells = cells_of(TABLE, plan, 1)
    results = {cell.key: Result(cell, metrics={"top1": 0.5}) for cell in cells.values()}
    lines = summarise(TABLE, plan, cells, results, {}, 1).lines
    assert [line.name for line in lines] == ["base", "small (better)", "same", "broken", "absent"]
    assert result_row(lines[1])[0] == "small (better)"


def test_forest_keeps_everything_in_the_picture():
    forest = Forest(study_of(3).lines)
    assert [line.row.name for line in forest.lines] == ["better", "same"]
    for line in forest.lines:
        for value in (line.difference.low, line.difference.mean, line.difference.high):
            assert forest.LEFT <= forest.x(100 * value) <= forest.RIGHT
    assert forest.LEFT <= forest.x(1.5) <= forest.RIGHT  # the paper's


@pytest.mark.parametrize("seeds", [1, 2])
def test_cells_of_a_table(seeds):
    """All rows with the first seed come first; a row can be longer and see less."""
    table = find_table("vitae-efficiency")
    networks = {row.name: Network(f"m{i}") for i, row in enumerate(table.rows)}
    cells = cells_of(table, PLAN.__class__(**{**vars(PLAN), "networks": networks, "fraction": 0.5}), seeds)
    assert [seed for _, seed in cells] == [seed for seed in range(seeds) for _ in table.rows]
    part = cells["ViTAE-T, 20 % of the data", 0]
    assert part.settings["run.epochs"] == part.settings["run.val_epochs"] == 15
    assert part.settings["data.fraction"] == 0.1
    work = {name: cell.settings["run.epochs"] * cell.settings["data.fraction"] for (name, _), cell in cells.items()}
    assert work["ViTAE-T, 60 % of the data"] == pytest.approx(work["ViTAE-T"], rel=1e-4)


# The command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return make_pictures(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture
def mine(tmp_path):
    rows = [{"name": where, "switches": {**CVT, "pos_embed": where}} for where in ("none", "every")]
    rows.append({"name": "third", "missing": "not written yet"})
    (tmp_path / "mine.yaml").write_text(json.dumps({"title": "Mine", "model": "cvt_nano", "rows": rows}))
    return tmp_path / "mine.yaml"


@pytest.fixture
def unmeasured(monkeypatch):
    """Throughputs, which take seconds, are not known."""
    monkeypatch.setattr(
        "weft.study.ablate.plan.measure_throughput", lambda networks, *rest: dict.fromkeys(networks, None)
    )


def test_study_goes_on_and_grows(play, pictures, mine, unmeasured):  # noqa: F811
    study = ["ablate", mine, pictures, "--epochs", 2, "--out", play, "--device", "cpu", "--jobs", 1]
    code, out, err = command(*study, "--seeds", 2)
    assert code == 0, err
    assert "4 of 4  every, seed 1: 10.00%" in out
    assert re.search(r"every +0\.\d\d M .* 5\.00 ± 7\.07 % +\+0\.00 +too few seeds: no verdict", out)
    assert re.search(r"third .*not here: not written yet", out)
    for file in ("table.md", "table.html"):
        assert "not written yet" in (play / file).read_text()
    plan = read_plan(play)
    assert (plan.epochs, plan.recipe, plan.img_size) == (2, "quick", 16)

    code, out, err = command(*study, "--seeds", 3)
    assert code == 0, err
    cells = cells_of(find_table(str(mine)), plan, 3)
    assert [times_trained(play, cell) for cell in cells.values()] == [1] * 6
    refused(command(*study[:3], "--epochs", 3, *study[5:]), str(play), "--epochs 2, not 3", "--out")
    refused(command(*study, "--fraction", 0.5), "--fraction 1.0, not 0.5")
    refused(command(*study, "--optim.lr", 0.5), "settings")
    make_pictures(pictures.parent / "others", seed=1)
    refused(command("ablate", mine, pictures.parent / "others", *study[3:]), "the data")
    (play / "plan.json").write_text("{")
    refused(command(*study), "plan.json", "damaged")


def test_rows_of_an_own_table_may_change(play, pictures, mine, unmeasured):  # noqa: F811
    """Their cells and costs are those of the new network; the other cells stay."""
    study = ["ablate", mine, pictures, "--epochs", 1, "--seeds", 1, "--out", play, "--device", "cpu", "--jobs", 1]
    assert command(*study)[0] == 0
    before = read_plan(play)
    content = json.loads(mine.read_text())
    content["rows"][1]["switches"]["mlp_ratio"] = 1.0
    mine.write_text(json.dumps(content))
    code, out, err = command(*study)
    assert code == 0, err
    assert "rows of the table have changed" in out
    after = read_plan(play)
    assert after.costs["none"] == before.costs["none"]
    network = after.networks["every"]
    shape = dict(num_classes=after.classes, in_chans=after.channels, img_size=after.img_size)
    model = timm.create_model(network.model, device="meta", **shape, **network.switches)
    assert after.costs["every"].parameters == count_parameters(model) < before.costs["every"].parameters
    assert [times_trained(play, cell) for cell in cells_of(find_table(str(mine)), after, 1).values()] == [1, 1]


@pytest.mark.parametrize(("minutes", "recipe"), [(0.5, "quick"), (20, "finetune")])
def test_minutes_become_epochs(play, pictures, mine, unmeasured, minutes, recipe):  # noqa: F811
    """These workers take half a second for a step, and half a second beside it; long trainings have a long recipe."""
    more = ["--out", play, "--device", "cpu", "--jobs", 1, "--run.batch", 8]
    code, out, err = command("ablate", mine, pictures, "--minutes", minutes, "--seeds", 2, *more)
    assert code == 0, err
    assert "a few steps first" in out
    plan = read_plan(play)
    most = (0.92 * 60 * minutes - 4 * 0.5) / (4 * 0.5 * plan.pictures / 8)  # 2 rows with 2 seeds
    assert most - 3 < plan.epochs * plan.fraction <= most
    assert (plan.recipe == "quick") == (recipe == "quick") == (plan.epochs <= 30)


def test_seeds_for_which_there_is_no_time_are_left_out(play, pictures, mine, unmeasured):  # noqa: F811
    study = ["ablate", mine, pictures, "--minutes", 0.001, "--out", play, "--device", "cpu", "--jobs", 1]
    code, out, err = command(*study)
    assert code == 0, err
    assert "too few even for one seed" in out
    assert "4 cells of later seeds had no time left; the same command goes on with them" in out
    assert re.search(r"every .* too few seeds: no verdict", out)
    assert "2 of 6 cells are done. 4 cells of later seeds had no time left" in (play / "table.md").read_text()


def test_failed_cells_are_said(play, pictures, mine, unmeasured):  # noqa: F811
    """These workers fail with three of nine seeds."""
    code, out, err = command(
        "ablate", mine, pictures, "--epochs", 1, "--out", play, "--device", "cpu", "--seeds", 9, "--quiet"
    )
    assert code == 1
    assert re.fullmatch(r"weft: 6 of 18 cells failed; .*table\.md says why.*\n", err)
    assert "bad luck" in (play / "table.md").read_text()
    assert out.startswith("row ")


def test_own_table_is_shown(mine):
    code, out, _ = command("ablate", mine)
    assert code == 0
    assert f"Train it: weft ablate {mine} DATA" in out


def test_tables_are_listed_and_shown():
    code, out, _ = command("ablate")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(table_names())
    assert "CvT, table 5" in out
    code, out, _ = command("ablate", "cvt-embedding")
    assert code == 0
    assert re.search(r"a: patches +19\.5 M +80\.7 % +19\.56 M +4\.43 G +cvt_13 +embed=patch", out)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cvt-positon", "demo:fashion"], ["'cvt-positon'", "cvt-position"]),
        (["cvt-position", "nowhere"], ["nowhere"]),
        (["vt-resnet", "demo:fashion", "--model", "cvt_nano"], ["every row names its own model"]),
        (["cvt-position", "demo:fashion", "--minutes", "5", "--epochs", "2"], ["--epochs", "--minutes"]),
        (["cvt-position", "demo:fashion", "--seeds", "0"], ["seeds=0"]),
        (["cvt-position", "demo:fashion", "--minutes", "-1"], ["minutes"]),
        (["cvt-position", "demo:fashion", "--model", "cvt_nan"], ["'cvt_nan'"]),
        (["cvt-position", "demo:fashion", "--device", "cuda:99"], ["cuda:99"]),
        (["cvt-position", "demo:fashion", "--optim.lrr", "1"], ["optim.lrr"]),
        (["cvt-position", "demo:fashion", "--recipe", "quik"], ["'quik'", "quick"]),
        (["cvt-position", "demo:fashion", "--as-published", "--epochs", "2"], ["--as-published", "--epochs"]),
        (["cvt-position", "demo:fashion", "--as-published", "--model", "nano"], ["--as-published", "--model"]),
        (["cvt-position", "demo:fashion", "--plan"], ["--plan", "--as-published"]),
        (["cvt-position", "demo:fashion", "--init", "."], ["--init", "runs.json"]),
    ],
)
def test_bad_input_is_one_line(tmp_path, options, words):
    refused(command("ablate", *options, "--out", tmp_path / "study"), *words)
    assert not (tmp_path / "study").exists()


# As published, with masks, with weights ------------------------------------------------------------------------------


@pytest.fixture
def unhurried(monkeypatch):
    """A training step of ten pictures takes a second."""
    monkeypatch.setattr("weft.study.ablate.published.time_step", lambda config, classes, count, device: count / 10)


@pytest.fixture
def published(tmp_path):
    rows = [
        {"name": "small", "switches": CVT, "paper": {"top1": 70.25}},
        {"name": "larger pictures", "switches": CVT, "settings": {"augment.img_size": 24}, "init": "small"},
        {"name": "cited", "switches": CVT, "only": "short", "paper": {"top1": 60}},
    ]
    rows[1] |= {"only": "published", "recipe": "finetune"}
    content = {"title": "Mine", "model": "cvt_nano", "columns": ["top1"], "recipe": "demo", "length": 4, "rows": rows}
    (tmp_path / "table.yaml").write_text(json.dumps(content))
    return tmp_path / "table.yaml"


def test_as_published(play, pictures, published, unmeasured, unhurried):  # noqa: F811
    """Each row with its recipe; what it costs comes first; a row that goes on from another waits for it."""
    study = ["ablate", published, pictures, "--as-published", "--out", play, "--device", "cpu", "--jobs", 1]
    code, out, err = command(*study, "--plan")
    assert code == 0, err
    assert not play.exists()
    count = read_count(pictures)
    hours = 4 * count / 10 / 3600
    assert re.search(rf"small +demo +4 +28 +10 +{hours:.4g}\n", out)
    assert re.search(r"larger pictures +finetune +4 +24 +10 ", out)
    assert "cited" not in out
    code, out, err = command(*study)
    assert code == 0, err
    assert "In all about" in out
    assert re.search(r"cited .*cited by the paper, not trained +60\.0 \(-10\.2\)", out)
    first, second = cells_of(find_table(str(published)), read_plan(play), 1).values()
    assert (first.recipe, first.settings["run.epochs"], "model.init" in first.settings) == ("demo", 4, False)
    assert (second.recipe, second.settings["augment.img_size"]) == ("finetune", 24)
    assert second.settings["model.init"] == str(play / "cells" / first.key / "run")
    assert json.loads((play / "runs.json").read_text())["small"] == {"0": f"cells/{first.key}/run"}


def test_as_published_counts_in_steps_where_the_recipe_does(play, pictures, tmp_path, unmeasured, unhurried):  # noqa: F811
    (tmp_path / "own.yaml").write_text("run: {epochs: 4, steps: 7, batch: 4}")
    rows = [{"name": "whole", "switches": CVT}, {"name": "half", "switches": CVT, "epochs": 0.5}]
    content = {"title": "Mine", "model": "cvt_nano", "columns": ["top1"], "recipe": str(tmp_path / "own.yaml")}
    (tmp_path / "table.yaml").write_text(json.dumps({**content, "rows": rows}))
    study = ["ablate", tmp_path / "table.yaml", pictures, "--as-published", "--out", play, "--device", "cpu"]
    code, _, err = command(*study, "--jobs", 1)
    assert code == 0, err
    whole, half = cells_of(find_table(str(tmp_path / "table.yaml")), read_plan(play), 1).values()
    assert (whole.settings["run.steps"], half.settings["run.epochs"]) == (7, 2)
    assert "run.steps" not in half.settings


def test_short_study_leaves_out_what_is_only_published(play, pictures, published, unmeasured):  # noqa: F811
    study = ["ablate", published, pictures, "--epochs", 1, "--out", play, "--device", "cpu", "--jobs", 1]
    code, out, err = command(*study, "--seeds", 1)
    assert code == 0, err
    assert re.search(r"larger pictures .*only --as-published", out)
    assert {name for name, _ in cells_of(find_table(str(published)), read_plan(play), 1)} == {"small", "cited"}


def test_weights_of_another_study(play, pictures, mine, unmeasured, tmp_path):  # noqa: F811
    how = ["--epochs", 1, "--seeds", 2, "--device", "cpu", "--jobs", 1]
    assert command("ablate", mine, pictures, *how, "--out", play)[0] == 0
    code, _, err = command("ablate", mine, pictures, *how, "--out", tmp_path / "second", "--init", play)
    assert code == 0, err
    cells = cells_of(find_table(str(mine)), read_plan(tmp_path / "second"), 2)
    runs = json.loads((play / "runs.json").read_text())
    for (name, seed), cell in cells.items():
        assert cell.settings["model.init"] == str(play / runs[name][str(seed)])


def test_heads_are_counted(play, mine, unmeasured, tmp_path):  # noqa: F811
    """Rows may differ in their heads; costs are those of the whole network."""
    rows = [{"name": head, "settings": {"model.head": head}} for head in ("fpn", "vt-fpn")]
    mine.write_text(json.dumps({"title": "Heads", "model": "cetnet_nano", "rows": rows}))
    squares = make_squares(tmp_path / "squares")
    study = ["ablate", mine, squares, "--epochs", 1, "--seeds", 1, "--out", play, "--device", "cpu", "--jobs", 1]
    code, _, err = command(*study)
    assert code == 0, err
    plan = read_plan(play)
    assert {name: network.head for name, network in plan.networks.items()} == {"fpn": "fpn", "vt-fpn": "vt-fpn"}
    for name, cost in plan.costs.items():
        backbone = timm.create_model("cetnet_nano", num_classes=0)
        assert cost.parameters == count_parameters(make_segmenter(backbone, name, plan.classes))


def read_count(pictures) -> int:
    """Training pictures that `weft ablate` finds in a folder."""
    device = torch.device("cpu")
    return open_study_data({"data.source": str(pictures)}, "", device, lambda line: None).pictures


def test_folders_of_others_are_left_alone(tmp_path, pictures, mine):
    tree(tmp_path / "study", "a.png")
    refused(command("ablate", mine, pictures, "--epochs", 1, "--out", tmp_path / "study"), "holds no study")
    assert [file.name for file in (tmp_path / "study").iterdir()] == ["a.png"]
