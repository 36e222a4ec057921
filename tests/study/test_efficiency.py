"""`weft bench --compare`: which trainings there are, and what is made of them."""

import json

import pytest
import timm

from tests.helpers.small_runs import command, make_squares, refused
from weft.catalog.cost import count_parameters
from weft.heads import make_segmenter
from weft.study.cells.cell import Result
from weft.study.cells.setup import StudySetup, prepare_study
from weft.study.efficiency import compare as comparing
from weft.study.efficiency.compare import compare
from weft.study.efficiency.comparison import Design

MODELS = {"cvt_nano": {"depths": [1, 1, 1]}, "ceit_nano": {"depth": 2}}
COMMON = StudySetup(
    "demo:fashion",
    "quick",
    {"data.fraction": 0.5},
    MODELS,
    classes=10,
    channels=1,
    size=(28, 28),
    pictures=3000,
    validated=100,
)


def design(**how) -> Design:
    return Design(**{"common": COMMON, "epochs": (10, 20, 30), "fractions": (0.2, 0.6, 1.0), **how})


def test_equal_budgets():
    """As in ViTAE: five times the epochs with a fifth of the pictures; and the training on all of them is made once."""
    cells = {training: design().cell(*training) for training in design().trainings()}
    parts = [cell.settings for (_, kind, _, _), cell in cells.items() if kind == "pictures"]
    steps = [each["run.epochs"] * each["data.fraction"] for each in parts]
    assert steps == pytest.approx([5.0] * 6, rel=1e-5)  # ten epochs of half of the pictures
    assert cells["cvt_nano", "pictures", 0.2, 0].settings["run.epochs"] == 50
    assert len(cells) == 12
    assert len({cell.key for cell in cells.values()}) == 10
    same = {
        json.dumps(cell.settings, sort_keys=True)
        for (_, kind, x, _), cell in cells.items()
        if (kind, x) == ("epochs", 20)
    }
    assert len(same) == 1  # for both models


@pytest.mark.parametrize("epochs", [1, 2, 5, 7, 10])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.6, 0.9, 1.0])
def test_a_part_of_the_pictures_is_seen_as_often_as_all(epochs, part):
    """Epochs are whole, so the part is what gives way: 60 % for 1.67 epochs are 50 % for two."""
    made = design(epochs=(epochs, 50), fractions=(part,))
    (cell,) = (made.cell("cvt_nano", "pictures", x, 0) for x in made.axes["pictures"])
    assert cell.settings["run.epochs"] * cell.settings["data.fraction"] == pytest.approx(0.5 * epochs, rel=1e-5)
    assert cell.settings["data.fraction"] == pytest.approx(0.5 * part, rel=0.5 / epochs)


def test_parts_that_become_the_same_are_trained_once():
    assert design(epochs=(1,), fractions=(0.5, 0.6, 1.0)).axes["pictures"] == (0.5, 1.0)


def test_differences_are_of_the_seeds_that_both_have(tmp_path, monkeypatch):
    """One model fails with its first seed, the other with its last."""
    scores = {("cvt_nano", 0): 0.1, ("cvt_nano", 1): 0.5, ("ceit_nano", 1): 0.5, ("ceit_nano", 2): 0.9}

    def some_fail(study, cells, **how):
        found = [scores.get((cell.model, cell.seed)) for cell in cells]
        curve = [{"epoch": 1, "step": 7, "val_top1": 0.1}]
        return [
            Result(cell, error="no luck") if top1 is None else Result(cell, {"top1": top1}, curve)
            for cell, top1 in zip(cells, found, strict=True)
        ]

    monkeypatch.setattr(comparing, "run_cells", some_fail)
    found = compare(tmp_path, design(seeds=3))
    assert found.difference("ceit_nano", "cvt_nano", "epochs", 10).mean == 0
    content = json.loads((tmp_path / "compare.json").read_text())
    assert content["models"]["ceit_nano"]["epochs"][0]["by_seed"] == {"1": 0.5, "2": 0.9}


SCORES = {"cvt_nano": 0.6, "ceit_nano": 0.5}


def trained_at_once(study, cells, *, watch=None, **how):
    """Scores that grow with the epochs; the second seed is better by 0.02."""
    results = []
    for cell in cells:
        top1 = SCORES[cell.model] + cell.settings["run.epochs"] / 1000 + 0.02 * cell.seed
        curve = [{"epoch": e + 1, "step": 1234, "val_top1": top1 * (e + 1) / 3} for e in range(3)]
        results.append(Result(cell, {"top1": top1, "n": 100}, curve))
    return results


def test_numbers_of_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "run_cells", trained_at_once)
    found = compare(tmp_path, design(seeds=2))
    content = json.loads((tmp_path / "compare.json").read_text())
    cvt = content["models"]["cvt_nano"]
    assert [row["mean"] for row in cvt["epochs"]] == pytest.approx([0.62, 0.63, 0.64])
    assert [row["sd"] for row in cvt["pictures"]] == pytest.approx([0.02 / 2**0.5] * 3)
    assert cvt["curve"][-1] == [3, pytest.approx(0.63)]
    assert [d["mean"] for d in content["differences"]] == pytest.approx([-0.1] * 6)
    assert {d["model"] for d in content["differences"]} == {"ceit_nano"}
    assert found.line("ceit_nano", "epochs")[0] == (10, pytest.approx(0.52))
    page = (tmp_path / "compare.html").read_text()
    assert "20% of the pictures, 50 epochs" in page
    assert "1,234" in page  # steps
    assert "3,000 training pictures" in page
    assert all((tmp_path / f"compare.{ending}").stat().st_size > 1000 for ending in ("png", "svg"))


def test_a_model_that_fails_is_named_and_the_others_are_shown(tmp_path, monkeypatch):
    def one_fails(study, cells, **how):
        good = trained_at_once(study, cells)
        return [Result(r.cell, error="no memory") if r.cell.model == "ceit_nano" else r for r in good]

    monkeypatch.setattr(comparing, "run_cells", one_fails)
    found = compare(tmp_path, design())
    assert found.errors == ["ceit_nano: no memory"]
    assert found.line("ceit_nano", "epochs") == []
    assert "no memory" in (tmp_path / "compare.html").read_text()


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(comparing, "run_cells", trained_at_once)
    code, out, err = command(
        "bench", *SCORES, "--compare", "demo:fashion", "--epochs", "1,2", "--out", tmp_path / "out"
    )
    assert code == 0, err
    assert "100% of the pictures, 2 epochs" in out
    assert "-10.00" in out
    assert (tmp_path / "out/compare.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cvt_nano", "--compare", "demo:fashion"], ("two or more",)),
        (["cvt_nano", "cvt_nano", "--compare", "demo:fashion"], ("two or more",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--epochs", "2.5"], ("--epochs 2.5", "10,20,30")),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--fractions", "0,1"], ("--fractions",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--train"], ("--train",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--json", "-"], ("--json",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--dtype", "bf16"], ("--dtype",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--seconds", "3"], ("--seconds",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--no-fuse"], ("--no-fuse",)),
        (["cvt_nano", "ceit_nano", "--compare", "demo:fashion", "--no-fast"], ("--no-fast",)),
        (["cvt_nano", "ceit_nano", "--jobs", "2"], ("--jobs", "--compare DATA")),
        (["cvt_nano", "ceit_nano", "--epochs", "3"], ("--compare DATA",)),
        (["cvt_nano", "ceit_nanoo", "--compare", "demo:fashion"], ("ceit_nanoo",)),
    ],
)
def test_bad_input_gets_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(command("bench", *arguments), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("layout", "head"), [("masks", "fpn"), ("coco", "mask-rcnn")])
def test_masks_and_boxes_are_compared_under_one_head(tmp_path, layout, head):
    """Costs hold the head; of a detector, more than the backbone's."""
    data = str(make_squares(tmp_path / layout, layout))
    common = prepare_study(data, ["cetnet_nano", "cvt_nano"], {}, "", lambda line: None)
    assert (common.head, common.settings["model.head"]) == (head, head)
    for model in common.models:
        parameters, macs = comparing.count_cost(common, model)
        backbone = timm.create_model(model, num_classes=0)
        assert macs > 0
        assert parameters > 2 * count_parameters(backbone)
        if layout == "masks":
            assert parameters == count_parameters(make_segmenter(backbone, head, common.classes))
    found = design(common=common)
    assert {found.cell(*training).settings["model.head"] for training in found.trainings()} == {head}
