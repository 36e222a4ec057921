"""Hostile masks: each gives one clear line with file, value and count, before anything is trained."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchmetrics.classification import MulticlassConfusionMatrix

from weft.config import DataConfig
from weft.data.check.findings import Problem
from weft.data.check.masks import MaskFindings, check_masks
from weft.data.check.scan import LookLimits
from weft.data.masks.folders import open_masks
from weft.data.sources.renamed import RenamedTargets
from weft.data.sources.source import JoinedReaders, Source
from weft.data.split import make_split
from weft.errors import WeftError

COUNT = 20


def draw(seed: int, height: int = 12, width: int = 16) -> np.ndarray:
    """Values 0 to 3, and 255."""
    return np.random.default_rng(seed).choice(np.array([0, 1, 2, 3, 255], np.uint8), (height, width))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for i in range(COUNT):
        Image.new("RGB", (16, 12), "teal").save(tmp_path / f"images/{i:02}.jpg")
        Image.fromarray(draw(i)).save(tmp_path / f"masks/{i:02}.png")
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")
    return tmp_path


def check(source: Source, **options) -> MaskFindings:
    return check_masks(source, LookLimits(10**6, **options))


def only(findings: MaskFindings, kind: str) -> Problem:
    found = [problem for problem in findings.problems if problem.kind == kind]
    assert len(found) == 1, findings.problems
    assert "\n" not in found[0].text
    return found[0]


def test_clean_set(root: Path) -> None:
    """Pixels of each class as torchmetrics counts them."""
    source = open_masks(str(root))
    findings = check(source)
    assert findings.problems == []
    assert findings.bad == {}
    assert findings.looked_at == COUNT
    metric = MulticlassConfusionMatrix(4, ignore_index=255)
    for i in range(COUNT):
        truth = torch.from_numpy(draw(i)).long()
        metric.update(truth.clamp(max=3), truth)
    assert findings.present is not None
    assert findings.present.tolist() == [[bool((draw(i) == v).any()) for v in range(4)] for i in range(COUNT)]
    assert findings.pixels == metric.compute().sum(1).int().tolist()


def other_value(path: Path) -> None:
    values = draw(3)
    values[0, :7] = 200
    values[1, :2] = 77
    Image.fromarray(values).save(path)


def cut_off(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


HOSTILE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "value": (
        other_value,
        "unknown-values",
        r"values 200 in 7 pixels and 77 in 2 pixels are not classes \(classes are 0 to 3",
    ),
    "size": (lambda p: Image.fromarray(draw(3, 6, 8)).save(p), "mask-size", r"8 x 6 pixels, its picture 16 x 12"),
    "turned": (
        lambda p: Image.fromarray(draw(3).T.copy()).save(p),
        "mask-size",
        r"12 x 16 pixels, its picture 16 x 12",
    ),
    "JPEG": (lambda p: Image.fromarray(draw(3)).save(p, "JPEG"), "jpeg-mask", r"a JPEG, whose values are not exact"),
    "16 bits": (
        lambda p: Image.fromarray(draw(3).astype(np.uint16) * 100).save(p),
        "deep-mask",
        r"values from 0 to 25500",
    ),
    "colours": (
        lambda p: Image.fromarray(np.stack([draw(3), draw(4), draw(5)], -1)).save(p),
        "mixed-masks",
        r"an RGB-coded mask among",
    ),
    "cut off": (cut_off, "unreadable-mask", r""),
    "empty": (lambda p: p.write_bytes(b""), "unreadable-mask", r"not a picture"),
    "text": (lambda p: p.write_text("no mask"), "unreadable-mask", r"not a picture"),
    "bomb": (
        lambda p: Image.new("L", (2000, 2000)).save(p),
        "unreadable-mask",
        r"more than data\.max_pixels=1000000",
    ),
    "gone": (lambda p: p.unlink(), "unreadable-mask", r"No such file"),
}


@pytest.mark.parametrize("harm", HOSTILE)
@pytest.mark.parametrize("quick", [False, True])
def test_hostile_mask(root: Path, harm: str, quick: bool) -> None:
    make, kind, words = HOSTILE[harm]
    source = open_masks(str(root))
    make(root / "masks/03.png")
    findings = check(source, quick=quick)
    problem = only(findings, kind)
    assert problem.severity == "error"  # 5 % of the masks
    assert problem.count == 1
    assert re.search(rf"masks/03\.png: .*{words}", problem.text)
    assert list(findings.bad) == problem.names == ["images/03.jpg"]
    assert findings.looked_at == COUNT
    severity = only(check(source, quick=quick, bad_files=0.1), kind).severity
    assert severity == ("error" if kind == "unknown-values" else "warning")


@pytest.mark.parametrize("harm", [harm for harm in HOSTILE if harm != "gone"])
def test_hostile_mask_that_is_there_from_the_start(root: Path, harm: str) -> None:
    make, kind, _ = HOSTILE[harm]
    make(root / "masks/03.png")
    assert only(check(open_masks(str(root))), kind).names == ["images/03.jpg"]


def test_bad_pictures_are_not_the_fault_of_masks(root: Path) -> None:
    source = open_masks(str(root))
    (root / "images/05.jpg").write_bytes(b"")
    findings = check(source)
    assert (findings.problems, findings.bad, findings.looked_at) == ([], {}, COUNT - 1)


def test_masks_without_classes_and_classes_without_masks(root: Path) -> None:
    Image.new("L", (16, 12), 255).save(root / "masks/00.png")
    Image.new("L", (16, 12), 2).save(root / "masks/01.png")
    (root / "classes.txt").write_text("a\nb\nc\nd\nnever\n")
    findings = check(open_masks(str(root)))
    assert only(findings, "ignored-mask").names == ["images/00.jpg"]
    single = only(findings, "one-class-mask")
    assert (single.details, single.severity) == ({"images/01.jpg": "c"}, "note")
    unseen = only(findings, "unseen-class")
    assert (unseen.names, unseen.severity) == (["never"], "warning")


def test_stray_value_that_became_a_class(root: Path) -> None:
    (root / "classes.txt").unlink()
    other_value(root / "masks/03.png")
    source = open_masks(str(root))
    assert source.classes[-2:] == ["class 77", "class 200"]
    texts = [problem.text for problem in check(source).problems if problem.kind == "rare-class"]
    assert [re.findall(r"'(class \d+)' .* (images/03.jpg): (\d+) pixels", text) for text in texts] == [
        [("class 77", "images/03.jpg", "2")],
        [("class 200", "images/03.jpg", "7")],
    ]


def test_only_one_class(root: Path) -> None:
    for i in range(COUNT):
        Image.new("L", (16, 12), 0).save(root / f"masks/{i:02}.png")
    (root / "classes.txt").unlink()
    source = open_masks(str(root))
    assert "nothing to tell apart" in only(check(source), "one-class").text
    with pytest.raises(WeftError, match="only one class"):  # a mean IoU of 100 % would say nothing
        make_split(source, DataConfig(), 0)


def test_palettes_that_differ(root: Path) -> None:
    for i in range(COUNT):
        image = Image.frombytes("P", (16, 12), draw(i).tobytes())
        image.putpalette([*range(255)] if i != 7 else [*range(100, 255)])
        image.save(root / f"masks/{i:02}.png")
    problem = only(check(open_masks(str(root))), "palette")
    assert problem.severity == "warning"
    assert re.search(r"value 0 is #000102 in 00\.png, #646566 in 07\.png", problem.text)


def test_kinds_that_differ(root: Path) -> None:
    image = Image.frombytes("P", (16, 12), draw(4).tobytes())
    image.putpalette([*range(255)])
    image.save(root / "masks/04.png")
    assert (
        "19 index (such as 00.png) and 1 palette (such as 04.png)" in only(check(open_masks(str(root))), "palette").text
    )


def test_turned_masks_are_noted(root: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (16, 12)).save(root / "images/02.jpg", exif=exif)
    findings = check(open_masks(str(root)))
    assert only(findings, "turned-mask").names == ["images/02.jpg"]
    assert findings.bad == {}


def test_parts_of_sources(root: Path) -> None:
    """As where a second source validates: positions are found in the part they come from."""
    source = open_masks(str(root))
    whole = check(source)
    order = np.arange(COUNT)[::-1]
    source.targets = JoinedReaders(
        [(source.targets, order), (RenamedTargets(source.targets, range(len(source.classes))), order)]
    )
    source.names, source.labels = type(source.names)(f"{i}" for i in range(2 * COUNT)), np.zeros(2 * COUNT, np.int64)
    assert check(source).pixels == [2 * n for n in whole.pixels]


def test_time_that_runs_out(root: Path) -> None:
    calls: list[tuple[int, int]] = []
    findings = check(open_masks(str(root)), quick=True, seconds=0.0, progress=lambda done, of: calls.append((done, of)))
    assert findings.looked_at < COUNT
    assert calls
