"""`weft search` and what it is made of, with judges and trainings that take no time; the slow test has real ones."""

import json
import sys
from datetime import datetime, timedelta
from functools import cache

import pytest

from tests.helpers.small_runs import command, make_pictures, make_squares, refused
from tests.helpers.variants import CVT
from weft.engine.log import METRICS
from weft.errors import WeftError
from weft.study.cells.cell import Result, cell_folder
from weft.study.search import search as searching
from weft.study.search.plan import SearchPlan, SearchResult, Trial, make_plan, save_plan, short_number
from weft.study.search.prune import is_below_median
from weft.study.search.search import Search, _seconds
from weft.study.search.supernet import Costs

BLOCKS = {"block": {"stride_kv": [1, 2], "mlp_ratio": [2.0, 4.0]}}
ARGS = {**CVT, "depths": [1, 1, 1]}
pytest.importorskip("optuna")


def plan_of(**how) -> SearchPlan:
    common = dict(
        data="demo:fashion", model="cvt_nano", choices=BLOCKS, args=ARGS, recipe="quick", settings={}, validated=100
    )
    shape = dict(shape={"num_classes": 10, "img_size": (16, 16)}, input_size=(3, 16, 16))
    return SearchPlan(**{**common, **shape, **how})


@cache
def costs_of(choices: str) -> Costs:
    """Counted once for all tests."""
    plan = plan_of(choices=json.loads(choices))
    return Costs(plan.space, plan.input_size)


def search_in(folder, plan: SearchPlan, say=lambda text: None) -> Search:
    search = Search(folder, plan, say=say)
    search.score, search.costs = "top1", costs_of(json.dumps(plan.choices))
    return search


def score(search: Search, point) -> float:
    """Accuracy grows with the MACs, and stride 1 in stage 2 is worth more."""
    return round(search.costs.of(point)[1] / 1e7 + (point["stride_kv[1][0]"] == 1) * 0.1, 6)


def explored(folder, plan: SearchPlan, stop_at: int = 0):
    search, calls = search_in(folder, plan), []

    def judge(point):
        calls.append(point)
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return score(search, point)

    return search.explore(judge), calls


def test_a_killed_search_goes_on_as_if_nothing_had_been(tmp_path):
    """The trial that was under way is made again; all proposals are those of a search that was not killed."""
    plan = plan_of(trials=5)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, _ = explored(tmp_path / "whole", plan)
    with pytest.raises(KeyboardInterrupt):
        explored(tmp_path / "cut", plan, stop_at=4)
    rest, calls = explored(tmp_path / "cut", plan)
    assert len(calls) == 5 - 3
    assert [(t.point, t.judged) for t in rest] == [(t.point, t.judged) for t in whole]
    assert len({json.dumps(t.point) for t in whole}) == 5


def test_limits_hold_and_a_small_space_is_judged_whole(tmp_path):
    few = {"model": {"mlp_ratio": [1.0, 2.0, 3.0, 4.0], "stride_kv": [1, 2]}}
    plan = plan_of(choices=few, trials=60)
    costs = costs_of(json.dumps(few))
    both = sorted(costs.of(point) for point in plan.space.all())
    limited = plan_of(choices=few, trials=60, most_parameters=both[4][0], most_macs=max(m for _, m in both) - 1)
    found = search_in(tmp_path, limited).explore(lambda point: 0.5)
    within = [cost for cost in both if cost[0] <= limited.most_parameters and cost[1] <= limited.most_macs]
    assert sorted((t.parameters, t.macs) for t in found) == within
    assert 0 < len(within) < 8


def test_a_search_that_ends_early_says_why(tmp_path, monkeypatch):
    said, costs = [], costs_of(json.dumps(BLOCKS))
    monkeypatch.setattr(searching, "TRIES", 6)
    smallest = costs.of(costs.extremes()[0])[1]
    search = search_in(tmp_path, plan_of(trials=30, most_macs=smallest), said.append)
    found = search.explore(lambda point: 0.5)
    assert len(found) < 30
    assert f"6 proposals in a row were over the limits or already known: {len(found)} networks were" in said[-1]
    (tmp_path / "short").mkdir()
    search = search_in(tmp_path / "short", plan_of(trials=30, keep=2, minutes=1e-6), said.append)
    assert len(search.explore(lambda point: 0.5)) == 3
    assert said[-1] == "the time for this step is up: 3 networks were judged, not 30"


def test_time_between_two_sittings_is_no_time_of_the_search(tmp_path):
    """A trial that was killed in the evening, and found in the morning."""
    import optuna

    begun = optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING)
    begun.datetime_start = datetime.now() - timedelta(hours=10)
    search_in(tmp_path, plan_of()).study.add_trial(begun)
    study = search_in(tmp_path, plan_of()).study
    assert study.get_trials(states=(optuna.trial.TrialState.FAIL,))[0].duration > timedelta(hours=9)
    assert _seconds(study) == 0


# Trainings that are stopped early -----------------------------------------------------------------------------------

PEERS = [[0.1, 0.1 * i, 0.9] for i in range(1, 6)]  # the median after two epochs is 0.3


@pytest.mark.parametrize(
    ("curve", "peers", "answer"),
    [
        ([0.1, 0.29], PEERS, True),
        ([0.1, 0.31], PEERS, False),
        ([0.5, 0.29], PEERS, False),  # it was better before
        ([0.0], PEERS, False),  # the first epoch says too little
        ([0.1, 0.0], PEERS[:4], False),  # and so do four others
    ],
)
def test_worse_than_the_median(curve, peers, answer):
    assert is_below_median(curve, peers) == answer


EPOCHS = 8


def trained_step_by_step(good: int, kill_at: int = 0):
    """Trainings that write a score after each epoch: 80 % at the end of the first `good` ones, 10 % of the others."""
    begun = []

    def run(study, cells, *, watch=None, **how):
        (cell,) = cells
        begun.append(cell)
        if len(begun) == kill_at:
            raise KeyboardInterrupt
        last, file = (0.8 if len(begun) <= good else 0.1), cell_folder(study, cell) / "run" / METRICS
        file.parent.mkdir(parents=True)
        for epoch in range(1, cell.settings["run.epochs"] + 1):
            row = {"kind": "epoch", "epoch": epoch, "step": epoch, "val_top1": last * epoch / EPOCHS}
            with open(file, "a", encoding="utf-8") as rows:
                rows.write(json.dumps(row) + "\n")
            watch({cell.key: "running"})
        return [Result(cell, {"top1": row["val_top1"]})]

    return run


def stopped_in(folder, monkeypatch, good: int, **how) -> list[Trial]:
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(searching, "run_cells", trained_step_by_step(good, **how))
    search = search_in(folder, plan_of(trials=13, epochs=4 * EPOCHS, supernet=False))
    return search.explore(search.cell_score)


def test_bad_trainings_are_stopped_early(tmp_path, monkeypatch):
    """After the second epoch, where five that cost no more were better; a cheap one never for what costs more.

    And all is the same after a kill.
    """
    found = stopped_in(tmp_path / "whole", monkeypatch, good=8)
    assert len(found) == 13
    for i, trial in enumerate(found):
        peers = [other for other in found[:i] if not other.stopped and other.macs <= trial.macs]
        hopeless = i >= 8 and len(peers) >= 5 and sorted(p.judged for p in peers)[len(peers) // 2] > 0.1
        assert trial.stopped == (2 if hopeless else 0)
    stopped = [trial for trial in found if trial.stopped]
    assert stopped
    assert all(trial.judged == pytest.approx(0.1 * 2 / EPOCHS) for trial in stopped)
    assert not set(map(id, SearchResult(plan_of(), found, "top1").front())) & set(map(id, stopped))

    with pytest.raises(KeyboardInterrupt):
        stopped_in(tmp_path / "cut", monkeypatch, good=8, kill_at=12)
    rest = stopped_in(tmp_path / "cut", monkeypatch, good=0)
    assert [(t.point, t.judged, t.stopped) for t in rest] == [(t.point, t.judged, t.stopped) for t in found]


# What is trained at the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epochs", "among", "answer"),
    [(30, 6, (5, 1.0, 6)), (7, 6, (1, 1.0, 6)), (3, 6, (1, 0.5, 6)), (0.5, 6, (1, 0.1, 5)), (0.05, 6, (1, 0.1, 1))],
)
def test_a_budget_is_shared(epochs, among, answer):
    """A tenth of an epoch is the least that makes sense."""
    assert searching.share_epochs(epochs, among, least=0.1) == answer


def test_more_networks_do_not_change_those_that_are_trained(tmp_path):
    """The supernet had 12 epochs in its time; six networks share them, and so it stays."""
    rows = [{"kind": "step", "step": step, "epoch": step / 100} for step in (600, 1200)]
    (tmp_path / "supernet").mkdir()
    (tmp_path / "supernet" / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert search_in(tmp_path, plan_of(minutes=9, keep=6)).final_budget() == (2, 1.0, 6)
    assert search_in(tmp_path, plan_of(minutes=9, keep=12)).final_budget() == (2, 1.0, 12)
    assert search_in(tmp_path, plan_of(epochs=20, keep=12)).final_budget() == (20, 1.0, 12)


def test_limits_that_nothing_keeps_are_told_at_once(tmp_path):
    with pytest.raises(WeftError, match=r"the smallest has 20.7 k parameters"):
        search_in(tmp_path, plan_of(most_parameters=1000)).run()


def trained_at_once(study, cells, *, watch=None, **how):
    """Cells whose score is that of their order."""
    if watch:
        watch({cell.key: "done" for cell in cells})
    metrics = [{"top1": 0.5 + i / 100, "n": 100} for i in range(len(cells))]
    return [Result(cell, each) for cell, each in zip(cells, metrics, strict=True)]


def test_one_network_alone_is_drawn(tmp_path):
    """Judged and trained it lies at one place, so that neither axis has a length of its own."""
    trial = Trial({name: choices[0] for name, choices in plan_of().space.parameters.items()}, 10**7, 10**8, 0.5)
    trial.trained = 0.5
    searching.write_result(tmp_path, SearchResult(plan_of(), [trial], "top1", epochs=1))
    assert "</svg>" in (tmp_path / "search.html").read_text()


def test_what_is_found_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(searching, "run_cells", trained_at_once)
    plan = plan_of(trials=5, keep=3, supernet=False, objective="parameters")
    found = search_in(tmp_path, plan).run()
    content = json.loads((tmp_path / "search.json").read_text())
    assert content["size_of_space"] == 64
    assert [row["judged"] for row in content["trials"]] == [0.5] * 5
    assert len(found.trained) == 4  # three, and the model as it is: all were judged alike, and it is the costliest
    assert sum("as it is" in row["what"] for row in content["trials"]) == 1
    best = max(found.trained, key=lambda t: t.trained)
    assert best in found.front()
    page = (tmp_path / "search.html").read_text()
    assert "--model.args.stride_kv" in page
    assert all((tmp_path / f"pareto.{ending}").stat().st_size > 1000 for ending in ("png", "svg"))


def test_a_folder_of_another_search_is_refused_and_more_trials_are_not(tmp_path):
    save_plan(tmp_path, plan_of(trials=5))
    save_plan(tmp_path, plan_of(trials=50))
    with pytest.raises(WeftError, match="holds another search: its objective is 'macs'"):
        save_plan(tmp_path, plan_of(objective="parameters"))


@pytest.mark.parametrize(("number", "text"), [(18209192, "18.2 M"), (5077193728, "5.08 G"), (950, "950")])
def test_amounts(number, text):
    assert short_number(number) == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--params", "many"], ("--params many", "18M")),
        (["--macs", "0"], ("--macs 0",)),
        (["--trials", "0"], ("trials",)),
        (["--minutes", "2", "--epochs", "3"], ("--minutes",)),
        (["--no-supernet", "--inherit"], ("--inherit",)),
        (["--model", "cvt_31"], ("There is no model 'cvt_31'",)),
        (["--model", "resnet18"], ("no search space for resnet18",)),
        (["--model", "cvt_nano", "--space", "nowhere.yaml"], ("nowhere.yaml",)),
    ],
)
def test_bad_input_gets_one_line(tmp_path, arguments, words):
    refused(command("search", "demo:fashion", "--out", tmp_path / "out", *arguments), *words)
    assert not (tmp_path / "out").exists()


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(command("search", "demo:fashion", "--out", tmp_path / "out"), "pip install 'weft[search]'")
    assert not (tmp_path / "out").exists()


def test_data_that_are_not_to_be_classified(tmp_path):
    refused(command("search", "demo:nuclei", "--model", "cvt_nano", "--out", tmp_path / "out"), "--no-supernet")


def test_masks_are_searched_without_a_supernet(tmp_path):
    """The networks are backbones, whose cells are trained under the head."""
    how = dict(recipe="", space="", say=lambda line: None, supernet=False, epochs=4)
    plan = make_plan(str(make_squares(tmp_path / "squares")), "cvt_nano", {}, **how)
    assert (plan.shape["num_classes"], plan.settings["model.head"]) == (0, "fpn")
    search = Search(tmp_path / "search", plan)
    search.check_limits()
    assert search.cell(plan.space.default, 1).settings["model.head"] == "fpn"


def small_search(tmp_path, trials: int, *more: object):
    pictures = tmp_path / "pictures"
    if not pictures.exists():
        make_pictures(pictures)
    args = [word for key, value in ARGS.items() for word in (f"--model.args.{key}", json.dumps(value))]
    short = ["--epochs", 1, "--trials", trials, "--keep", 2, "--img-size", 16, "--device", "cpu", "--jobs", 1]
    short += ["--run.batch", 8, "--model", "cvt_nano"]
    return command("search", pictures, "--recipe", "quick", "--out", tmp_path / "out", *short, *args, *more)


def test_from_pictures_to_page_with_a_supernet(tmp_path, monkeypatch):
    """The supernet is trained for real, and judges by its weights."""
    monkeypatch.setattr(searching, "run_cells", trained_at_once)
    code, out, err = small_search(tmp_path, 3)
    assert code == 0, err
    assert "supernet: 64 networks" in out
    assert out.count("trial ") == 3
    assert "no other network trained is better and cheaper" in out
    assert (tmp_path / "out/search.html").exists()


def test_networks_that_fail_are_said(tmp_path, monkeypatch):
    def all_but_one(study, cells, **how):
        first, *others = trained_at_once(study, cells, **how)
        return [Result(first.cell, error="does not run"), *others]

    monkeypatch.setattr(Search, "train_supernet", lambda self: None)
    monkeypatch.setattr(Search, "subnet_score", lambda self, point: self.take_score({"top1": score(self, point)}))
    monkeypatch.setattr(searching, "run_cells", all_but_one)
    code, out, err = small_search(tmp_path, 3)
    assert (code, err) == (1, "weft: 1 network could not be trained; the same command tries again.\n")
    assert "Wrote " in out


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--inherit"], ["--no-supernet"]])
def test_with_real_trainings(tmp_path, how):
    code, _, err = small_search(tmp_path, 3, *how)
    assert code == 0, err
    trained = [row for row in json.loads((tmp_path / "out/search.json").read_text())["trials"] if row["run"]]
    assert len(trained) >= 2
    assert all((tmp_path / "out" / row["run"] / "model.safetensors").exists() for row in trained)
    code, out, err = small_search(tmp_path, 4, *how)  # more trials: nothing is done twice
    assert code == 0, err
    assert out.count("trial ") == 1
    assert "supernet: " not in out
