"""`weft check`: every planted problem is found and named, clean data raises no alarm, and nothing is written."""

import hashlib
import io
import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image, ImageCms, ImageEnhance
from rich.console import Console

from weft.cli.app import main
from weft.config import DataConfig
from weft.data.check import scan
from weft.data.check.check import check
from weft.data.check.duplicates import _candidates, equal_groups, near_pairs
from weft.data.check.findings import DataReport
from weft.data.check.scan import viewable
from weft.data.sources.open import open_source
from weft.data.split import Split, make_split
from weft.report.check_page import print_report, write_page

HOSTILE = "<img src=x onerror=alert(1)>\n\x1b[31m\u202ered.png"


def photo(seed: int, width: int = 96, height: int = 80) -> Image.Image:
    """Colours that vary slowly, with details: no two seeds resemble each other."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (10, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    noisy = smooth + random.normal(0, 6, smooth.shape)
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


def save(path: Path, picture: Image.Image, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    return path


def make_clean(root: Path, n: int = 12) -> Path:
    for number, (side, name) in enumerate((s, c) for s in ("train", "val") for c in ("cat", "dog")):
        for i in range(n):
            save(root / side / name / f"{i}.png", photo(100 + 1000 * number + i))
    return root


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def cut(path: Path, part: float) -> None:
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])


def plant(root: Path) -> dict[str, set[str]]:
    """Problems in a clean set, and the names that each kind must list."""
    train, val = root / "train", root / "val"
    bad = ("cut.jpg", "cut.png", "cut progressive.jpg", "empty.jpg", "text.png")
    cut(save(train / "cat/cut.jpg", photo(1)), 0.6)
    cut(save(train / "cat/cut.png", photo(2)), 0.6)
    cut(save(train / "cat/cut progressive.jpg", photo(3), progressive=True), 0.5)
    (train / "cat/empty.jpg").write_bytes(b"")
    (train / "cat/text.png").write_text("<script>alert(1)</script>")
    copy(train / "cat/0.png", val / "cat/leak.png")
    copy(train / "cat/1.png", train / "cat/again.png")
    copy(train / "cat/2.png", train / "dog/conflict.png")
    save(val / "dog/near.jpg", Image.open(train / "dog/3.png").resize((60, 50)), quality=70)
    save(train / "dog/near.jpg", ImageEnhance.Brightness(Image.open(train / "dog/4.png")).enhance(1.1), quality=80)
    save(train / "cat/wrong.png", photo(4), format="JPEG")
    exif = Image.Exif()
    exif[0x112] = 6
    save(train / "cat/turned.jpg", photo(5), exif=exif)
    deep = np.asarray(photo(6).convert("L")).astype(np.uint16) * 257
    save(train / "cat/deep.png", Image.fromarray(deep))
    save(train / "cat/cmyk.jpg", photo(7).convert("CMYK"))
    with_alpha = photo(8)
    with_alpha.putalpha(Image.linear_gradient("L").resize(with_alpha.size))
    save(train / "cat/alpha.png", with_alpha)
    save(train / "cat/animated.gif", photo(9), save_all=True, append_images=[photo(10)])
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    save(train / "cat/profile.png", photo(11), icc_profile=lab)
    save(train / "cat/blank.png", Image.new("RGB", (50, 40), (9, 9, 9)))
    save(train / "cat/tiny.png", photo(12, 7, 30))
    save(train / "cat/long.png", photo(13, 300, 40))
    save(train / "cat" / HOSTILE, photo(14), format="JPEG")
    save(train / "Dog/1.png", photo(15))
    save(val / "fox/1.png", photo(16))
    return {
        "unreadable": {f"train/cat/{name}" for name in bad},
        "leak": {"train/cat/0.png", "val/cat/leak.png"},
        "duplicate": {"train/cat/1.png", "train/cat/again.png"},
        "label-conflict": {"train/cat/2.png", "train/dog/conflict.png"},
        "near-leak": {"train/dog/3.png", "val/dog/near.jpg"},
        "near-duplicate": {"train/dog/4.png", "train/dog/near.jpg"},
        "wrong-ending": {"train/cat/wrong.png", f"train/cat/{HOSTILE}"},
        "rotated": {"train/cat/turned.jpg"},
        "deep": {"train/cat/deep.png"},
        "mixed-channels": {"train/cat/deep.png"},
        "cmyk": {"train/cat/cmyk.jpg"},
        "alpha": {"train/cat/alpha.png"},
        "animated": {"train/cat/animated.gif"},
        "profile": {"train/cat/profile.png"},
        "blank": {"train/cat/blank.png"},
        "tiny": {"train/cat/tiny.png"},
        "long": {"train/cat/long.png"},
        "alike-classes": {"dog", "Dog"},
        "untrained-class": {"fox"},
        "single-picture": {"Dog"},
        "unvalidated-class": {"Dog"},
        "imbalance": {"cat", "Dog"},
    }


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    """The folder, what was planted, and the reports of the full and of the quick check."""
    root = make_clean(tmp_path_factory.mktemp("messy"))
    planted = plant(root)
    source = open_source(str(root))
    return root, planted, {quick: check(source, None, quick=quick) for quick in (False, True)}


def kinds(report: DataReport) -> dict[str, set[str]]:
    return {problem.kind: set(problem.names) for problem in report.problems}


def test_every_planted_problem_is_found_and_nothing_else(messy):
    _, planted, reports = messy
    assert kinds(reports[False]) == planted


def test_quick_form_finds_what_headers_and_equal_files_show(messy):
    _, planted, reports = messy
    for kind in ("near-leak", "near-duplicate", "blank"):
        planted = {k: names for k, names in planted.items() if k != kind}
    assert kinds(reports[True]) == planted


def test_severities_and_reasons(messy):
    _, _, reports = messy
    report = reports[False]
    severity = {problem.kind: problem.severity for problem in report.problems}
    assert [k for k, s in severity.items() if s == "error"] == ["unreadable", "leak"]
    assert {severity[k] for k in ("duplicate", "label-conflict", "near-leak", "blank", "imbalance")} == {"warning"}
    assert {severity[k] for k in ("rotated", "cmyk", "deep", "near-duplicate", "wrong-ending")} == {"note"}
    assert set(report.bad) == kinds(report)["unreadable"]
    assert report.bad["train/cat/empty.jpg"] == "an empty file"
    assert "truncated" in report.bad["train/cat/cut.jpg"]
    assert "not a picture" in report.bad["train/cat/text.png"]
    assert (report.channels, report.depth) == (3, 16)  # one of 45 is more than a hundredth
    assert report.counts["val"] == [13, 0, 13, 1]
    assert report.sides["val"] == 27
    assert report.classes[:1] + report.classes[-1:] == ["cat", "fox"]
    assert report.looked_at == report.pictures == sum(map(sum, report.counts.values()))


def test_report_is_json_and_comes_back(messy):
    _, _, reports = messy
    for report in reports.values():
        again = DataReport.from_dict(json.loads(json.dumps(report.to_dict())))
        assert again.problems == report.problems
        assert again.lines() == report.lines()


def test_hostile_names_are_harmless(messy, tmp_path):
    root, _, reports = messy
    terminal = io.StringIO()
    print_report(reports[False], Console(file=terminal, width=300))
    for text in (terminal.getvalue(), "\n".join(reports[False].lines())):
        assert "\\n\\x1b[31m\\u202ered.png" in text
        assert "\x1b" not in text
        assert "\u202e" not in text

    page = tmp_path / "page.html"
    write_page(reports[False], open_source(str(root)), page)
    tags = Tags(page.read_text(encoding="utf-8"))
    pictures = [dict(attributes)["src"] for tag, attributes in tags.found if tag == "img"]
    assert len(pictures) > 20
    assert all(source.startswith("data:image/") for source in pictures)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags.found}
    assert not [name for _, attributes in tags.found for name, _ in attributes if name.startswith("on")]
    assert page.stat().st_size < 2_000_000


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str]]]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, attrs))


def test_data_is_never_written(messy, tmp_path):
    root, _, _ = messy
    for folder in (root, *root.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    try:
        before = snapshot(root)
        source = open_source(str(root))
        write_page(check(source, None), source, tmp_path / "page.html")
        assert snapshot(root) == before
    finally:
        for folder in (root, *root.rglob("*")):
            folder.chmod(0o755 if folder.is_dir() else 0o644)


def snapshot(root: Path) -> dict[str, object]:
    return {
        str(path): (path.stat().st_mtime_ns, path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest())
        for path in (root, *root.rglob("*"))
    }


def test_clean_data_raises_no_alarm(tmp_path):
    source = open_source(str(make_clean(tmp_path)))
    for quick in (False, True):
        report = check(source, None, quick=quick)
        assert report.problems == []
        assert report.verdict().startswith("No problems found")
        assert report.counts == {"train": [12, 12], "val": [12, 12]}
        assert report.width == dict.fromkeys(report.width, 96.0)


def test_similar_pictures_are_no_duplicates():
    """Clothes of 28 x 28 pixels all look alike; two pairs among 24 million are the same photograph, and are found."""
    report = check(open_source("demo:fashion"), None)
    (problem,) = report.problems
    assert problem.kind == "near-duplicate"
    assert [(p.first, p.second) for p in problem.pairs] == [
        ("train/1928", "train/3704"),
        ("train/3568", "train/5448"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda picture: picture.resize((70, 50)),
        lambda picture: picture.resize((300, 240), Image.Resampling.BICUBIC),
        lambda picture: ImageEnhance.Brightness(picture).enhance(0.8),
        lambda picture: ImageEnhance.Contrast(picture).enhance(1.2),
        lambda picture: picture.convert("L"),
        lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        lambda picture: through(picture, "JPEG", quality=40),
        lambda picture: through(picture, "WEBP", quality=40),
    ],
    ids=["smaller", "larger", "darker", "contrast", "grey", "mirrored", "jpeg", "webp"],
)
def test_changed_copies_are_found(change):
    pictures = [photo(seed) for seed in range(60)]
    changed = [change(picture) for picture in pictures[:20]]
    thumbs = np.stack([scan.thumbnail(array(picture)) for picture in [*pictures, *changed]])
    pairs, distances = near_pairs(thumbs)
    assert {(i, j) for i, j in pairs.tolist()} == {(i, 60 + i) for i in range(20)}
    assert (np.diff(distances) >= 0).all()


def array(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def through(picture: Image.Image, format: str, **options) -> Image.Image:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return Image.open(file).convert("RGB")


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 120), st.integers(0, 2**32 - 1))
def test_candidates_are_all_pairs_that_differ_in_seven_bits(n, seed):
    random = np.random.default_rng(seed)
    hashes = random.integers(0, 2**64, n, dtype=np.uint64)
    for i in range(1, n):  # most are an earlier one with some bits flipped
        flips = sum(1 << int(bit) for bit in random.choice(64, random.integers(0, 12), replace=False))
        hashes[i] = hashes[random.integers(0, i)] ^ np.uint64(flips)
    others = random.permutation(hashes)
    found = [(int(i), int(j)) for left, right in _candidates(hashes, others) for i, j in zip(left, right, strict=True)]
    wanted = {(i, j) for i in range(n) for j in range(i + 1, n) if (int(hashes[i]) ^ int(others[j])).bit_count() <= 7}
    assert len(found) == len(set(found))
    assert set(found) == wanted


@pytest.mark.parametrize("quick", [True, False])
def test_values_of_few_bits_in_files_of_many_are_told(tmp_path, quick):
    """Cameras of 12 bits write files of 16, which are nearly black unless somebody stretches them."""
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        for number in range(3):
            Image.fromarray(random.integers(0, 4096, (20, 20), np.uint16)).save(tmp_path / label / f"{number}.png")
    (told,) = [p for p in check(open_source(str(tmp_path)), None, quick=quick).problems if p.kind == "dark"]
    assert told.severity == "warning"
    assert "6 pictures of 16 bits with values of 12 bits" in told.text
    assert "by 16" in told.text
    Image.fromarray(random.integers(0, 65536, (20, 20), np.uint16)).save(tmp_path / "a/0.png")
    assert "dark" not in {p.kind for p in check(open_source(str(tmp_path)), None, quick=quick).problems}


@given(st.lists(st.integers(0, 5)))
def test_equal_groups(values):
    groups = [group.tolist() for group in equal_groups(np.array(values, np.uint64))]
    wanted = [[i for i, v in enumerate(values) if v == value] for value in range(1, 6)]
    assert groups == [group for group in wanted if len(group) > 1]


@pytest.mark.parametrize("thumbs", [np.zeros((0, 16, 16)), np.zeros((1, 16, 16)), np.full((50, 16, 16), 77)])
def test_nothing_to_compare(thumbs):
    pairs, distances = near_pairs(thumbs.astype(np.uint8))
    assert pairs.shape == (0, 2)
    assert distances.shape == (0,)


@given(
    arrays.arrays(
        st.sampled_from([np.uint8, np.uint16, np.float32]),
        st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 6)),
        elements={"allow_nan": False, "allow_infinity": False},
    )
)
def test_any_depth_and_channels_can_be_looked_at(pixels):
    picture = viewable(pixels)
    assert picture.mode in ("L", "RGB")
    assert picture.size == pixels.shape[1::-1]
    if pixels.dtype == np.uint8:
        assert np.array_equal(array(picture), pixels[..., : 3 if pixels.shape[2] >= 3 else 1])


@pytest.mark.parametrize(("leaks", "severity"), [("error", "error"), ("warn", "warning"), ("ignore", None)])
def test_settings_decide_how_bad_a_leak_is(tmp_path, leaks, severity):
    root = make_clean(tmp_path)
    copy(root / "train/cat/0.png", root / "val/cat/leak.png")
    source = open_source(str(root), group=r"(\d+)\.png")
    found = {p.kind: p.severity for p in check(source, None, quick=True, config=DataConfig(leaks=leaks)).problems}
    assert found.get("leak") == severity
    assert found.get("group-leak") == severity


def test_copies_parted_by_weft_are_a_warning(tmp_path):
    """A flat folder with copies must not stop a run whose split was not the user's."""
    for number, name in enumerate(("cat", "dog")):
        for i in range(10):
            save(tmp_path / name / f"{i}.png", photo(100 * number + i))
        for i in range(5):
            copy(tmp_path / name / f"{i}.png", tmp_path / name / f"copy of {i}.png")
    source = open_source(str(tmp_path))
    flat = {p.kind: p for p in check(source, None, quick=True).problems}
    assert set(flat) == {"duplicate"}
    assert flat["duplicate"].count == 10
    split = make_split(source, DataConfig(), seed=0)
    report = check(source, split, quick=True)
    assert {p.kind: p.severity for p in report.problems if p.kind == "leak"} == {"leak": "warning"}
    assert report.counts["train"] == np.bincount(source.labels[split.train]).tolist()
    half = Split(np.arange(3), np.arange(3, 6), np.arange(6, 6))
    assert sum(check(source, half, quick=True).counts["unused"]) == len(source) - 6


def test_page_and_last_line_count_the_same_notes(tmp_path):
    """Those of the source, such as files that are no pictures, are notes as well."""
    root = make_clean(tmp_path / "data", 4)
    (root / "train/cat/words.txt").write_text("no picture")
    save(root / "train/cat/wrong.png", photo(4), format="JPEG")
    source = open_source(str(root))
    report = check(source, None)
    write_page(report, source, tmp_path / "page.html")
    (said,) = re.findall(r"(\d+) notes? found", report.verdict().replace(",", ""))
    (shown,) = re.findall(r"<b>(\d+)</b><span>notes?</span>", (tmp_path / "page.html").read_text())
    assert said == shown
    assert int(said) > sum(problem.severity == "note" for problem in report.problems)


def test_quick_form_says_when_it_saw_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "CHUNK", 5)
    monkeypatch.setattr("weft.data.check.check.QUICK_SECONDS", -1.0)
    source = open_source(str(make_clean(tmp_path)))
    report = check(source, None, quick=True)
    assert report.looked_at == 5
    assert "sample of 5" in report.verdict()


def test_several_labels(tmp_path):
    make_clean(tmp_path)
    rows = ["path,label"] + [f"train/cat/{i}.png,{'red|big' if i < 4 else 'red'}" for i in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    report = check(open_source(str(tmp_path / "labels.csv")), None)
    assert report.multilabel
    assert report.counts == {"all": [4, 12]}
    assert "  all: 12 (a class in 4 to 12 of them)" in report.lines()


@pytest.mark.parametrize("what", ["picture", "array"])
def test_too_large_pictures_are_named_and_not_decoded(tmp_path, what):
    root = make_clean(tmp_path)
    if what == "picture":
        save(root / "train/cat/large.png", Image.new("1", (3000, 3000)))
    else:
        np.save(root / "train/cat/large.npy", np.zeros((3000, 3000), np.uint8))
    for quick in (False, True):
        report = check(open_source(str(root)), None, quick=quick, config=DataConfig(max_pixels=1_000_000))
        assert len(report.bad) == 1
        assert "3000 x 3000" in next(iter(report.bad.values()))


def test_no_readable_picture_at_all(tmp_path):
    for name in ("cat/1.png", "dog/1.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    source = open_source(str(tmp_path))
    report = check(source, None)
    assert len(report.bad) == 2
    assert report.width == {}
    write_page(report, source, tmp_path / "page.html")
    print_report(report, Console(file=io.StringIO()))


def run(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["weft", "check", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return (stop.value.code or 0, *capsys.readouterr())  # type: ignore[return-value]


def test_command(tmp_path, monkeypatch, capsys):
    root, page = make_clean(tmp_path / "data", 4), tmp_path / "page.html"
    code, out, _ = run(monkeypatch, capsys, str(root), "--out", str(page))
    assert code == 0
    assert "16 pictures, 2 classes" in out
    assert "<title>" in page.read_text()
    copy(root / "train/cat/0.png", root / "val/cat/leak.png")
    code, out, err = run(monkeypatch, capsys, str(root), "--json")
    assert code == 1
    assert err == ""
    assert "leak" in [problem["kind"] for problem in json.loads(out)["problems"]]
    code, out, _ = run(monkeypatch, capsys, str(root), "--quick", "--data.leaks", "warn")
    assert code == 0
    assert "warning: 1 picture on more than one side" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], ["nowhere", "does not exist"]),
        (["demo:fashion", "--data.leeks", "warn"], ["data.leeks", "Did you mean 'data.leaks'"]),
        (["demo:fashion", "--data.leaks", "maybe"], ["data.leaks", "warn"]),
        (["demo:fashion", "--out", "nowhere/page.html"], ["nowhere", "--out"]),
        (["demo:fashion", "--qiuck"], ["--qiuck"]),
    ],
)
def test_mistakes_get_one_line(monkeypatch, capsys, args, words):
    code, out, err = run(monkeypatch, capsys, *args)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert all(word in err for word in words)
