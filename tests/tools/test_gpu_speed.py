"""benchmarks/gpu_speed.py and the tables made of it: all but the speed of a GPU."""

import json
import sys
import threading
from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from tools import performance  # puts benchmarks/ on the path
from weft.models.layers import StochasticDepth
from weft.study.speed.models import HUGGING_FACE, build, check_names
from weft.study.speed.report import facts

import gpu_speed  # isort: skip

FAKE = """
import json, sys, time
model, column, kind = sys.argv[1:]
if model == "broken":
    raise ValueError("no such luck")
if model == "slow":
    time.sleep(60)
print(json.dumps({"first_seconds": 2.5, "gib": 1.5}), flush=True)
for i, line in enumerate(sys.stdin):
    if (model, i) == ("mortal", 1):
        sys.exit("it was too much")
    if line == "kernels\\n":
        print(json.dumps({"kernel_ms": 0.25, "launches": 3}), flush=True)
        continue
    print(json.dumps({"turn": {"peer": 100, "plain": 50}.get(column, 200) * (i + 1)}), flush=True)
"""


@pytest.fixture
def fake(monkeypatch):
    """Processes that answer without measuring."""
    monkeypatch.setattr(gpu_speed, "WORKER", [sys.executable, "-c", FAKE])


def rows(*models: str, kind: str = "train", rounds: int = 3, ready: float = 30.0) -> list[Any]:
    workers = [gpu_speed.Worker(name, kind, column) for name in models for column in ("peer", "plain", "fast")]
    return gpu_speed.race(workers, rounds, ready)


def test_turns_and_ratios(fake):
    results = {"rows": rows("cvt_13")}
    assert gpu_speed.find(results, "cvt_13", "train", "peer")["turns"] == [100, 200, 300]
    assert gpu_speed.find(results, "cvt_13", "train", "fast")["pictures_per_second"] == 400
    assert gpu_speed.find(results, "cvt_13", "train", "plain")["launches"] == 3
    assert gpu_speed.find(results, "cvt_13", "infer", "fast") == {}
    assert gpu_speed.ratio(results, "cvt_13", "train", "plain", "peer") == 0.5
    assert gpu_speed.ratio(results, "cvt_13", "train", "fast", "plain") == 4
    assert gpu_speed.ratio(results, "cvt_13", "train", "replay", "peer") is None
    header, line = gpu_speed.table(results, "train")
    assert header == ["model", "peer", "plain", "fast", "plain/peer", "fast/plain"]
    assert line == ["cvt_13", "200", "100", "400", "0.50", "4.00"]


def test_the_ratio_is_that_of_each_round():
    turns = {"plain": [10.0, 1.0, 8.0], "peer": [5.0, 1.0, 2.0]}  # the machine is slow in the second round
    found = [{"model": "a", "kind": "infer", "column": c, "turns": t, "error": ""} for c, t in turns.items()]
    assert gpu_speed.ratio({"rows": found}, "a", "infer", "plain", "peer") == 2


def test_published_code_stands_in_for_a_peer(fake):
    """Where there is no other; beside one it has a ratio of its own."""
    for name, peer in (("vitae_small", 50), ("ceit_small", 25)):
        speeds = {"plain": 100.0, "published": 50.0} | ({"peer": 25.0} if gpu_speed.PEERS[name] else {})
        found = [{"model": name, "kind": "train", "column": c, "turns": [t], "error": ""} for c, t in speeds.items()]
        assert gpu_speed.ratio({"rows": found}, name, "train", "plain", "peer") == 100 / peer
        assert gpu_speed.ratio({"rows": found}, name, "train", "plain", "published") == 2


@pytest.mark.parametrize("name", gpu_speed.PUBLISHED)
def test_published_code_has_our_sizes(name):
    """As many parameters, and as much that is dropped in training."""

    def kinds(model: Any) -> tuple[int, list[float], list[float]]:
        paths = sorted({round(m.drop_prob, 4) for m in model.modules() if isinstance(m, DropPath | StochasticDepth)})
        dropouts = sorted({m.p for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0})
        return sum(p.numel() for p in model.parameters() if p.requires_grad), paths, dropouts

    with torch.device("meta"):
        assert kinds(gpu_speed.published(name)) == kinds(build(name, 224))


@pytest.mark.parametrize(
    ("model", "ready", "error"),
    [
        ("broken", 30.0, "ended: ValueError: no such luck"),
        ("mortal", 30.0, "ended: it was too much"),
        ("slow", 0.5, "no answer in time"),
    ],
)
def test_one_that_fails_is_left_out(fake, model, ready, error):
    workers = [gpu_speed.Worker("cvt_13", "train", "plain")]
    workers[0].answers.put(workers[0].answers.get())  # it is ready
    ours, failed = gpu_speed.race([*workers, gpu_speed.Worker(model, "train", "plain")], 2, ready)
    assert failed["error"] == error
    assert "pictures_per_second" not in failed
    assert (ours["error"], ours["turns"]) == ("", [50, 100])


def test_interrupted_it_keeps_whole_rounds(fake, monkeypatch):
    monkeypatch.setattr(gpu_speed, "interrupted", threading.Event())
    real, count = gpu_speed.Worker.take_turn, iter(range(100))

    def take_turn(self):
        if next(count) == 4:  # in the second round of three
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(gpu_speed.Worker, "take_turn", take_turn)
    found = rows("cvt_13")
    assert [len(row["turns"]) for row in found] == [1, 1, 1]
    assert {row["column"]: row["pictures_per_second"] for row in found} == {"peer": 100, "plain": 50, "fast": 200}
    args = gpu_speed.arguments(["--train", "--models", "cvt_21"])
    assert list(gpu_speed.measure("train", args)) == []


def test_first_steps_have_empty_caches(monkeypatch):
    code = 'import json, os; print(json.dumps({"first_seconds": 2, "cache": os.environ["TRITON_CACHE_DIR"]}))'
    monkeypatch.setattr(gpu_speed, "WORKER", [sys.executable, "-c", code])
    args = gpu_speed.arguments(["--first", "--models", "cvt_nano", "--columns", "plain", "fast"])
    ((plain, fast),) = gpu_speed.measure("first", args)
    assert plain["cache"] != fast["cache"]
    assert gpu_speed.table({"rows": [plain, fast]}, "first")[1] == ["cvt_nano", "2.0", "2.0"]


def test_groups(fake):
    """Whole models, as many as there are places; what has no peer has no columns of it."""
    words = ["--models", "ceit_tiny", "vitae_tiny", "cvt_13", "--columns", "peer", "published", "plain", "--jobs", "16"]
    found = list(gpu_speed.measure("train", gpu_speed.arguments([*words, "--rounds", "1"])))
    assert [[(row["model"], row["column"]) for row in group] for group in found] == [
        [("ceit_tiny", "peer"), ("ceit_tiny", "published"), ("ceit_tiny", "plain")]
        + [("vitae_tiny", "published"), ("vitae_tiny", "plain")],
        [("cvt_13", "peer"), ("cvt_13", "plain")],
    ]


def test_results_of_other_models_stay():
    def row(model: str, kind: str, column: str) -> Any:
        return {"model": model, "kind": kind, "column": column}

    old = {
        "date": "2026-11-15",
        "rows": [row("a", "train", "plain"), row("a", "infer", "plain"), row("b", "train", "fast")],
    }
    new = gpu_speed.merged(old, [row("a", "train", "fast")])
    assert new == {"date": "2026-11-15", "rows": [*old["rows"][1:], row("a", "train", "fast")]}
    compiled = gpu_speed.merged(new, [row("a", "train", "fast-compiled")])  # from a run of their own
    assert compiled["rows"] == [*new["rows"], row("a", "train", "fast-compiled")]
    assert gpu_speed.merged(compiled, [row("a", "train", "plain-compiled")])["rows"][:-1] == new["rows"]


def test_models_and_peers_are_known(monkeypatch):
    names = [*gpu_speed.PEERS, *filter(None, gpu_speed.PEERS.values())]
    check_names([name for name in names if name not in HUGGING_FACE])
    assert {name for name, peer in gpu_speed.PEERS.items() if not peer} <= {*gpu_speed.PUBLISHED} <= {*gpu_speed.PEERS}
    for kind, pairs in gpu_speed.RATIOS.items():
        assert {column for pair in pairs for column in pair} <= {*gpu_speed.COLUMNS[kind]}


@pytest.mark.parametrize(
    ("column", "kind"),
    [("plain", "train"), ("fast", "train"), ("replay", "train"), ("fuse", "infer"), ("peer", "infer")],
)
def test_a_process_on_the_cpu(monkeypatch, column, kind):
    for name, value in dict(DEVICE="cpu", SIZE=32, BATCH={"train": 2, "infer": 2}).items():
        monkeypatch.setattr(gpu_speed, name, value)
    monkeypatch.setitem(gpu_speed.PEERS, "vt_resnet_nano", "resnet18")
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    step, found = gpu_speed.prepare("vt_resnet_nano", column, kind)
    assert found["first_seconds"] > 0
    assert gpu_speed.turn(step, kind, seconds=0.001) > 0


# tools/performance.py ----------------------------------------------------------------------------------------------


def made_up() -> dict[str, Any]:
    """Three turns of each column, the faster the farther right."""
    found = []
    for name in ("ceit_small", "cvt_13", "vitae_tiny"):
        for kind in gpu_speed.COLUMNS:
            for i, column in enumerate(gpu_speed.columns_of(name, kind)):
                speed = 1000.0 + 500 * i
                row = {"model": name, "kind": kind, "column": column, "error": "", "gib": 4.0 + i}
                row |= {"first_seconds": 2.0 + i, "turns": [speed] * 3, "pictures_per_second": speed}
                row |= {"kernel_ms": 100.0 - i, "launches": 1000 + i}
                found.append(row)
    start = facts()
    return {**start, "machine": {**start["machine"], "gpu": "NVIDIA H200"}, "rows": found}


def test_pages_are_filled():
    results = made_up()
    for page in performance.PAGES:
        text = page.read_text(encoding="utf-8")
        filled = performance.fill(text, results)
        assert performance.fill(filled, results) == filled
    none = performance.NONE
    assert f"| `cvt_13` | 1,000 | {none} | 1,500 | 2,000 | 2,500 | 2.00 | 2.50 |" in filled  # README
    page = performance.fill(performance.PAGES[0].read_text(encoding="utf-8"), results)
    for line in (
        f"| `cvt_13` | 1,000 | {none} | 1,500 | 2,000 | 2,500 | 1.50 | {none} | 1.33 | 2.50 |",
        "| `ceit_small` | 1,000 | 1,500 | 2,000 | 2,500 | 3,000 | 2.00 | 1.33 | 1.25 | 3.00 |",
        f"| `vitae_tiny` | {none} | 1,000 | 1,500 | 2,000 | 2,500 | 1.50 | 1.50 | 1.33 | 2.50 |",
        "| `cvt_13` | 3,000 | 3,500 | 4,000 | 1.17 | 1.33 |",
        "| `cvt_13` | 3.0 |",
        "| `cvt_13` | plain | 85.3 | 99.0 | 1,001 |",
        "| `cvt_13` | peer, compiled | 42.7 | 96.0 | 1,004 |",
        "| model | peer, compiled | plain, compiled | `weft.fast`, compiled | plain to peer | `weft.fast` to peer |",
        "| `weft.fast` to plain | all | at least 1 | 1.25 (`ceit_small`) | where measured |",
        "| plain training, to the peer | `cvt_13`, `vitae_tiny` | at least 1.2 | 1.50 (`cvt_13`) | yes |",
        f"| plain training, to the peer | `cetnet_tiny` | at least 0.6 | {none} | {none} |",
    ):
        assert line in page, line
    assert all(f"<!-- {name} -->" in page for name in performance.TABLES if name != "speed")


def test_pages_are_those_of_the_newest_results():
    path = gpu_speed.newest()
    if path is not None:
        results = json.loads(path.read_text())
        for page in performance.PAGES:
            text = page.read_text(encoding="utf-8")
            assert text == performance.fill(text, results)
