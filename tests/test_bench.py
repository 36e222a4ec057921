"""Measuring: what is computed from timings and how it is shown, never how fast anything is."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from docs import performance  # puts benchmarks/ on the path
from tests.small_runs import refused
from weft import bench, compiling
from weft.errors import WeftError
from weft.kernels import choose, measure, switch
from weft.kernels.activation import activation_forward, plain_activation
from weft.kernels.case import Case, all_cases
from weft.kernels.compare import relative_errors
from weft.kernels.op import define

import gpu_models  # isort: skip
from curves import compare  # isort: skip
import speed_table  # isort: skip

CPU = torch.device("cpu")
QUICK = ["--img-size", "32", "--batch", "1", "--seconds", "0.001", "--device", "cpu"]


# weft bench -------------------------------------------------------------------------------------------------------


def contender(name: str, batch: int = 8, error: str = "") -> Any:
    return SimpleNamespace(name=name, error=error, gib=None, settings=bench.Settings(batch=batch))


def test_rows_from_timings():
    """The ratio is that of each round: here the peer is twice as slow in all of them, while the machine slows down."""
    times = {"ours": [0.1, 0.2, 0.8], "peer": [0.2, 0.4, 1.6], "gone": []}
    contenders = [contender("ours"), contender("peer"), contender("gone", error="does not run")]
    ours, peer, gone = bench.make_rows(contenders, times, {"ours": "peer"})
    assert (ours.pictures_per_second, ours.low, ours.high, ours.milliseconds) == (40, 10, 80, 200)
    assert ours.ratio == 2
    assert ours.peer == "peer"
    assert peer.ratio is None
    assert peer.pictures_per_second == 20
    assert gone == bench.Row("gone", error="does not run")


def test_rows_without_a_peer_that_failed():
    (row, _) = bench.make_rows([contender("ours"), contender("peer", error="no")], {"ours": [1.0]}, {"ours": "peer"})
    assert row.ratio is None
    assert row.pictures_per_second == 8


def test_pairs():
    assert bench.pair(["a", "b"], ["x", "y"]) == {"a": "x", "b": "y"}
    assert bench.pair(["a", "b"], ["x"]) == {"a": "x", "b": "x"}
    assert bench.pair(["a", "b"], []) == {}
    with pytest.raises(WeftError, match="3 peers for 2 models"):
        bench.pair(["a", "b"], ["x", "y", "z"])


def test_a_race_takes_turns():
    order = []

    def runner(name: str) -> Any:
        def time(calls: int) -> float:
            order.append((name, calls))
            return 0.01

        return SimpleNamespace(name=name, error="", time=time)

    times = bench.race([runner("a"), runner("b")], seconds=0.3, rounds=3)
    assert times == {"a": [0.01] * 3, "b": [0.01] * 3}
    assert order == [("a", 1), ("b", 1)] + [("a", 10), ("b", 10)] * 3


def test_slow_models_get_fewer_rounds():
    slow = SimpleNamespace(name="slow", error="", time=lambda calls: 2.0)
    assert bench.race([slow], seconds=3.0, rounds=9) == {"slow": [2.0] * bench.LEAST}


def test_columns_without_numbers_are_left_out():
    alone = bench.Row("a", pictures_per_second=8, low=7, high=9, milliseconds=1)
    assert bench.as_table([alone])[0] == ["model", "pictures/s", "range", "ms/batch"]
    assert bench.as_table([alone, bench.Row("b", error="does not run")])[2][-1] == "does not run"


def test_pictures_have_the_first_models_size():
    assert [bench.own_size(name) for name in ("cvt_nano", "cvt_13", "test_resnet")] == [64, 224, 160]


def test_command(command, tmp_path):
    code, out, err = command("bench", "cvt_nano", "--against", "test_resnet", *QUICK, "--json", tmp_path / "b.json")
    assert code == 0, err
    title, header, ours, peer, wrote = out.splitlines()
    assert title.startswith("inference, Weft's models fused, eager, batch 1, 32 pixels, fp32; ")
    assert header.split()[:2] == ["model", "pictures/s"]
    assert ours.startswith("cvt_nano ")
    assert ours.endswith("x  test_resnet")
    assert peer.startswith("test_resnet ")
    assert wrote == f"Wrote {tmp_path / 'b.json'}."
    found = json.loads((tmp_path / "b.json").read_text())
    assert {"date", "machine", "versions", "settings", "rows"} == found.keys()
    assert found["versions"]["torch"] == torch.__version__.split("+")[0]
    assert found["settings"] == dict(
        train=False,
        compile=False,
        replay=False,
        wrap=False,
        batch=1,
        channels=3,
        img_size=32,
        dtype="fp32",
        device="cpu",
        fuse=True,
        kernels=True,
        seconds=0.001,
    )
    row = found["rows"][0]
    assert row["low"] <= row["pictures_per_second"] <= row["high"]
    assert row["pictures_per_second"] == pytest.approx(1000 / row["milliseconds"])
    assert row["ratio"] > 0
    assert row["gib"] is None


def test_command_trains_and_prints_json(command):
    code, out, err = command("bench", "cvt_nano", "--train", "--no-fuse", *QUICK, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found["settings"]["train"]
    assert not found["settings"]["fuse"]
    assert [row["model"] for row in found["rows"]] == ["cvt_nano"]


def test_one_model_that_does_not_fit(command, monkeypatch):
    """Its row says why, and the others are measured."""
    make_model = bench.make_model

    def short_of_memory(name: str, settings: bench.Settings) -> Any:
        if name == "ceit_nano":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_model(name, settings)

    monkeypatch.setattr(bench, "make_model", short_of_memory)
    code, out, _ = command("bench", "ceit_nano", "cvt_nano", *QUICK)
    assert code == 1
    assert "does not fit into memory at batch 1; try a smaller --batch" in out.splitlines()[2]
    assert out.splitlines()[3].startswith("cvt_nano ")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cvt_nan"], ["'cvt_nan'", "Did you mean 'cvt_nano'?"]),
        (["cvt_nano", "--against", "restnet18"], ["'restnet18'", "'resnet18'"]),
        (["hf:cvt-14"], ["hf:cvt-14", "hf:cvt-13, hf:cvt-21"]),
        (["cvt_nano", "--against", "resnet18", "resnet34"], ["2 peers for 1 models"]),
        ([], ["weft models", "--kernels"]),
        (["cvt_nano", "--only", "depthwise"], ["--kernels"]),
        (["--only", "depthwise"], ["--only", "--kernels"]),
        (["cvt_nano", "--device", "mps"], ["--device 'mps'", "cuda:N"]),
        (["cvt_nano", "--device", "nowhere"], ["--device 'nowhere'"]),
        (["cvt_nano", "--dtype", "fp16", "--device", "cpu"], ["fp16", "GPU"]),
        (["cvt_nano", "--replay", "--device", "cpu"], ["--replay", "GPU"]),
        (["cvt_nano", "--seconds", "0"], ["seconds"]),
        (["cvt_nano", "--seconds", "nan"], ["seconds"]),
        (["cvt_nano", "--seconds", "inf"], ["seconds"]),
        (["cvt_nano", "--batch", "0"], ["batch"]),
        (["cvt_nano", "--json", "no/such/folder/f.json"], ["--json"]),
        (["cvt_nano", "--kernels"], ["cvt_nano", "--only"]),
        (["--kernels", "--json", "-"], ["file"]),
    ],
)
def test_mistakes(command, args, words):
    refused(command("bench", *args), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_need_a_gpu(command):
    refused(command("bench", "--kernels"), "GPU")


def test_missing_transformers(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(command("bench", "hf:cvt-13"), "pip install transformers")


# Kernels ----------------------------------------------------------------------------------------------------------

SPEEDS = {"slow": 4e-6, "fast": 1e-6, "wrong": 1e-7, "broken": 1e-7, "unlaunchable": 1e-7}


def _kernel(x: torch.Tensor) -> torch.Tensor:
    how = choose.launch_parameters("fake", x.device, {"how": "slow"}, size=x.numel())["how"]
    if how == "broken":
        raise RuntimeError("out of resource: shared memory")
    return activation_forward(x, "silu" if how == "wrong" else "gelu")


def fake_case() -> Case:
    return Case(
        operation="fake",
        shape={"size": 64},
        inputs=lambda device: (torch.randn(64, device=device).bfloat16(),),
        kernel=_kernel,
        plain=lambda x: plain_activation(x, "gelu"),
        bytes=256,
        candidates=[{"how": how} for how in SPEEDS],
    )


def _clock(call: Any, sets: list[tuple[Any, ...]]) -> float:
    how = choose.launch_parameters("clock", CPU, {"how": "twin"})["how"]
    if how == "unlaunchable":
        raise RuntimeError("too many threads")
    call(*sets[0])
    return SPEEDS.get(how, 8e-6)


def test_the_fastest_right_candidate_is_chosen():
    case = fake_case()
    outcomes: list[Any] = []
    for launch in case.candidates:
        try:
            outcomes.append(relative_errors(case, dict(launch), CPU))
        except RuntimeError as error:
            outcomes.append(str(error))
    finding = measure.measure_case(case, outcomes, measure.Rates(copy=1e9, matrix=1e12), CPU, _clock)
    assert finding.launch == {"how": "fast"}
    assert finding.gain == pytest.approx(8)
    assert finding.floor == pytest.approx(256e-9)
    notes = "\n".join(finding.notes)
    assert "how=wrong: wrong: output 0 by" in notes
    assert "how=broken: out of resource" in notes
    assert "how=unlaunchable: fails: RuntimeError" in notes
    assert "too many threads" in notes
    assert "26%" in next(measure.lines(finding))
    assert (finding.row() or {})["gain"] == 8


def test_no_kernel_is_right():
    """One that is wrong is kept from being used; of those that nobody compared nothing is written."""

    def found(outcomes: list[Any]) -> measure.Finding:
        return measure.measure_case(fake_case(), outcomes, measure.Rates(1e9, 1e12), CPU, _clock)

    wrong = found([[1.0], *["was not compared: no time left"] * 4]).row()
    assert wrong is not None
    assert (wrong["gain"], wrong["launch"]) == (0, {})
    unknown = found(["died"] * 5)
    assert unknown.row() is None
    assert unknown.notes == ["how=slow and 4 more: died"]
    right_but_untimed = found([*["died"] * 4, [0.0]])
    assert right_but_untimed.row() is None


def test_what_nobody_compared_is_reported_and_not_written(tables, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: iter([measure.Finding(fake_case(), 1e-6)]))
    measure.measure_into(tables[0])
    assert not tables[0].exists()
    assert "Nothing was found out about 1" in capsys.readouterr().out


def test_kernels_are_chosen_by_names_that_exist():
    with pytest.raises(WeftError, match=r"'nope'.*depthwise"):
        next(measure.measure(["nope"], CPU))


def test_wrong_values_and_shapes_are_seen():
    case = fake_case()

    def with_kernel(kernel: Any) -> Case:
        return Case("fake", case.shape, case.inputs, kernel, case.plain, 1)

    (error,) = relative_errors(with_kernel(lambda x: plain_activation(x, "gelu") * torch.nan), {}, CPU)
    assert error != error

    def one_wrong_value(x: torch.Tensor) -> torch.Tensor:
        y = plain_activation(x, "gelu")
        y[3] += y.abs().max()
        return y

    assert relative_errors(with_kernel(one_wrong_value), {}, CPU)[0] > 0.9
    with pytest.raises(ValueError, match="where the twin gives"):
        relative_errors(with_kernel(lambda x: (x, x)), {}, CPU)


def test_every_kernel_offers_sound_cases():
    cases, problems = all_cases()
    assert problems == []
    for case in cases:
        assert case.bytes > 0
        assert case.candidates
        assert json.loads(json.dumps([case.shape, *case.candidates])) == [case.shape, *case.candidates]


def test_shipped_rows_are_read():
    """A row with other keys than the launcher asks with would never match, and a parameter it lacks do nothing."""
    shapes: dict[str, list[set[str]]] = {}
    launches: dict[str, set[str]] = {}
    for case in all_cases()[0]:
        shapes.setdefault(case.operation, []).append({*case.shape})
        launches.setdefault(case.operation, set()).update(*case.candidates)
    for operations in json.loads(choose.MEASURED.read_text()).values():
        for operation, rows in operations.items():
            for row in rows:
                assert {*row["shape"]} in shapes.get(operation, []), (operation, row)
                assert {*row["launch"]} <= launches[operation], (operation, row)


@pytest.mark.parametrize(
    ("version", "enough"), [("3.6.0", True), ("3.6rc1", True), ("4.0+git1", True), ("3.5.1", False), ("unknown", False)]
)
def test_versions_of_triton(monkeypatch, version, enough):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    monkeypatch.setattr(switch.importlib.util, "find_spec", lambda name: object())
    assert switch.has_triton.__wrapped__() is enough


def test_too_old_a_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "has_triton", lambda: False)
    assert ".".join(map(str, switch.OLDEST_TRITON)) in measure.why_not()


def test_word_of_the_environment():
    assert switch.wanted("On")
    assert not switch.wanted("off")
    with pytest.raises(WeftError, match="WEFT_KERNELS='bogus'"):
        switch.wanted("bogus")


def test_torch_is_mended_where_it_has_the_fault(monkeypatch):
    class CantSplit(Exception):
        def __init__(self, expr: Any, remaining: Any) -> None:
            super().__init__()

    compiling.mend(SimpleNamespace())  # a torch that has no such thing
    compiling.mend(SimpleNamespace(CantSplit=ValueError))
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(
        compiling.importlib, "import_module", lambda name: seen.append(name) or SimpleNamespace(CantSplit=CantSplit)
    )
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0"))
    compiling.compile_model(torch.nn.Identity())
    assert not seen
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu128"))
    compiling.compile_model(torch.nn.Identity())
    assert seen
    CantSplit()  # pyright: ignore[reportCallIssue]


# The table --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Paths of this machine's table and of Weft's own, both still missing."""
    own, measured = tmp_path / "own" / "kernels.json", tmp_path / "measured.json"
    monkeypatch.setattr(choose, "own_table", lambda: own)
    monkeypatch.setattr(choose, "MEASURED", measured)
    choose.forget()
    yield own, measured
    choose.forget()


def parameters(**shape: Any) -> dict[str, Any]:
    return choose.launch_parameters("op", CPU, {"block": 1, "warps": 4}, **shape)


def test_nearest_row(tables):
    name = choose.gpu_name(CPU)
    assert parameters(rows=10, kind="a") == {"block": 1, "warps": 4}
    for rows, block in ((10, 16), (1000, 64)):
        row = {"shape": {"rows": rows, "kind": "a"}, "launch": {"block": block}, "gain": 2.0}
        choose.write_row(tables[1], name, "op", row)
    assert parameters(rows=20, kind="a") == {"block": 16, "warps": 4}
    assert parameters(rows=500, kind="a")["block"] == 64
    assert parameters(rows=20, kind="b")["block"] == 1  # words must be equal
    assert parameters(rows=20)["block"] == 1


def test_the_twin_where_it_was_faster(tables):
    row = {"shape": {"rows": 10}, "launch": {"block": 16}, "gain": 0.9}
    choose.write_row(tables[1], choose.gpu_name(CPU), "op", row)
    with pytest.raises(choose.TwinIsFaster):
        parameters(rows=12)
    with choose.forced({"block": 2}):
        assert parameters(rows=12)["block"] == 2

    def loses(x: torch.Tensor) -> torch.Tensor:
        parameters(rows=12)
        return x + 1

    slow = define("slow_kernel(Tensor x) -> Tensor", lambda x: x + 2, loses, torch.empty_like)
    assert slow(torch.zeros(1)).item() == 2


def test_own_measurements_come_first(tables):
    row = {"shape": {"rows": 10}, "launch": {"block": 16}, "gain": 2.0}
    choose.write_row(tables[1], choose.gpu_name(CPU), "op", row)
    choose.write_row(tables[0], choose.gpu_name(CPU), "op", {**row, "launch": {"block": 32}})
    assert parameters(rows=10)["block"] == 32
    choose.write_row(tables[0], choose.gpu_name(CPU), "op", {**row, "launch": {"block": 64}})  # replaces its row
    assert parameters(rows=10)["block"] == 64
    assert len(json.loads(tables[0].read_text())[choose.gpu_name(CPU)]["op"]) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"interpreter": {"op": [{"shape": {"rows": 10}}]}}', '{"interpreter": 3}']
)
def test_broken_table(tables, text):
    tables[1].write_text(text)
    assert parameters(rows=10) == {"block": 1, "warps": 4}


def test_forced(tables):
    with choose.forced({"block": 8}):
        assert parameters(rows=10) == {"block": 8, "warps": 4}
        with choose.forced({"warps": 2}):
            assert parameters(rows=10) == {"block": 1, "warps": 2}
        assert parameters(rows=10)["block"] == 8
    assert parameters(rows=10)["block"] == 1


# benchmarks/gpu_models.py and its page ----------------------------------------------------------------------------


class InPlace(gpu_models.Desk):
    """A desk in this process."""

    def ask(self, method: str, *args: Any) -> Any:
        return getattr(self, method)(*args)

    def end(self) -> None:
        pass


PLAN = gpu_models.Plan(
    pairs=(
        speed_table.Pair("vt_resnet_nano", "test_resnet", 1e-9, None, 1e9),
        speed_table.Pair("test_vit", speed_table.PUBLISHED, None, None, 2.5),
    ),
    device="cpu",
    dtype="fp32",
    img_size=32,
    batch=2,
    train_batch=2,
    seconds=0.001,
    rounds=1,
    growing=("vt_resnet_nano",),
    grow_batches=(1, 2),
    grow_sizes=(32, 48),
    grow_batch=1,
)


def test_gpu_models(tmp_path, monkeypatch, capsys):
    path, opened = tmp_path / "results.json", []

    def desks(names: Any, plan: Any) -> Any:
        opened.append(names)
        return {name: InPlace(next(pair for pair in PLAN.pairs if pair.ours == name[0]), plan) for name in names}

    gpu_models.run(PLAN, ["eager", "replayed"], path, desks)
    gpu_models.run(PLAN, ["eager", "train", "growth"], path, desks)
    gpu_models.run(PLAN, ["eager", "train", "growth"], path, desks)  # has nothing left to do
    inference, training = ([(pair.ours, train) for pair in reversed(PLAN.pairs)] for train in (False, True))
    assert opened == [inference, [training[0], inference[1], training[1]], []]
    results = speed_table.load(path)
    assert [(row["part"], row["model"]) for row in results["rows"]] == [
        (part, model)
        for part in ("eager", "replayed", "train")
        for model in ("vt_resnet_nano", "test_resnet", "test_vit")
    ]
    grown = [(row["model"], row["batch"], row["img_size"]) for row in results["growth"]]
    assert grown[::2] == [("vt_resnet_nano", 1, 32), ("vt_resnet_nano", 2, 32), ("vt_resnet_nano", 1, 48)]

    results["rates"] = {"copy": 1e12, "matrix": 1e15}
    losses = {"plain": [2.0, 1.0], "kernels": [2.0, 1.004], "float32": [2.006, 1.0]}
    results["curves"] = {"cvt_nano": compare(losses)}
    path.write_text(json.dumps(results))
    gpu_models.add_floors(path, PLAN)
    results = speed_table.load(path)
    lines = list(speed_table.table(results, PLAN.pairs))
    assert [(line.part, line.pair.ours) for line in lines[:2]] == [("eager", "vt_resnet_nano"), ("eager", "test_vit")]
    assert lines[0].goal == 1e-9
    assert lines[0].ratio
    assert lines[0].floor
    assert lines[0].floor < lines[0].milliseconds
    assert lines[1].ratio is None
    assert lines[2].part == "replayed"
    assert lines[4].goal == 1e9
    assert "0.00 met" in speed_table.cells(lines[0])

    monkeypatch.setattr(performance, "table", lambda results: speed_table.table(results, PLAN.pairs))
    page = performance.fill(performance.PAGE.read_text(encoding="utf-8"), results)
    assert "| `vt_resnet_nano` | `test_resnet` |" in page
    assert "| `cvt_nano` | 0.002 | 0.003 | 0.002 | 0.003 |" in page
    assert performance.fill(page, results) == page

    pytest.importorskip("matplotlib")
    import plot_speed

    (tmp_path / "pictures").mkdir()
    monkeypatch.setattr(plot_speed, "STYLE", {"savefig.dpi": 30})  # the layout takes seconds
    monkeypatch.setattr(plot_speed, "table", lambda results: speed_table.table(results, PLAN.pairs))
    monkeypatch.setattr(sys, "argv", ["plot_speed.py", str(path), "--out", str(tmp_path / "pictures")])
    plot_speed.main()
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {"speed.png", "speed-growth.png", "speed-curves.png"}


def test_page_is_that_of_the_newest_results():
    page = performance.PAGE.read_text(encoding="utf-8")
    assert page == performance.fill(page, speed_table.load(speed_table.newest()))
    for name in performance.TABLES:
        assert f"<!-- {name} -->\n\n<!-- end -->" not in page
        assert f"<!-- {name} -->\n<!-- end -->" not in page


def test_page_without_results():
    page = performance.fill(performance.PAGE.read_text(encoding="utf-8"), {**bench.facts(), "rows": []})
    assert page.count("Not measured yet.") == 2
    assert "Not measured: inference, eager; " in page


@pytest.mark.parametrize(
    ("args", "words"), [(["--models", "cvt_14"], "'cvt_14'"), (["--floors", "--out", "none.json"], "no results")]
)
def test_gpu_models_mistakes(monkeypatch, capsys, tmp_path, args, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu_models.py", *args])
    with pytest.raises(SystemExit) as stop:
        gpu_models.main()
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_models_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_models.py"])
    with pytest.raises(SystemExit):
        gpu_models.main()
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_floor_of_a_convolution_by_hand():
    """3x3, 4 channels to 8 on 5x5 pictures: input, weight and output once; a backward pass is two of the same."""
    from floors import Kernels, floor

    layer = torch.nn.Conv2d(4, 8, 3, padding=1, bias=False, device="meta")
    x = torch.empty(2, 4, 5, 5, device="meta", requires_grad=True)
    with Kernels(size=2) as counter:
        layer(x).sum().backward()
    forward, backward = counter.found
    values = 2 * 4 * 25 + 8 * 4 * 9 + 2 * 8 * 25
    assert (forward.bytes, forward.flops) == (2 * values, 2 * (2 * 8 * 25) * 36)
    assert (backward.bytes, backward.flops) == (2 * (values + 2 * 4 * 25 + 8 * 4 * 9), 2 * forward.flops)
    assert floor([forward], copy=1.0, matrix=1e9) == forward.bytes
    assert floor([forward], copy=1e9, matrix=1.0) == forward.flops


def test_curves_are_compared():
    from curves import RUNS, losses

    found = compare({run: losses("cvt_nano", run, "cpu", 2, 2, 32) for run in RUNS})
    assert {len(values) for values in found["losses"].values()} == {2}
    assert found["apart"]["kernels"] == {"first": 0, "all": 0}  # on a CPU there are none
    assert 0 < found["apart"]["float32"]["all"] < 0.1


def test_curves_apart():
    plain, off = [1.0] * 50, [0.01] * 25 + [0.1] * 25
    found = compare({"plain": plain, "kernels": [a - b for a, b in zip(plain, off, strict=True)], "float32": plain})
    assert found["apart"]["kernels"] == pytest.approx({"first": 0.01, "all": 0.055})
    assert found["apart"]["float32"] == {"first": 0, "all": 0}


def test_goals_are_those_of_known_models():
    names = {name for pair in speed_table.PAIRS for name in pair.names}
    bench.check_names([name for name in names if name not in bench.HUGGING_FACE])
    assert names >= {*bench.HUGGING_FACE}
    assert {pair.ours for pair in speed_table.PAIRS if pair.peer == speed_table.PUBLISHED} == {
        *speed_table.PUBLISHED_STEPS
    }
    assert Path(gpu_models.__file__).parent / "results" == speed_table.RESULTS
