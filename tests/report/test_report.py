"""The report page: its figures are the evaluation's, nothing in it runs or loads what a name says, any run has one."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn import metrics as sk

import weft
from weft.config import Config, DataConfig, override
from weft.data.check.check import DataReport, Problem, check
from weft.data.preprocessing import Preprocessing
from weft.data.sources.open import open_source
from weft.data.split import Split, make_split
from weft.engine.log import read_rows
from weft.heads.folder import open_model
from weft.report.charts import line_chart, nice_ticks
from weft.report.overlay import visible
from weft.report.run import History, RunReport, curves, data_name, write_report
from weft.tasks.classify.evaluate import ClassifyEvaluation
from weft.tasks.classify.report import classify_values

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a & b", "tur\u202ened\n", "{{ 7 * 7 }}"]
VOID = {"meta", "img", "br", "line", "circle", "polyline", "path"}


class Page(HTMLParser):
    """The tags of a page with their attributes, the text under each, and the rows of its tables."""

    def __init__(self, html: str):
        super().__init__()
        self.html, self.open, self.tags, self.texts = html, [], [], []
        self.rows: dict[str, list[list[str]]] = {}  # of the table(s) in each section
        self.section = ""
        self.feed(html)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.section = dict(attrs).get("id") or self.section if tag == "section" else self.section
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[self.section][-1][-1] += data
        if data.strip() and self.open[-1] not in ("style", "script"):
            self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def data_report(classes: list[str], problems: list[Problem] | None = None, bad: dict[str, str] | None = None) -> Any:
    sizes = dict.fromkeys(("min", "median", "max"), 32.0)
    return DataReport(
        root="pictures",
        layout="class folders",
        quick=True,
        multilabel=False,
        pictures=60,
        looked_at=60,
        classes=classes,
        sides={},
        counts={},
        channels=3,
        depth=8,
        width=sizes,
        height=sizes,
        sizes=[],
        formats={"PNG": 60},
        modes={},
        notes=[],
        problems=problems or [],
        bad=bad or {},
    )


def make_run(
    folder: Path,
    *,
    classes: list[str],
    n: int = 60,
    multilabel: bool = False,
    channels: int = 3,
    dtype: Any = np.uint8,
    size: int = 32,
    epochs: int = 3,
    events: tuple[str, ...] = (),
    names: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Page, ClassifyEvaluation]:
    """The report of a run that never was: `n` noise pictures, logits that lean to the truth."""
    rng, c = np.random.default_rng(0), len(classes)
    run = folder / "run"
    model = weft.create_model("ceit_nano", num_classes=c, in_chans=channels, img_size=32)
    weft.save_model(model, run, label_names=classes)
    labels = rng.random((n, c)) < 0.3 if multilabel else rng.integers(0, c, n)
    truth = labels if multilabel else np.eye(c)[labels]
    logits = (rng.normal(size=(n, c)) + 2 * truth).astype(np.float32)
    names = names or [f"{i}.png" for i in range(n)]
    pixels = rng.integers(0, 1000 if dtype == np.uint16 else 256, (n, size, size, channels)).astype(dtype)
    source = SimpleNamespace(
        classes=classes,
        names=names,
        labels=labels,
        multilabel=multilabel,
        layout="class folders",
        notes=[],
        open=lambda i: pixels[i],
        task="classify",
    )
    split = Split(train=np.arange(n // 2), val=np.arange(n), test=np.arange(0))
    depth = 8 if dtype == np.uint8 else 16
    mean = (0.5,) * channels
    preprocessing = Preprocessing((size, size), channels, depth, mean, mean, "bicubic", 1.0, "squash", 10**6)
    rows = [{"kind": "event", "step": 2, "text": text} for text in events]
    for epoch in range(1, epochs + 1):
        score = {"val_map": 0.4, "val_f1": 0.3} if multilabel else {"val_top1": 0.5 + epoch / 100, "val_top5": 0.9}
        common = {"lr": 0.001, "pictures_per_second": 99.0}
        step = {"kind": "step", "step": epoch * 5, "epoch": epoch - 0.5, "loss": 1 / epoch, "grad_norm": None}
        done = {"kind": "epoch", "step": epoch * 5, "epoch": epoch, "train_loss": 1 / epoch, "val_loss": 2 / epoch}
        rows += [step | common, done | common | score | {"seconds": 61.0, "best": epoch == epochs}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = ClassifyEvaluation(names=names, classes=classes, multilabel=multilabel, logits=logits, labels=labels)
    values = {"data.source": "pictures/tiny", "model.name": "ceit_nano", "run.epochs": epochs, "optim.lr": 0.002}
    arguments = {
        "config": override(Config(), values | (settings or {})),
        "evaluation": evaluation,
        "source": source,
        "split": split,
        "preprocessing": preprocessing,
        "augmented": SimpleNamespace(
            pictures=torch.from_numpy(rng.integers(0, 256, (8, channels, size, size)).astype(np.uint8))
        ),
        "data_report": data_report(classes),
        "command": "weft train pictures/tiny",
        "predictor": SimpleNamespace(model=open_model(run)[0]),
    }
    facts = RunReport(run, rows, **(arguments | changes))
    path = write_report(facts, lambda facts: ("report.html.j2", classify_values(facts)))
    assert path == run / "report.html"
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "metrics.jsonl", "model.safetensors", "report.html"]
    return Page(path.read_text(encoding="utf-8")), evaluation


def tile(page: Page, name: str) -> str:
    """The large figure above its name."""
    return page.texts[next(i for i, text in enumerate(page.texts) if text.startswith(name)) - 1]


def test_every_figure_is_that_of_the_evaluation(tmp_path: Path) -> None:
    classes = ["cat", "dog", "owl", "bee", "elk", "fox", "yak"]
    page, evaluation = make_run(tmp_path, classes=classes, n=300)
    truth, said = evaluation.labels, evaluation.logits.argmax(1)
    top1 = sk.accuracy_score(truth, said)
    assert tile(page, "top-1") == f"{100 * top1:.1f} %"
    top5 = sk.top_k_accuracy_score(truth, evaluation.logits, k=5, labels=range(7))
    assert tile(page, "top-5") == f"{100 * top5:.1f} %"
    assert tile(page, "validation pictures") == "300"
    assert f"about {100 * top1:.0f} would be named correctly" in page.text

    precision, recall, f1, support = sk.precision_recall_fscore_support(truth, said)
    table = {row[0]: row[1:] for row in page.rows["classes"] if len(row) == 5}
    for i, name in enumerate(classes):
        assert table[name] == [str(support[i])] + [f"{100 * v[i]:.1f} %" for v in (precision, recall, f1)]
    order = [row[0] for row in page.rows["classes"] if len(row) == 5][1:]
    assert order == [classes[i] for i in np.argsort(f1, kind="stable")]

    matrix = [row for row in page.rows["classes"] if len(row) == 8][1:]
    assert [[int(cell or 0) for cell in row[1:]] for row in matrix] == sk.confusion_matrix(truth, said).tolist()
    weakest = recall.argmin()
    hits = np.sum((truth == weakest) & (said == weakest))
    assert f"The weakest class is {classes[weakest]}: {hits} of its {support[weakest]} pictures are found." in page.text

    wrong = np.flatnonzero(truth != said)
    sure = torch.from_numpy(evaluation.logits).double().softmax(1).amax(1).numpy()
    surest = wrong[sure[wrong].argmax()]
    shown = next(attrs["title"] for tag, attrs in page.tags if tag == "figure" and attrs.get("class") == "wrong-one")
    assert shown == f"{surest}.png"
    counts = {row[0]: row[1:3] for row in page.rows["data"] if len(row) == 4}
    for i, name in enumerate(classes):
        assert counts[name] == [str((truth[:150] == i).sum()), str((truth == i).sum())]
    assert ["optim.lr", "0.002"] in [row[:2] for row in page.rows["settings"]]


def test_names_are_text_whatever_they_say(tmp_path: Path) -> None:
    names = [f"{HOSTILE[i % 5]}{i}" for i in range(60)]
    problem = Problem("warning", "odd", HOSTILE[0], HOSTILE, dict.fromkeys(HOSTILE, HOSTILE[1]), count=5)
    page, _ = make_run(
        tmp_path,
        classes=HOSTILE,
        names=names,
        events=tuple(HOSTILE),
        data_report=data_report(HOSTILE, [problem], dict.fromkeys(HOSTILE, HOSTILE[1])),
        command=f"weft train {HOSTILE[0]}",
        settings={"data.source": HOSTILE[0], "model.args.x": HOSTILE[1]},
    )
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    for tag, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        assert tag != "img" or attrs["src"].startswith("data:image/")
    assert "49" not in [text.strip() for text in page.texts]  # the template did not compute 7 * 7
    assert "\u202e" not in page.html
    assert all(any(name in row for row in page.rows["classes"]) for name in HOSTILE[:3])


def test_it_loads_nothing(tmp_path: Path) -> None:
    page, _ = make_run(tmp_path, classes=["a", "b"])
    assert not re.search(r"https?:|url\(|@import", page.html)
    links = [value for _, attrs in page.tags for name, value in attrs.items() if name in ("href", "src", "srcset")]
    assert all(link.startswith(("#", "data:image/")) for link in links)
    anchors = {attrs["id"] for tag, attrs in page.tags if "id" in attrs}
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    assert str(tmp_path) not in page.html


def test_many_labels_have_average_precision_in_place_of_confusion(tmp_path: Path) -> None:
    page, evaluation = make_run(tmp_path, classes=list("abcd"), multilabel=True, n=100)
    scores = [sk.average_precision_score(evaluation.labels[:, i], evaluation.logits[:, i]) for i in range(4)]
    assert tile(page, "mean average precision") == f"{np.mean(scores):.3f}"
    rows = {row[0]: row[2] for row in page.rows["classes"]}
    assert {name: rows[name] for name in "abcd"} == {n: f"{100 * s:.1f} %" for n, s in zip("abcd", scores, strict=True)}
    assert "Confusion matrix" not in page.texts


def test_a_thousand_classes(tmp_path: Path) -> None:
    page, _ = make_run(tmp_path, classes=[f"class number {i}" for i in range(1000)], n=400, size=224)
    assert len(page.html) < 2_500_000
    assert "Confusion matrix" not in page.texts
    assert "Most confused" in page.texts
    assert len([row for row in page.rows["classes"] if len(row) == 5]) == 1001


def test_one_epoch(tmp_path: Path) -> None:
    page, _ = make_run(tmp_path, classes=["a", "b"], epochs=1)
    assert tile(page, "epoch, best") == "1"
    assert "1.02 min training time" in page.text
    drawn = [attrs for tag, attrs in page.tags if tag in ("polyline", "circle", "line")]
    assert len(drawn) > 20
    assert not re.search(r"nan|inf", str(drawn))


def test_what_happened_on_the_way_is_told(tmp_path: Path) -> None:
    text = "the loss was not finite at step 2: rolled back"
    problem = Problem(
        "error", "leak", "2 pictures are on both sides.", ["x.png", "y.png"], {"x.png": "= z.png"}, count=2
    )
    report = data_report(["a", "b"], [problem], {"torn.png": "truncated"})
    settings = {"run.epochs": 9}
    page, _ = make_run(tmp_path, classes=["a", "b"], epochs=2, settings=settings, events=(text,), data_report=report)
    assert text in page.texts
    assert "Training ended after 2 of 9 epochs." in page.texts
    assert {problem.text, "x.png: = z.png", "y.png"} <= set(page.texts)
    assert tile(page, "files left out") == "1"


@pytest.mark.parametrize(("channels", "dtype"), [(1, np.uint8), (5, np.uint8), (3, np.uint16), (1, np.uint16)])
def test_any_kind_of_picture_is_shown(tmp_path: Path, channels: int, dtype: Any) -> None:
    page, _ = make_run(tmp_path, classes=["a", "b"], channels=channels, dtype=dtype)
    pictures = [attrs["src"] for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) >= 24 + 8
    assert not any(attrs.get("class") == "missing" for _, attrs in page.tags)


def test_a_file_that_has_gone_leaves_a_gap(tmp_path: Path) -> None:
    def gone(i: int) -> Path:
        return tmp_path / "gone.png"

    source = SimpleNamespace(
        classes=["a", "b"], names=[f"{i}.png" for i in range(60)], labels=np.zeros(60, np.int64), multilabel=False
    )
    source.layout, source.notes, source.open, source.task = "a table", [], gone, "classify"
    page, _ = make_run(tmp_path, classes=["a", "b"], source=source)
    assert any(attrs.get("class") == "missing" for _, attrs in page.tags)


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    for i in range(20):
        file = tmp_path / "pictures" / ["cat", "dog"][i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (i * 10, 90, 40)).save(file)
    source = open_source(str(tmp_path / "pictures"))
    split = make_split(source, DataConfig(val_fraction=0.5), seed=0)
    labels = source.labels[split.val]
    names = [source.names[i] for i in split.val]
    logits = np.eye(2, dtype=np.float32)[labels]
    page, _ = make_run(
        tmp_path,
        classes=["cat", "dog"],
        source=source,
        split=split,
        evaluation=ClassifyEvaluation(names, source.classes, False, logits, labels),
        data_report=check(source, split, quick=True, config=DataConfig()),
    )
    assert tile(page, "top-1") == "100.0 %"
    assert "No class has a mistake." in page.text
    assert not any(attrs.get("class") == "missing" for _, attrs in page.tags)
    assert ["cat", "5", "5"] in [row[:3] for row in page.rows["data"]]


def test_plain_pictures_are_shown_as_they_are_and_dark_ones_stretched() -> None:
    plain = torch.arange(3 * 4 * 4, dtype=torch.uint8).reshape(3, 4, 4)
    assert (visible(plain) == plain.permute(1, 2, 0).numpy()).all()
    assert visible(plain[:1]).shape == visible(plain[:2]).shape == (4, 4, 1)
    dark = torch.linspace(0, 0.01, 10_000).reshape(1, 100, 100)  # 16 bit, of which few are used
    seen = visible(dark)
    assert (seen.dtype, seen.min(), seen.max()) == (np.uint8, 0, 255)
    bands = torch.stack([torch.linspace(0, top, 100).reshape(10, 10) for top in (1, 10, 250, 9, 9)]).to(torch.uint8)
    assert (visible(bands).max((0, 1)) == 255).all()
    assert visible(torch.full((1, 4, 4), float("nan"))).shape == (4, 4, 1)


def test_steps_that_were_repeated_count_once(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": s, "epoch": s / 2, "loss": loss} for s, loss in ((1, 9.0), (2, 8.0), (2, 7.0))]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text + '{"kind": "ste')
    assert [row["loss"] for row in History.of(read_rows(tmp_path / "metrics.jsonl")).steps] == [9.0, 7.0]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/home/me/pictures/birds/", "birds"),
        ("birds.csv", "birds.csv"),
        ("cifar10:/data/sets", "cifar10"),
        ("demo:fashion", "demo:fashion"),
        ("C:\\birds", "C:\\birds"),
    ],
)
def test_data_are_called_by_their_last_name(source: str, name: str) -> None:
    assert data_name(source) == name


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 10))
def test_ticks_are_round_even_and_enclose_the_values(low: float, span: float, most: int) -> None:
    high = low + span
    if high - low < 1e-9 * abs(low):
        return
    ticks = np.array(nice_ticks(low, high, most))
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= high - 1e-6 * span
    assert len(ticks) <= most + 2
    step = np.diff(ticks)
    assert np.allclose(step, step[0], rtol=1e-3)
    digit = step[0] / 10 ** np.floor(np.log10(step[0] * 1.001))
    assert min(abs(digit - round_one) for round_one in (1, 2, 5)) < 1e-2


@given(st.lists(st.one_of(st.floats(allow_infinity=True, allow_nan=True), st.just(0.0)), max_size=900))
def test_any_values_make_a_chart_inside_its_box(values: list[float]) -> None:
    values = [v if abs(v) < 1e30 else float("nan") for v in values]
    chart = line_chart("title", {"line": list(enumerate(values))})
    if chart is None:
        assert not np.isfinite(values).any()
        return
    points = [p for line in chart.lines for piece in line.pieces for p in piece.split(" ")]
    assert points
    for point in points:
        x, y = map(float, point.split(","))
        assert chart.left <= x <= chart.right
        assert 0 <= y <= chart.bottom
    assert len(points) <= 400


def test_scores_have_a_linear_axis_whatever_they_span():
    """Average precision begins near nothing; on a logarithmic axis a run seems to be over after an epoch."""
    scores = [0.0001, 0.01, 0.12, 0.23, 0.34]
    rows = [
        {"kind": "epoch", "step": i, "epoch": i, "best": i == 4, "val_box_ap": score, "lr": 0.1}
        for i, score in enumerate(scores)
    ]
    chart = curves(History.of(rows), {"box AP": "val_box_ap"})["score"]
    assert chart is not None
    heights = [dot.y for dot in chart.lines[0].dots]
    assert np.polyfit(scores, heights, 1, full=True)[1] < 1  # on a straight line
    assert np.allclose(
        np.diff([tick.at for tick in chart.y_ticks]), chart.y_ticks[1].at - chart.y_ticks[0].at, atol=0.2
    )
