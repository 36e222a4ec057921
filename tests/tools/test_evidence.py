"""The page of evidence: its rule, against intervals computed by hand, and what it says of made-up results."""

import argparse
import json
import re
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from tools import evidence  # puts benchmarks/ on the path
from tools.evidence import (
    FAILS,
    HOLDS,
    NOT_RUN,
    OPEN,
    PARTLY,
    Finding,
    gather,
    judge,
    say,
    seconds_of,
    sizes,
    verdict,
    write_page,
)
from weft.config import Config, override
from weft.engine.state import versions
from weft.run.recipes import find_recipe
from weft.run.start import stretch
from weft.study.ablate.tables import find_table
from weft.study.cells.cell import Result, cell_folder

import evidence as program  # isort: skip
from evidence_design import DESIGN, Place, locate, read_design  # isort: skip

BETTER: dict[str, Any] = {"better": "small / CvT", "than": "small / DeiT-T"}
MATCHES: dict[str, Any] = {"matches": "small / CvT", "to": "small / DeiT-T", "within": 0.5}
GPU, CPU = "NVIDIA H200", "CPU, x86_64"


@pytest.fixture(scope="module")
def design():
    return read_design()


def kept(design, place, value, **more):
    """A row as benchmarks/evidence.py writes it."""
    facts: dict[str, Any] = dict(score="top1", parameters=1_230_000, macs=33_000_000, steps=5865, epochs=15, curve=[])
    facts |= dict(seconds=21.5, pictures_per_second=70_000.0, memory=2**30, jobs=6, device=GPU)
    facts["versions"] = {"weft": "0.1.0", "commit": "a" * 40, "torch": "2"}
    return {
        "key": design.key(place),
        **vars(place),
        "value": value,
        **facts,
        "date": "2026-01-01",
        "call": "2026-01-01-120000",
        **more,
    }


def rows(design, row, values, study="small", part=1.0, **more):
    return [kept(design, Place(study, row, part, seed), value, **more) for seed, value in enumerate(values)]


def state(design, check, cvt, deit):
    found = gather(design, [*rows(design, "CvT", cvt), *rows(design, "DeiT-T", deit)])
    return judge(check, design, found).state


def by_hand(values, base):
    """The half of the interval and the mean, by scipy."""
    differences = [a - b for a, b in zip(values, base, strict=True)]
    half = scipy.stats.sem(differences) * scipy.stats.t.ppf(0.975, len(differences) - 1)
    return statistics.fmean(differences), half


@pytest.mark.parametrize("gain", [-0.03, -0.006, -0.003, 0.0, 0.003, 0.006, 0.03])
def test_a_check_is_decided_by_the_interval(design, gain):
    base, values = [0.50, 0.52, 0.51], [0.50 + gain, 0.523 + gain, 0.512 + gain]
    mean, half = by_hand(values, base)
    for check, limit in ((BETTER, 0.0), (MATCHES, -0.005)):
        expected = HOLDS if mean - half > limit else FAILS if mean + half < limit else OPEN
        assert state(design, check, values, base) == expected


def test_one_seed_decides_nothing(design):
    assert state(design, BETTER, [0.9], [0.1]) == OPEN
    assert state(design, BETTER, [0.9, 0.9, 0.9], []) == NOT_RUN


def test_only_seeds_of_both_rows_count(design):
    """Three against two: of the third nothing is known."""
    mean, _ = by_hand([0.60, 0.62], [0.5, 0.5])
    found = gather(design, [*rows(design, "CvT", [0.60, 0.62, 0.10]), *rows(design, "DeiT-T", [0.5, 0.5])])
    difference = judge(BETTER, design, found).difference
    assert difference is not None
    assert difference.mean == pytest.approx(mean)


def test_a_number_is_reached_or_not(design):
    check = {"reaches": "small / CvT", "value": 95.5}
    for values, expected in (
        ([0.960, 0.961, 0.962], HOLDS),
        ([0.950, 0.951, 0.952], FAILS),
        ([0.95, 0.96, 0.96], OPEN),
    ):
        assert judge(check, design, gather(design, rows(design, "CvT", values))).state == expected


def test_macs_are_counted(design):
    check = {"cheaper": "small / CvT", "than": "small / DeiT-T"}
    cheap, dear = rows(design, "CvT", [0.1], macs=1), rows(design, "DeiT-T", [0.1], macs=2)
    assert judge(check, design, gather(design, [*cheap, *dear])).state == HOLDS
    turned = [*rows(design, "CvT", [0.1], macs=2), *rows(design, "DeiT-T", [0.1], macs=2)]
    assert judge(check, design, gather(design, turned)).state == FAILS
    assert judge(check, design, gather(design, cheap)).state == NOT_RUN


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, OPEN], PARTLY),
        ([HOLDS, NOT_RUN], PARTLY),
        ([HOLDS, FAILS], PARTLY),
        ([FAILS, FAILS], FAILS),
        ([FAILS, OPEN], FAILS),
        ([OPEN, NOT_RUN], OPEN),
        ([NOT_RUN, NOT_RUN], NOT_RUN),
    ],
)
def test_a_claim_is_what_its_checks_are(states, expected):
    findings = [Finding("", state) for state in states]
    assert verdict(findings) == verdict(findings[::-1]) == expected


def test_fewer_macs_alone_make_no_claim_hold_partly():
    counted = Finding("", HOLDS, counted=True)
    for state in (NOT_RUN, OPEN, FAILS):
        assert verdict([counted, Finding("", state)]) == state
    assert verdict([counted, Finding("", HOLDS)]) == HOLDS


def test_a_seed_is_compared_on_one_machine(design):
    """A GPU's and a CPU's are no pair; pairs of several machines are named, and a seed counts once."""
    on_gpu, on_cpu = rows(design, "CvT", [0.6, 0.7]), rows(design, "DeiT-T", [0.5, 0.5], device=CPU)
    assert judge(BETTER, design, gather(design, [*on_gpu, *on_cpu])).state == NOT_RUN
    both = [
        *on_gpu,
        *on_cpu,
        *rows(design, "DeiT-T", [0.1], device=GPU),
        *rows(design, "CvT", [0.55, 0.56], device=CPU),
    ]
    found = judge(BETTER, design, gather(design, both))
    mean, half = by_hand([0.55, 0.56], [0.5, 0.5])
    assert found.difference is not None
    assert (found.difference.mean, found.difference.high) == pytest.approx((mean, mean + half))
    assert GPU not in found.text
    more = kept(design, Place("small", "DeiT-T", 1, 2), 0.1), kept(design, Place("small", "CvT", 1, 2), 0.2)
    found = judge(BETTER, design, gather(design, [*both, *more]))
    assert f"seeds of {CPU} and of {GPU}" in found.text


def test_rows_of_several_versions_are_told(design):
    """Of Weft or of what it uses, on either side; not where the seed has no pair."""
    old = {"weft": "0.1.0", "commit": "1" * 40, "torch": "2.11"}
    new = {**old, "commit": "2" * 40}
    one, other = rows(design, "CvT", [0.6, 0.7], versions=old), rows(design, "DeiT-T", [0.5, 0.5], versions=old)
    assert "trained with" not in judge(BETTER, design, gather(design, [*one, *other])).text
    other[1] |= {"versions": new}
    assert "; trained with commit 1111111 and 2222222" in judge(BETTER, design, gather(design, [*one, *other])).text
    assert "trained with" not in judge(BETTER, design, gather(design, [one[0], *other])).text
    one[1] |= {"versions": {**new, "torch": "2.15"}}
    found = judge(BETTER, design, gather(design, [one[1], other[1]]))
    assert found.text.endswith("trained with torch 2.11 and 2.15")


def test_a_cpu_is_known_by_its_model(monkeypatch):
    """Two computers are not one machine for having the same instructions."""
    read = Path.read_text
    text = "processor\t: 0\nmodel name\t: Some Make 9000 @ 3 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text if str(self) == "/proc/cpuinfo" else read(self))
    assert program.machine("cpu") == "CPU, Some Make 9000 @ 3 GHz"


def test_a_failed_training_leaves_its_checks_open(design, tmp_path):
    """And is on the page, until it succeeds."""
    good = [*rows(design, "CvT", [0.70, 0.715, 0.72]), *rows(design, "DeiT-T", [0.60, 0.61, 0.62])]
    failed = {key: good[2][key] for key in ("key", "study", "row", "part", "seed", "device", "date", "call")}
    failed["error"] = "out of | memory"
    found = gather(design, [*good[:2], *good[3:], failed])
    finding = judge(BETTER, design, found)
    assert finding.state == OPEN
    assert "failed" in finding.text
    write_page(design, found, tmp_path / "evidence.md", tmp_path)
    page = (tmp_path / "evidence.md").read_text()
    assert r"| small | CvT | 100% | seed 2 failed: out of \| memory |" in page
    assert judge(BETTER, design, gather(design, [*good, failed])).state == HOLDS


def test_a_training_counts_in_all_studies_that_have_it(design):
    one = kept(design, Place("strides", "b: stride 2", 1), 0.6)
    found = gather(design, [one])
    assert {(study, row) for study, row, _ in found} == {
        ("strides", "b: stride 2"),
        ("positions", "f: CvT-13, none"),
        ("projections", "d: convolution in all stages"),
    }
    planned = [*program.waves(design, design.chosen(["E5"]), set(), options(seeds=1))]
    keys = [design.key(place) for wave in planned for place in wave]
    assert len(keys) == len({*keys}) == 4 + 1 + 1
    assert planned[0][0].study == "positions"


def options(**more):
    usual = dict(seeds=3, device="cpu", work=Path("work"), data=Path("data"), beside="")
    return argparse.Namespace(**{**usual, **more})


def test_what_one_machine_has_of_all_rows_is_not_trained_on_another(design):
    """Of a seed without one of its rows, all are."""
    study = design.studies["few"]
    places = [place for place in study.places(2) if place.part == 0.01]
    done = program.finished(design, [kept(design, place, 0.5, device=CPU) for place in places[:-1]], GPU, 3)
    assert done == {place for place in places if place.seed == 0}
    failed = [{**kept(design, place, 0.5, device=CPU), "error": "why"} for place in places]
    assert not program.finished(design, failed, GPU, 3)
    assert program.finished(design, [kept(design, places[0], 0.5)], GPU, 3) == {places[0]}


def test_both_sides_of_a_check_are_trained_on_one_machine(design):
    """A CPU has all of a study: the rows that another study is compared with are trained on the GPU all the same."""
    few = [place for place in design.studies["few"].places(1) if place.part == 0.05]
    on_cpu = [kept(design, place, 0.5, device=CPU) for place in few]
    compared = {place for place in few if place.row in ("CeiT", "ViTAE", "CvT")}
    assert program.finished(design, on_cpu, GPU, 1) == {*few} - compared
    transferred = [*design.studies["cifar-transferred"].places(1)]
    store = [*on_cpu, *(kept(design, place, 0.6) for place in [*transferred, *compared])]
    assert program.finished(design, store, GPU, 1) == program.finished(design, store, "any", 1) == {*few, *transferred}
    check = next(check for check in design.claims["E8"].checks if check["better"] == "cifar-transferred / CvT")
    assert judge(check, design, gather(design, store)).difference is not None


def test_what_ended_with_the_call_is_kept_and_so_are_failures(design, tmp_path, monkeypatch):
    """A cell that ends in the second in which the time is up; one that fails; not what was left out."""
    one, two, three = [*design.studies["few"].places(1)][:3]
    args = options(out=tmp_path / "out", work=tmp_path, data=tmp_path)
    args.out.mkdir()
    cells = {place: program.on_machine(design, place, args) for place in (one, two, three)}

    def run_cells(work, cells, *, watch, **more):
        done, failed, left = cells
        watch({done.key: "epoch 1.0/9", failed.key: "failed: no memory", left.key: "left out: no time"})
        folder = cell_folder(work, done)
        folder.mkdir(parents=True)
        curve = [{"step": 7, "val_top1": 0.5, "seconds": 90.0}]
        result = Result(done, {"loss": 0.5, "top1": 0.5}, curve, seconds=60.0)
        (folder / "result.json").write_text(json.dumps(asdict(result)))
        raise program.TimeUp

    monkeypatch.setattr(program, "run_cells", run_cells)
    monkeypatch.setattr(program, "costs", lambda *_: (1, 2))
    with pytest.raises(program.TimeUp):
        program.run_wave(design, [*cells], 2, float("inf"), args)
    failed, done = program.read_rows(args.out)
    assert (failed["row"], failed["error"]) == (two.row, "no memory")
    assert (done["row"], done["score"], done["seconds"]) == (one.row, "top1", 90.0)  # of both of its calls
    assert program.finished(design, [failed, done], program.machine("cpu"), 1) == {one}


def test_small_parts_come_first_and_all_rows_of_a_seed_before_the_next(design):
    study = design.studies["few"]
    order = [(place.part, place.seed) for place in study.places(2)]
    assert order == sorted(order)
    assert len(order) == 2 * 2 * len(study.trained)


def test_what_differs_is_said(design):
    for claim in design.claims.values():
        for check in claim.checks:
            text = say(check, design)
            sides = re.split(r" is better than | is at most .* below | has fewer MACs than ", text)
            assert len({*sides}) == 2 or "reaches" in text, text
    check = {"better": "photos-transferred / CvT", "than": "photos / CvT"}
    assert say(check, design) == ("CvT, transferred from cifar10 to imagenette-subset, is better than CvT from scratch")


def test_no_side_has_stochastic_depth_of_its_own(design):
    for study in design.studies.values():
        if len(study.trained) > 1 and study.data != "camvid":
            assert all(study.cell(place).settings["model.drop_path"] == 0 for place in study.places(1)), study.name


@pytest.mark.parametrize("claim", ["E5", "E6", "E9"])
def test_sides_that_are_to_cost_the_same_do(design, claim):
    """Parameters in a tenth; of a host and the same with CE MACs, too."""
    for check in design.claims[claim].checks:
        parameters, macs = ([float(part) for part in cell.split(" / ")] for cell in sizes(check, design))
        assert parameters[0] == pytest.approx(parameters[1], rel=0.1), check
        if claim == "E6":
            assert macs[0] == pytest.approx(macs[1], rel=0.1), check


def test_weights_of_another_training_are_another_training(design):
    """A transfer is known by where its weights are from."""
    place = Place("photos-transferred", "CvT", 1)
    longer = {**design.studies, "small": replace(design.studies["small"], lengths={0.2: 20, 1: 9})}
    assert design.key(place) != replace(design, studies=longer).key(place)


def test_a_row_with_a_part_of_the_pictures_warms_up_as_long(design):
    """Of two runs with equal steps, in steps: the share of the run is the recipe's."""
    study = design.studies["efficiency"]
    shares = set()
    for row in study.trained:
        cell = study.cell(Place("efficiency", row.name, 1))
        given = {"run.steps": 0, **{key: value for key, value in cell.settings.items() if "." in key}}
        config = override(Config(), {**find_recipe(cell.recipe), **given})
        shares.add(round(stretch(config, {*given}, cell.recipe).optim.warmup_epochs / cell.settings["run.epochs"], 6))
    assert len(shares) == 1


def test_every_check_names_rows_that_are_trained(design):
    """And every study an existing table, data and claims; weights come from a study with the same rows."""
    for claim in design.claims.values():
        for check in claim.checks:
            assert judge(check, design, {}).state == NOT_RUN
    for study in design.studies.values():
        assert {*study.claims} <= {*design.claims}
        for place in study.places(1):
            cell = design.studies[place.study].cell(place)
            assert cell.data in design.data
            if study.init:
                assert design.source(place).row in [row.name for row in design.studies[study.init].trained]
    for file in (DESIGN.parent / "tables").glob("*.yaml"):
        find_table(str(file))  # makes each network


def test_rows_of_a_comparison_take_equal_steps(design):
    """But for those that the paper trains longer: epochs times the part of the pictures are the same."""
    for study in design.studies.values():
        for part, epochs in study.lengths.items():
            for row in study.trained:
                settings = study.cell(Place(study.name, row.name, part)).settings
                seen = settings["run.epochs"] * settings["data.fraction"]
                assert seen == pytest.approx(epochs * part * row.epochs * row.fraction, rel=0.01)
                assert row.epochs * row.fraction == pytest.approx(3 if row.name.endswith("3x") else 1, rel=0.01)


def test_places_of_data(tmp_path):
    assert locate("demo:nuclei", tmp_path) == "demo:nuclei"
    assert locate("camvid:camvid", tmp_path) == f"camvid:{tmp_path / 'camvid'}"
    assert locate("cifar10", tmp_path) == str(tmp_path / "cifar10")


def test_results_of_another_design_are_left_out(design):
    found = rows(design, "CvT", [0.6])
    assert gather(design, found)
    study = design.studies["small"]
    changed = replace(design, studies={**design.studies, "small": replace(study, batch=study.batch + 1)})
    assert not gather(changed, found)
    assert not gather(design, [{**found[0], "key": "gone"}])


def test_the_first_look_is_told_and_counts_nowhere(design):
    """Its numbers, on the page, are those of its file, which is not among the results."""
    (file,) = evidence.RESULTS.glob("first-look-*.json")
    looked = json.loads(file.read_text())["rows"]
    values: dict[str, list[float]] = {}
    for row in looked:
        values.setdefault(row["row"], []).append(row["value"])
    paragraph = re.sub(r"\s+", " ", evidence.HEAD.partition("**What was known before.**")[2].partition("\n\n")[0])
    told = re.findall(r"([\w-]+) (?:reached )?(\d\d\.\d)", paragraph)
    assert dict(told) == {name: f"{100 * statistics.fmean(found):.1f}" for name, found in values.items()}
    assert f"{len(looked)} trainings" in paragraph
    assert file.name in paragraph
    assert not gather(design, looked)
    assert not {row["key"] for row in looked} & {row["key"] for row in program.read_rows(evidence.RESULTS)}


def test_rows_that_no_check_names_are_on_the_page(design, tmp_path):
    """With mean and spread, for each part of the pictures."""
    checked = str(design.claims["E9"].checks)
    for row in ("Swin-T", "ConvNeXt"):
        assert row not in checked
        store = [*rows(design, row, [0.30, 0.31, 0.32], study="few", part=0.01), *rows(design, row, [0.7, 0.71, 0.72])]
        write_page(design, gather(design, store), tmp_path / "evidence.md", tmp_path)
        section = (tmp_path / "evidence.md").read_text().partition("## E9: ")[2].partition("## E10: ")[0]
        assert f"| few | {row} | 1% | 31.00 ± 1.00 top1 | 3 |" in section
        assert f"| small | {row} | 100% | 71.00 ± 1.00 top1 | 3 |" in section


def test_each_hybrid_is_compared_with_both_baselines(design):
    """With every part of the pictures that E9 asks about."""
    sides = [(design.parse(check["better"]), design.parse(check["than"])) for check in design.claims["E9"].checks]
    hybrids, parts = {one.row for one, _ in sides}, {one.part for one, _ in sides}
    found = {(one.row, other.row, one.part) for one, other in sides if one.part == other.part}
    assert found == {(row, base, part) for row in hybrids for base in ("DeiT-T", "ResNet-18") for part in parts}


def test_a_page_without_results_has_no_numbers(design, tmp_path):
    write_page(design, {}, tmp_path / "evidence.md", tmp_path)
    page = (tmp_path / "evidence.md").read_text()
    states = re.findall(r"Here: \*\*(.*?)\*\*", page)
    assert states == [NOT_RUN] * len(design.claims)
    assert "±" not in page
    assert not list(tmp_path.glob("*.svg"))


def test_a_page_says_what_the_files_say(design, tmp_path):
    store = [
        *rows(design, "CvT", [0.70, 0.71, 0.72]),
        *rows(design, "DeiT-T", [0.60, 0.61, 0.62]),
        *rows(design, "CvT", [0.30, 0.31, 0.32], study="few", part=0.01, device=CPU, memory=0),
        *rows(design, "CvT", [0.50], study="pace", steps=390),
    ]
    for row in store:
        program.store(tmp_path, row)
    write_page(design, gather(design, program.read_rows(tmp_path)), tmp_path / "evidence.md", tmp_path)
    page = (tmp_path / "evidence.md").read_text()
    assert "| CvT (100%) is better than DeiT-T (100%) | 1.23 / 1.24 | 28.3 / 88.3 | +10.00" in page
    assert re.search(r"\| small \| CvT \| 100% \| 71\.00 ± 1\.00 top1 \| 3 \| 5,865 \| 1\.23 M \| 0\.033 G", page)
    assert re.findall(r"\| few \| (\w+) \| 1% \|.*\| CPU, x86_64, 2026", page)[0] == "CvT"
    assert f"![Accuracy against the part of the training pictures: 1% on {CPU}; 100% on {GPU}]" in page
    assert {file.stem for file in tmp_path.glob("*.svg")} == {"evidence-data", "evidence-seconds"}
    assert "E7: CETNet is a better backbone" in page


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([dict(seconds=10.0, jobs=1), dict(seconds=20.0, jobs=1)], "15"),
        ([dict(seconds=10.0, jobs=2)], "10, 2 at once"),
        ([dict(seconds=10.0, jobs=2), dict(seconds=900.0, jobs=2, beside="tests")], "beside tests"),
    ],
)
def test_seconds_are_told_where_nothing_else_ran(rows, told):
    assert seconds_of(rows) == told


def test_seconds_are_pictures_over_the_pace_alone(design):
    found = gather(
        design,
        [*rows(design, "CvT", [0.7], steps=1000), *rows(design, "CvT", [0.5], study="pace", steps=100, jobs=1)],
    )
    (timed,) = evidence.time_points(design, found)
    batch = design.studies["small"].batch
    assert sorted(timed.points) == [(100 * batch / 70_000, 50.0), (1000 * batch / 70_000, 70.0)]


TINY = """
data:
  clothes: {source: "demo:fashion", pictures: 6000, classes: 10}
claims:
  A: {title: a claim, paper: none, checks: [{better: first / one, than: first / two}]}
studies:
  first: &study
    {claims: [A], table: tiny.yaml, size: nano, data: clothes,
     img_size: 28, batch: 20, recipe: quick, lengths: {0.01: 1}}
  second: {<<: *study, rows: [one], init: first}
"""
TABLE = """
title: two of a kind
rows:
  - {name: one, model: cvt_13, nano: {model: cvt_nano, switches: {depths: [1, 1, 1]}}}
  - {name: two, model: cvt_13, nano: {model: cvt_nano, switches: {depths: [1, 1, 2]}}}
"""


def test_the_program_trains_each_cell_once_and_goes_on(tmp_path, monkeypatch, capsys):
    """Stopped after the first cell, then asked for the rest, among it one that begins with another's weights."""
    file = tmp_path / "design.yaml"
    file.write_text(TINY)
    (tmp_path / "tiny.yaml").write_text(TABLE)
    monkeypatch.setattr("evidence_design.DESIGN", file)
    monkeypatch.setattr(program, "read_design", lambda: read_design(file))

    def call(*more):
        places = ("--data", tmp_path, "--work", tmp_path / "work", "--out", tmp_path / "out", "--device", "cpu")
        monkeypatch.setattr("sys.argv", [*map(str, ("evidence.py", "--seeds", 1, "--jobs", 1, *places, *more))])
        program.main()
        return program.read_rows(tmp_path / "out")

    call("--list")
    assert "first" in capsys.readouterr().out
    assert call("first", "--minutes", 1e-6) == []
    assert "time is up" in capsys.readouterr().out
    first = call("first")
    assert [row["row"] for row in first] == ["one", "two"]
    assert first[0]["steps"] == 3
    assert first[0]["parameters"] < first[1]["parameters"]
    assert {row["device"] for row in first} == {program.machine("cpu")}
    assert first[0]["versions"] == versions()
    assert call()[:2] == first  # kept as they are
    assert [row["study"] for row in call()] == ["first", "first", "second"]
    configs = [json.loads(one.read_text()) for one in (tmp_path / "work" / "cells").glob("*/cell.json")]
    assert len(configs) == 3
    assert [one["settings"]["model.init"] for one in configs if "model.init" in one["settings"]]
