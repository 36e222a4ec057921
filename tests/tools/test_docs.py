"""The documentation: commands, code and links work; pictures are what the script draws, legible, true to the counts."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from datetime import date
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import timm
import torch
from PIL import ImageFont
from torch import Tensor, nn

import weft
from tests.helpers.places import ROOT
from tools import flow
from tools.draw import draw
from weft.catalog.cost import count_macs, count_parameters
from weft.cli.app import app, take_keys
from weft.config import known_keys
from weft.data.check.check import check
from weft.data.sources.open import open_source
from weft.models.registry import FAMILIES
from weft.run.recipes import recipe_file
from weft.run.train import SHORT, name_settings

DOCS = ROOT / "docs"
PAGES = [*(DOCS.parent / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.glob("*.md"))]
PICTURES = [path for path in sorted((DOCS / "pictures").glob("*.svg")) if path.stem != "step"]  # which is a chart
MODELS = [path for path in PICTURES if timm.is_model(path.stem)]
SVG = "{http://www.w3.org/2000/svg}"


pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
pictures = pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
pictures_of_models = pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)


@cache
def parsed(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


def groups(path: Path, *kinds: str) -> list[ElementTree.Element]:
    return [group for group in parsed(path).iter(f"{SVG}g") if group.get("class") in kinds]


def edges(rect: ElementTree.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def span(text: ElementTree.Element) -> tuple[float, float]:
    """Where a text begins and ends in an ordinary font, which is not the one that the script measures."""
    font = ImageFont.load_default(size=float(text.attrib["font-size"]))
    length = font.getlength(text.text or "")
    start = (
        float(text.attrib["x"]) - {"start": 0, "middle": length / 2, "end": length}[text.get("text-anchor", "start")]
    )
    return start, start + length


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_page_with_pictures(family):
    """A page that points at the family's file and shows a picture; `docs/models.md` and the index lead to it."""
    code = Path(FAMILIES[family].__file__ or "").relative_to(ROOT).as_posix()
    (page,) = [page for page in DOCS.glob("*.md") if f"](../{code})" in page.read_text()]
    shown = re.findall(r"\(pictures/(\w+)\.svg\)", page.read_text())
    assert shown
    assert {*shown} <= {path.stem for path in MODELS}
    for leading in ("models.md", "index.md"):
        assert f"({page.name})" in (DOCS / leading).read_text()


@pages
def test_links_lead_somewhere(page):
    """Files exist, and so do the headings that links point at."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(), flags=re.MULTILINE)
            titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
            assert anchor in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_index_leads_to_every_page():
    """And docs/ holds pages only, and what they show."""
    named = {*re.findall(r"\]\((\w+\.md)[)#]", (DOCS / "index.md").read_text())}
    assert named == {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    assert {path.name for path in DOCS.iterdir()} == {*named, "index.md", "pictures"}


def test_map_is_complete():
    """CONTRIBUTING names every file of the package under its folder, and none that is not there.

    Each line has names and, after two blanks or more, a remark. What `name/` holds stands below it, further in.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("    weft/\n")[2].partition("    tests/")[0]
    named: dict[str, set[str]] = {"weft": set()}
    folders = ["weft"]
    for line in text.splitlines():
        names = line.strip().partition("  ")[0].split()
        del folders[(len(line) - len(line.lstrip())) // 2 - 2 :]
        named.setdefault("/".join(folders), set()).update(name.removesuffix("/") for name in names)
        folders += [names[0].removesuffix("/")]
    files = {path for path in (ROOT / "weft").rglob("*.py") if path.stem != "__init__"}
    for path in [*files, *{path.parent for path in files}]:
        home = path.parent.relative_to(ROOT).as_posix()
        if home not in ("weft/kernels/ops", "weft/kernels/triton", "."):  # operations are many, a file for each
            assert path.stem in named[home], path
    for home, names in named.items():
        there = {path.name.removesuffix(".py") for path in (ROOT / home).iterdir()}
        assert names <= there, home


def test_paths_and_names_of_contributing_exist():
    """`weft/files.py` is there, and `NAME` in `weft/files.py` is in it; NAME stands for what somebody adds."""
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    paths = re.findall(r"`((?:weft|tests|tools|docs|benchmarks)/[\w./-]*)`", text)
    assert len(paths) > 40
    for path in paths:
        assert (ROOT / path).exists() or "NAME" in path, path
    pairs = re.findall(r"`(\w+)`(?: \(and `\w+`\))? (?:in|of) `((?:weft|tests)/[\w/]+\.py)`", text)
    assert len(pairs) > 10
    for name, path in pairs:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), (name, path)


def test_changelog_has_this_version():
    """A place for what comes next, then dated versions, the newest of them this one, each once and in order."""
    first, *rest = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first == "Unreleased"
    found = [re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d)\)", title) for title in rest]
    numbers = [tuple(map(int, match.groups()[:3])) for match in found if match]
    dates = [date.fromisoformat(match[4]) for match in found if match]
    assert len(numbers) == len(rest) > 0
    assert numbers == sorted({*numbers}, reverse=True)
    assert dates == sorted(dates, reverse=True)
    assert ".".join(map(str, numbers[0])) == weft.__version__


def test_every_picture_is_shown():
    shown = {
        (page.parent / found).resolve() for page in PAGES for found in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    }
    assert {path.resolve() for path in (DOCS / "pictures").rglob("*") if path.is_file()} <= shown


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every `weft ...` in code blocks and in sentences, without the remark behind it."""
    text = re.sub(r"\$\w+", "0", text.replace("\\\n", " "))  # lines that go on are one; variables are numbers here
    lines = re.findall(r"^ *(?:torchrun .*|srun .*)?(?:-m )?weft +(.+)$", text, flags=re.MULTILINE)
    inline = [span.partition("weft ")[2] for span in re.findall(r"`((?:torchrun .* )?weft [^`]+)`", text)]
    for line in [*(re.split(r"  +|\t", line)[0] for line in lines if "`" not in line), *inline]:
        words = shlex.split(line, comments=True)
        yield words[: next((i for i, word in enumerate(words) if word in (">", "|")), None)]


@pages
def test_commands_exist(page):
    """Every command line parses: options exist and values have the right type; so do settings, recipes and models."""
    text = page.read_text()
    assert {key for key in re.findall(r"--([a-z]+\.\w+)", text) if key != "section.key"} <= {*known_keys()}
    for words in commands(text):
        assert words[0] in app, words
        if len(words) == 1 or "--help" in words:
            continue
        command, bound, _ = app.parse_args(take_keys(words), exit_on_error=False, print_error=False)
        given = bound.arguments
        settings = dict(key.split("=", 1) for key in given.get("keys", ()))
        if command.__name__ == "train":
            settings |= {key: value for key, value in given.items() if key in SHORT}
        named = name_settings(settings)  # raises for an unknown one
        if given.get("recipe", "").islower() and not given["recipe"].endswith(".yaml"):
            assert recipe_file(given["recipe"]).exists()
        assert timm.is_model(named.get("model.name", "cvt_13")), words


def test_commands_are_found():
    """The test above looks at what it should: lines, sentences, remarks, torchrun, lines that go on."""
    text = "    weft keys lr     those of lr\nsee `weft train A --lr 1`,\n"
    text += "```sh\nweft eval R  # x\ntorchrun -n 2 \\\n -m weft train B\n```"
    assert sorted(commands(text)) == [["eval", "R"], ["keys", "lr"], ["train", "A", "--lr", "1"], ["train", "B"]]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pages
def test_code_compiles(page):
    """Python blocks are Python, take from Weft what it has, and give `weft.train` settings that exist."""
    for block in python_blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft":
                module = importlib.import_module(node.module or "")
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "weft":
                assert hasattr(weft, node.attr), ast.unparse(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "weft.train":
                own = ("recipe", "config", "out", "resume", "allow_changes", "quiet")
                name_settings({k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg and k.arg not in own})


@pytest.mark.parametrize(("page", "task"), [("segmentation", "segment"), ("detection", "detect")])
def test_tutorials_make_the_data_that_they_speak_of(page, task, tmp_path, monkeypatch):
    """The first block writes a folder, which `weft check` finds to be as the page shows it, but for the time."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text()
    exec(python_blocks(DOCS / f"{page}.md")[0], {})
    source = open_source("cells")
    report = check(source, None)
    assert source.task == task
    assert "\n".join(report.lines()[:-1]) in text
    assert report.verdict().partition("(")[0] in text


def test_networks_of_the_tutorials_answer():
    values: dict[str, Any] = {}
    exec(python_blocks(DOCS / "segmentation.md")[-1], values)
    assert values["logits"].shape == (1, 19, 90, 120)  # as the remark says
    with torch.no_grad():
        exec(python_blocks(DOCS / "detection.md")[-1].replace("480, 640", "64, 96"), values)
    assert {*values["found"]} == {"boxes", "labels", "scores", "masks"}
    assert values["found"]["masks"].shape[1:] == (1, 28, 28)


@pictures_of_models
def test_is_what_the_script_draws(path):
    assert draw(path.stem) == path.read_text(encoding="utf-8"), f"stale: run `python -m tools.draw {path.stem}`"


@pictures_of_models
def test_counts(path):
    model = timm.create_model(path.stem, device="meta").requires_grad_(False)  # counting is then quicker
    parameters, macs = count_parameters(model), count_macs(model, model.pretrained_cfg["input_size"])
    boxes = groups(path, "box")
    assert sum(int(box.get("data-parameters", 0)) for box in boxes) == parameters
    assert sum(int(box.get("data-macs", 0)) for box in boxes) == macs
    words = [text.text or "" for text in parsed(path).iter(f"{SVG}text")]
    assert any(f"{parameters:,} parameters" in line and f"{macs:,} MACs" in line for line in words)


@pictures
def test_text_fits(path):
    boxes = groups(path, "box", "cell")
    assert len(boxes) > 8
    for box in boxes:
        left, top, right, bottom = edges(box[0])
        lines: dict[float, list[tuple[float, float]]] = {}
        for text in box.iter(f"{SVG}text"):
            start, end = span(text)
            assert left <= start, text.text
            assert end <= right, text.text
            assert top < float(text.attrib["y"]) < bottom, text.text
            lines.setdefault(float(text.attrib["y"]), []).append((start, end))
        for spans in lines.values():  # texts of one line do not run into each other
            spans.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(spans)), [t.text for t in box]


@pictures
def test_boxes_do_not_overlap(path):
    root = parsed(path)
    rects = [edges(box[0]) for box in groups(path, "box", "cell")]
    for a, b in combinations(rects, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert all(left > 0 and right < float(root.attrib["width"]) for left, _, right, _ in rects)
    assert all(top > 0 and bottom < float(root.attrib["height"]) for _, top, _, bottom in rects)


def words_of(name: str) -> list[list[str]]:
    return [[t.text or "" for t in box.iter(f"{SVG}text")] for box in groups(DOCS / "pictures" / f"{name}.svg", "box")]


def test_cvt_shows_its_stages():
    boxes = words_of("cvt_13")
    blocks = [box for box in boxes if "Block" in box]
    assert [next((word for word in box if "×" in word and word[0] == "×"), "× 1") for box in blocks] == [
        "× 1",
        "× 2",
        "× 10",
    ]
    assert sum("ConvEmbed" in box for box in boxes) == 3
    assert any("cls_token" in box for box in boxes)


def test_ceit_shows_the_way_of_the_class_token():
    texts = [text.text for text in parsed(DOCS / "pictures" / "ceit_tiny.svg").iter(f"{SVG}text")]
    assert "class tokens of 12 blocks, 12 × 192" in texts
    assert any("LCA" in box for box in words_of("ceit_tiny"))
    assert any("Image2Tokens" in box for box in words_of("ceit_tiny"))


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1) @ x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.conv = nn.LayerNorm(4), Inner(), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.inner(self.norm(x))
        return y + self.conv(y.transpose(1, 2)).transpose(1, 2)


def test_flow_of_data_is_seen():
    """Shortcuts, parallel branches and products are read off a network that the script has never met."""
    root = flow.watch(Outer().to("meta"), (5, 4))
    norm, inner, first, conv, second = root.children
    assert [node.title for node in root.children] == ["LayerNorm", "Inner", "+", "Conv1d", "+"]
    assert set(norm.sources) == {root}
    assert set(inner.sources) == {norm}
    assert set(first.sources) == {root, inner}
    assert set(conv.sources) == {first}
    assert set(second.sources) == {first, conv}
    assert set(root.ends) == {second}
    q, k, product, out = inner.children
    assert set(q.sources) == set(k.sources) == {inner}
    assert set(product.sources) == {q, k, inner}
    assert product.title == "matmul, softmax, matmul"
    assert [node.kind for node in (q, k, product, out, conv, norm)] == [*["attention"] * 4, "convolution", "norm"]
    assert root.macs == 3 * 5 * 16 + 2 * 5 * 5 * 4 + 5 * 4 * 4 * 3
