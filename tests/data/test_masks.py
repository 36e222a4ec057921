"""Pictures with masks: layouts, codings, class files, named sets; against torchvision's sets and metadata."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageOps

from tests.helpers.places import DATA
from weft.data.boxes.objects import Objects
from weft.data.masks import sets as mask_sets
from weft.data.masks.classes import read_classes
from weft.data.masks.folders import open_masks, recognise, semantic_from_objects
from weft.data.masks.sets import MASK_SETS
from weft.data.read import BadPicture
from weft.data.sources.renamed import in_classes
from weft.data.sources.source import Files, Names, Source, fingerprint
from weft.errors import WeftError

INDEX = np.array([[0, 1, 1, 2, 0], [0, 1, 2, 2, 255], [0, 0, 2, 1, 1]], np.uint8)  # (3, 5)


def picture(path: Path, size: tuple[int, int] = (5, 3), **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "teal").save(path, **options)


def mask(path: Path, values: np.ndarray = INDEX, palette: list[int] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(values)
    if palette is not None:
        image = Image.fromarray(values, "L").convert("P")
        image = Image.frombytes("P", image.size, values.tobytes())
        image.putpalette(palette)
    image.save(path)


def tree(root: Path, *pairs: str, values: np.ndarray = INDEX) -> Path:
    """Each pair is "images/a.jpg masks/a.png"."""
    for pair in pairs:
        first, second = pair.split()
        picture(root / first)
        mask(root / second, values)
    return root


LAYOUTS = {
    "side by side": (["images/a.jpg masks/a.png", "images/b.jpg masks/b.png"], {"": 2}),
    "other names": (["JPEGImages/a.jpg SegmentationClass/a.png"], {"": 1}),
    "upper case": (["Images/a.JPG Labels/a.PNG"], {"": 1}),
    "splits inside": (
        ["imgs/train/a.jpg annots/train/a.png", "imgs/val/a.jpg annots/val/a.png"],
        {"train": 1, "val": 1},
    ),
    "ADE20K's splits": (["images/training/a.jpg annotations/training/a.png"], {"train": 1}),
    "other word for a split": (["images/val/a.jpg masks/validation/a.png"], {"val": 1}),
    "splits outside": (
        [
            "train/images/a.jpg train/masks/a.png",
            "valid/images/b.jpg valid/masks/b.png",
            "test/images/c.jpg test/masks/c.png",
        ],
        {"train": 1, "val": 1, "test": 1},
    ),
    "SegNet": (["train/a.png trainannot/a.png", "val/b.png valannot/b.png"], {"train": 1, "val": 1}),
    "splits in names": (
        ["train_images/a.jpg train_masks/a.png", "val/b.jpg val_labels/b_L.png"],
        {"train": 1, "val": 1},
    ),
    "nested": (["images/x/1.jpg masks/x/1.png", "images/y/1.jpg masks/y/1.png"], {"": 2}),
    "masks not nested": (["images/x/1.jpg masks/1.png", "images/y/2.jpg masks/2.png"], {"": 2}),
    "suffix": (["image/a.jpg label/a_mask.png", "image/b.jpg label/b_mask.png"], {"": 2}),
    "both suffixes": (["images/a_sat.jpg masks/a_mask.png"], {"": 1}),
    "whole name": (["img/a.jpg gt/a.jpg.png"], {"": 1}),
    "one more folder": (["set/images/a.jpg set/masks/a.png"], {"": 1}),
    "Cityscapes": (
        ["leftImg8bit/train/x/x_1_leftImg8bit.png gtFine/train/x/x_1_gtFine_labelIds.png"],
        {"train": 1},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(tmp_path: Path, layout: str) -> None:
    pairs, splits = LAYOUTS[layout]
    tree(tmp_path, *pairs)
    assert recognise(tmp_path)
    source = open_masks(str(tmp_path))
    assert {split: int((source.splits == split).sum()) for split in np.unique(source.splits).tolist()} == splits
    assert source.task == "segment"
    assert source.classes == ["class 0", "class 1", "class 2"]
    assert (source.labels == 0).all()
    for i in range(len(source)):
        assert source.open(i).is_file()  # type: ignore[union-attr]
        np.testing.assert_array_equal(source.target(i), INDEX)


@pytest.mark.parametrize(
    "files",
    [
        ["cat/1.jpg", "dog/2.jpg"],
        ["train/cat/1.jpg", "val/cat/2.jpg"],
        ["images/1.jpg", "cat/2.jpg"],
        ["images/1.jpg", "labels/1.txt"],
        ["train/images/1.jpg", "train/labels/1.txt"],
        ["images/train/1.jpg", "labels/train/1.txt"],
        ["train2017/1.jpg", "annotations/instances_train2017.json"],
        ["JPEGImages/1.jpg", "Annotations/1.xml", "ImageSets/Main/train.txt"],
        ["1.jpg"],
        [],
    ],
)
def test_what_is_no_set_of_masks(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        if file.endswith(".jpg"):
            picture(tmp_path / file)
        else:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("0 0.5 0.5 1 1")
    assert not recognise(tmp_path)
    assert not recognise(tmp_path / "not there")
    with pytest.raises(WeftError, match=r"images/ and masks/"):
        open_masks(str(tmp_path))


def test_partners_that_are_missing(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png", "images/b.jpg masks/b.png")
    picture(tmp_path / "images/alone.jpg")
    mask(tmp_path / "masks/orphan.png")
    source = open_masks(str(tmp_path))
    assert len(source) == 2
    assert any("1 picture without a mask" in note and "alone.jpg" in note for note in source.notes)
    assert any("1 mask without a picture" in note and "orphan.png" in note for note in source.notes)


def test_no_partner_at_all(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/z.png")
    with pytest.raises(WeftError, match=r"images/a\.jpg.*masks/z\.png"):
        open_masks(str(tmp_path))


def test_rule_on_names_is_told(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a_mask.png")
    assert "*_mask" in open_masks(str(tmp_path)).layout


@pytest.mark.parametrize("place", ["elsewhere", "pictures/masks"])
def test_masks_elsewhere(tmp_path: Path, place: str) -> None:
    tree(tmp_path, f"pictures/a.jpg {place}/a.png")
    given = str(tmp_path / place) if place == "elsewhere" else "masks"
    source = open_masks(str(tmp_path / "pictures"), masks=given)
    assert list(source.names) == ["a.jpg"]
    np.testing.assert_array_equal(source.target(0), INDEX)
    with pytest.raises(WeftError, match=r"data\.masks='nowhere'"):
        open_masks(str(tmp_path / "pictures"), masks="nowhere")


def test_split_lists(tmp_path: Path) -> None:
    tree(tmp_path, *(f"images/{name}.jpg masks/{name}.png" for name in "abcd"))
    (tmp_path / "valid.txt").write_text("b.jpg\n")
    assert open_masks(str(tmp_path)).splits.tolist() == ["train", "train", "train", "val"]
    (tmp_path / "train.txt").write_text("images/a.jpg masks/a.png\nc\n")
    source = open_masks(str(tmp_path))
    assert source.splits.tolist() == ["train", "train", "val"]
    assert any("1 picture that these lists do not name" in note for note in source.notes)


# codings


GREY = np.stack([INDEX] * 3, -1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (INDEX, "index masks"),
        (INDEX.astype(np.uint16), "index masks"),
        (GREY, "index masks saved as RGB"),
        (np.concatenate([GREY, np.full_like(GREY[..., :1], 9)], -1), "index masks saved as RGB"),
    ],
)
def test_values(tmp_path: Path, values: np.ndarray, words: str) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png", values=values)))
    assert words in source.layout
    np.testing.assert_array_equal(source.target(0), INDEX)


def test_npy_and_one_bit(tmp_path: Path) -> None:
    picture(tmp_path / "images/a.jpg")
    (tmp_path / "masks").mkdir()
    np.save(tmp_path / "masks/a.npy", INDEX == 1)
    source = open_masks(str(tmp_path))
    np.testing.assert_array_equal(source.target(0), INDEX == 1)
    (tmp_path / "masks/a.npy").unlink()
    Image.fromarray(INDEX == 1).save(tmp_path / "masks/a.png")
    np.testing.assert_array_equal(open_masks(str(tmp_path)).target(0), INDEX == 1)


@settings(max_examples=15, deadline=None)
@given(
    values=arrays(
        np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([0, 1, 7, 200, 255])
    )
)
def test_values_with_gaps_are_counted_in_order(tmp_path_factory: pytest.TempPathFactory, values: np.ndarray) -> None:
    root = tmp_path_factory.mktemp("gaps")
    picture(root / "images/a.jpg", (values.shape[1], values.shape[0]))
    picture(root / "images/b.jpg", (4, 1))
    mask(root / "masks/a.png", values)
    mask(root / "masks/b.png", np.array([[0, 1, 7, 200]], np.uint8))
    source = open_masks(str(root))
    assert source.classes == ["class 0", "class 1", "class 7", "class 200"]
    expected = np.select([values == v for v in (0, 1, 7, 200)], range(4), 255)
    np.testing.assert_array_equal(source.target(0), expected)


@settings(max_examples=15, deadline=None)
@given(
    numbers=arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, 5)),
    colours=st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=6, max_size=6, unique=True),
    named=st.booleans(),
)
def test_colours(tmp_path_factory: pytest.TempPathFactory, numbers: np.ndarray, colours: list, named: bool) -> None:
    root = tmp_path_factory.mktemp("colours")
    colours[0] = (1, 2, 3) if (1, 2, 3) not in colours else colours[0]  # not all grey
    table = np.array(colours, np.uint8)
    for name, shown in (("a", numbers), ("b", np.arange(6, dtype=np.uint8)[None])):
        picture(root / f"images/{name}.jpg", (shown.shape[1], shown.shape[0]))
        mask(root / f"masks/{name}.png", table[shown])
    if named:
        lines = [f"{r} {g} {b}\tclass number {i}" for i, (r, g, b) in enumerate(colours)]
        (root / "label_colors.txt").write_text("\n".join(lines))
    source = open_masks(str(root))
    order = range(6) if named else sorted(range(6), key=lambda i: colours[i])
    assert source.classes == [
        f"class number {i}" if named else "#{:02x}{:02x}{:02x}".format(*colours[i]) for i in order
    ]
    np.testing.assert_array_equal(source.target(0), np.argsort(order)[numbers])


def test_palette_counts_by_value(tmp_path: Path) -> None:
    picture(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", palette=[*range(255, -1, -1)] * 3)
    source = open_masks(str(tmp_path))
    assert "palette masks" in source.layout
    np.testing.assert_array_equal(source.target(0), INDEX)


def test_palette_with_the_colours_of_the_class_file(tmp_path: Path) -> None:
    picture(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", np.array([[0, 1, 2, 1, 0]] * 3, np.uint8), palette=[0, 0, 255, 255, 0, 0, 0, 255, 0])
    (tmp_path / "class_dict.csv").write_text("name,r,g,b\nred,255,0,0\ngreen,0,255,0\nblue,0,0,255\n")
    np.testing.assert_array_equal(open_masks(str(tmp_path)).target(0)[0], [2, 0, 1, 0, 2])


def test_palettes_that_differ_are_noted(tmp_path: Path) -> None:
    for name, palette in (("a", [0, 0, 0, 255, 0, 0]), ("b", [0, 0, 0, 0, 255, 0])):
        picture(tmp_path / f"images/{name}.jpg", (2, 1))
        mask(tmp_path / f"masks/{name}.png", np.array([[0, 1]], np.uint8), palette)
    assert any("value 1 is #ff0000 in a.png, #00ff00 in b.png" in note for note in open_masks(str(tmp_path)).notes)


def test_mixed_kinds(tmp_path: Path) -> None:
    for name in "abc":
        picture(tmp_path / f"images/{name}.jpg")
    mask(tmp_path / "masks/a.png")
    mask(tmp_path / "masks/b.png")
    mask(tmp_path / "masks/c.png", np.random.default_rng(0).integers(0, 2, (3, 5, 3), np.uint8) * 200)
    source = open_masks(str(tmp_path))
    assert any("several kinds" in note and "c.png" in note for note in source.notes)
    with pytest.raises(BadPicture, match=r"masks/c\.png: an RGB-coded mask"):
        source.target(2)


BINARY = np.where(INDEX == 1, 255, 0).astype(np.uint8)


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("", ["background", "foreground"]),
        ("cell\n", ["background", "cell"]),
        ("nothing\ncell\n", ["nothing", "cell"]),
        ("0 nothing\n255 cell\n", ["nothing", "cell"]),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_binary_masks(tmp_path: Path, names: str, classes: list[str], channels: int) -> None:
    values = BINARY if channels == 1 else np.stack([BINARY] * 3, -1)
    tree(tmp_path, "images/a.jpg masks/a.png", values=values)
    if names:
        (tmp_path / "classes.txt").write_text(names)
    source = open_masks(str(tmp_path))
    assert source.classes == classes
    np.testing.assert_array_equal(source.target(0), BINARY // 255)


def test_255_is_ignored_where_there_are_other_values_or_it_is_said(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png", values=BINARY)
    source = open_masks(str(tmp_path), ignore=[255])
    assert source.classes == ["class 0"]
    assert (source.target(0) == BINARY).all()


def test_ignored_values(tmp_path: Path) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png")), ignore=[0])
    assert source.classes == ["class 1", "class 2"]
    np.testing.assert_array_equal(source.target(0), np.select([INDEX == 1, INDEX == 2], [0, 1], 255))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: Image.fromarray(INDEX).save(path, "JPEG"), "JPEG, whose values are not exact"),
        (lambda path: Image.fromarray(INDEX.astype(np.uint16) * 300).save(path), "values from 0 to 10964"),
        (lambda path: Path(path).write_bytes(b""), "not a picture"),
        (lambda path: Path(path).write_bytes(b"\x89PNG\r\n\x1a\nrubbish"), ""),
    ],
)
def test_masks_that_cannot_be_read(tmp_path: Path, make, words: str) -> None:
    picture(tmp_path / "images/a.jpg")
    (tmp_path / "masks").mkdir()
    make(tmp_path / "masks/a.png")
    with pytest.raises(WeftError, match=rf"masks/a\.png: .*{words}") as caught:
        open_masks(str(tmp_path))
    assert "\n" not in str(caught.value)
    picture(tmp_path / "images/b.jpg")
    mask(tmp_path / "masks/b.png")
    source = open_masks(str(tmp_path))
    with pytest.raises(BadPicture, match=r"masks/a\.png: "):
        source.target(0)


def test_photographs_are_no_masks(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8)
    picture(tmp_path / "images/a.jpg", (20, 20))
    mask(tmp_path / "masks/a.png", noise)
    with pytest.raises(WeftError, match=r"have \d+ colours, which cannot all be classes"):
        open_masks(str(tmp_path))
    smooth = np.asarray(
        Image.fromarray(np.kron(np.eye(2, dtype=np.uint8) * 255, np.ones((3, 3), np.uint8))).resize((200, 200))
    )
    smooth = np.pad(smooth, 400)
    picture(tmp_path / "images/a.jpg", smooth.shape)
    mask(tmp_path / "masks/a.png", smooth)
    with pytest.raises(WeftError, match=r"black and white with .* greys between"):
        open_masks(str(tmp_path))


def test_unknown_values_are_named_and_counted(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png", "images/b.jpg masks/b.png", values=np.minimum(INDEX, 2))
    source = open_masks(str(tmp_path))
    mask(tmp_path / "masks/b.png", np.where(INDEX == 1, 200, INDEX).astype(np.uint8))
    words = r"masks/b\.png: value 200 in 5 pixels is not a class \(classes are 0, 1 and 2"
    with pytest.raises(BadPicture, match=words):
        source.target(1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("stored", [True, False])
def test_masks_turn_with_their_pictures(tmp_path: Path, orientation: int, stored: bool) -> None:
    """As Pillow's own exif_transpose turns a mask with that entry; a mask that is upright already stays."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(tmp_path / "images/a.jpg", exif=exif)
    image = Image.fromarray(np.minimum(INDEX, 2))
    image.getexif()[0x0112] = orientation
    turned = np.asarray(ImageOps.exif_transpose(image))
    swapped = orientation >= 5
    mask(tmp_path / "masks/a.png", np.minimum(INDEX, 2) if stored and swapped else turned)
    np.testing.assert_array_equal(open_masks(str(tmp_path)).target(0), turned)


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png")
    picture(tmp_path / "images/a.jpg", (3, 5))
    source = open_masks(str(tmp_path))
    with pytest.raises(BadPicture, match="mask has 5 x 3 pixels, its picture 3 x 5"):
        source.target(0)


def test_source_can_go_to_other_processes_and_notices_changes(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png")
    source = open_masks(str(tmp_path))
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again.target(0), source.target(0))
    before = fingerprint(source)
    assert before == fingerprint(open_masks(str(tmp_path)))
    assert before != fingerprint(open_masks(str(tmp_path), ignore=[2]))
    mask(tmp_path / "masks/a.png", np.random.default_rng(0).integers(0, 3, (3, 5), np.uint8))
    with (tmp_path / "masks/a.png").open("ab") as file:
        file.write(b"more")
    assert before != fingerprint(open_masks(str(tmp_path)))


def test_renumbered(tmp_path: Path) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png")))
    targets = in_classes(source, ["class 2", "other", "class 0", "class 1"]).targets
    np.testing.assert_array_equal(targets(0), np.select([v == INDEX for v in range(3)], [2, 3, 0], 255))
    with pytest.raises(WeftError, match="'class 0'"):
        in_classes(source, ["class 1", "class 2"])


# class files


@pytest.mark.parametrize(
    ("name", "text", "names", "values"),
    [
        ("c.txt", "sky\ntraffic light\nclass 3\n", ["sky", "traffic light", "class 3"], [0, 1, 2]),
        ("c.txt", "0 sky\n7: traffic light\n", ["sky", "traffic light"], [0, 7]),
        ("c.tsv", "sky\t3\nroad\t4\n", ["sky", "road"], [3, 4]),
        ("c.csv", "class,id\nsky,3\nroad,4\n", ["sky", "road"], [3, 4]),
        ("c.txt", "64 128 64\tAnimal\n192 0 128\t\tBig Arch\n", ["Animal", "Big Arch"], [0x408040, 0xC00080]),
        ("c.csv", '"name","r","g","b"\n"Animal",64,128,64\n', ["Animal"], [0x408040]),
        ("labelmap.txt", "# label:color_rgb:parts:actions\nAnimal:64,128,64::\n", ["Animal"], [0x408040]),
        ("c.txt", "\ufeffsky\r\nroad\r\n\r\n", ["sky", "road"], [0, 1]),
        ("c.json", ["sky", "road"], ["sky", "road"], [0, 1]),
        ("c.json", {"sky": 3, "road": 1}, ["sky", "road"], [3, 1]),
        ("c.json", {"sky": [0, 0, 255]}, ["sky"], [255]),
        ("c.json", {"labels": {"0": "background", "1": "liver"}}, ["background", "liver"], [0, 1]),
        ("c.json", {"labels": {"background": 0, "liver": 1}}, ["background", "liver"], [0, 1]),
        ("c.json", [{"name": "sky", "id": 4}, {"name": "road", "id": 2}], ["sky", "road"], [4, 2]),
        ("c.json", {"categories": [{"name": "sky", "id": 4, "color": [0, 1, 0]}]}, ["sky"], [256]),
    ],
)
def test_class_file(tmp_path: Path, name: str, text, names: list[str], values: list[int]) -> None:
    (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    found = read_classes(tmp_path / name)
    assert (found.names, found.values) == (names, values)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.txt", "", "names no classes"),
        ("c.txt", "sky\nsky\n", "class more than once: 'sky'"),
        ("c.txt", "1 sky\n1 road\n", "value more than once: '1'"),
        ("c.txt", "1 sky\n300 road\n", "'road' is not between 0 and 255"),
        ("c.txt", "1 2 300 sky\n", "'sky' is not three numbers"),
        ("c.json", "{", "not a JSON"),
        ("c.json", '{"sky": 1.5}', "'sky': 1.5 is not a class"),
        ("c.json", '{"sky": [1, 2]}', "three numbers"),
        ("c.json", '{"sky": 1, "road": [1, 2, 3]}', "give all of them the same"),
        ("c.json", "3", "names no classes"),
    ],
)
def test_class_files_that_are_wrong(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    tree(tmp_path, "images/a.jpg masks/a.png")
    with pytest.raises(WeftError, match=re.escape(words)):
        open_masks(str(tmp_path), classes=name)
    with pytest.raises(WeftError, match="is not a file"):
        open_masks(str(tmp_path), classes="nowhere.txt")


def test_names_that_are_ignored(tmp_path: Path) -> None:
    tree(tmp_path, "images/a.jpg masks/a.png")
    (tmp_path / "classes.txt").write_text("background\nUn_labelled\nroad\nvoid\n".replace("Un_", "Un"))
    source = open_masks(str(tmp_path))
    assert source.classes == ["background", "road"]
    assert any("Ignored by name: 'Unlabelled', 'void'" in note for note in source.notes)
    np.testing.assert_array_equal(source.target(0), np.select([INDEX == 0, INDEX == 2], [0, 1], 255))


def test_names_for_values_with_gaps(tmp_path: Path) -> None:
    values = np.array([[0, 128, 200, 128, 255]] * 3, np.uint8)
    tree(tmp_path, "images/a.jpg masks/a.png", values=values)
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    source = open_masks(str(tmp_path))
    np.testing.assert_array_equal(source.target(0)[0], [0, 1, 2, 1, 255])
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\n")  # four names for three values: which is not clear
    with pytest.raises(BadPicture, match="128 in 6 pixels and 200 in 3 pixels are not classes"):
        open_masks(str(tmp_path)).target(0)


# objects


def test_masks_from_objects(tmp_path: Path) -> None:
    from pycocotools import mask as coco

    picture(tmp_path / "a.png", (40, 30))
    shapes = [
        [[5.0, 5, 12, 5, 12, 12, 5, 12]],  # small, inside the second
        [[1.0, 2, 30, 3, 20, 28]],
        [[0.0, 0, 39, 0, 39, 6, 0, 6]],  # a crowd
    ]
    rough = [coco.decode(coco.merge(coco.frPyObjects(shape, 30, 40))).astype(bool) for shape in shapes]
    area = np.array([m.sum() for m in rough], np.float32)
    objects = Objects(np.zeros((3, 4), np.float32), np.array([1, 0, 0]), np.array([False, False, True]), area, shapes)

    class Targets:
        has_shapes = True

        def __call__(self, index: int) -> Objects:
            return objects

        def sizes(self, positions: range) -> bytes:
            return b""

    names = Names(["a.png"])
    labels, splits = np.ones((1, 2), bool), np.array([""])
    source = Source("x", "COCO", ["cell", "dot"], names, labels, Files(tmp_path, names), splits, True)
    source.task, source.targets = "detect", Targets()
    semantic = semantic_from_objects(source)
    assert (semantic.task, semantic.classes, semantic.multilabel) == ("segment", ["background", "cell", "dot"], False)
    expected = np.where(rough[0], 2, np.where(rough[1], 1, np.where(rough[2], 255, 0)))
    np.testing.assert_array_equal(semantic.target(0), expected)
    assert fingerprint(semantic)
    with pytest.raises(WeftError, match="no shapes"):
        semantic_from_objects(semantic)


# named sets


def open_set(name: str, root: Path) -> Source:
    return MASK_SETS[name](f"{name}:{root}", root)


def split_counts(source: Source) -> dict[str, int]:
    return {split: int((source.splits == split).sum()) for split in np.unique(source.splits).tolist()}


def test_class_names_are_those_of_torchvision() -> None:
    from torchvision.datasets import Cityscapes
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights
    from torchvision.models.segmentation import FCN_ResNet50_Weights

    voc = FCN_ResNet50_Weights.COCO_WITH_VOC_LABELS_V1.meta["categories"]
    assert ["background", *voc[1:]] == mask_sets.VOC
    coco = FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]  # numbers 1 to 90
    assert mask_sets.COCO_STUFF[:90] == [name if name != "N/A" else "" for name in coco]
    theirs = {c.name: c.id for c in sorted(Cityscapes.classes, key=lambda c: c.train_id) if not c.ignore_in_eval}
    assert list(mask_sets.CITYSCAPES.items()) == [(name, number) for name, number in theirs.items() if number >= 0]


@pytest.mark.parametrize(
    ("classes", "count"),
    [(mask_sets.ADE20K, 150), ([name for name in mask_sets.COCO_STUFF if name], 171), (mask_sets.LIP, 20)],
)
def test_class_names_are_complete(classes: list[str], count: int) -> None:
    assert len(classes) == len(set(classes)) == count


@pytest.mark.parametrize("inside", ["", "ADEChallengeData2016/"])
def test_ade20k(tmp_path: Path, inside: str) -> None:
    values = np.array([[0, 1, 2, 150, 13]] * 3, np.uint8)
    pairs = [f"{inside}images/{s}/A_1.jpg {inside}annotations/{s}/A_1.png" for s in ("training", "validation")]
    source = open_set("ade20k", tree(tmp_path, *pairs, values=values))
    assert split_counts(source) == {"train": 1, "val": 1}
    assert (source.classes[0], source.classes[12], source.classes[149]) == ("wall", "person", "flag")
    np.testing.assert_array_equal(source.target(0)[0], [255, 0, 1, 149, 12])


@pytest.mark.parametrize("masks", ["stuffthingmaps/", "stuffthingmaps_trainval2017/", "annotations/"])
def test_coco_stuff(tmp_path: Path, masks: str) -> None:
    values = np.array([[0, 12, 91, 181, 255]] * 3, np.uint8)  # person, stop sign, banner, wood
    pairs = [f"{split}2017/1.jpg {masks}{split}2017/1.png" for split in ("train", "val")]
    source = open_set("coco-stuff", tree(tmp_path, *pairs, values=values))
    numbers = source.target(0)[0].tolist()
    assert [source.classes[i] for i in numbers[:4]] == ["person", "stop sign", "banner", "wood"]
    assert numbers[4] == 255
    assert numbers[3] == 170


@pytest.mark.parametrize("kind", ["labelIds", "labelTrainIds"])
def test_cityscapes_as_torchvision_reads_it(tmp_path: Path, kind: str) -> None:
    from torchvision.datasets import Cityscapes

    ids = np.arange(34, dtype=np.uint8)[None]
    expected = np.array([c.train_id if c.train_id not in (-1, 255) else 255 for c in Cityscapes.classes[:34]], np.uint8)
    for split in ("train", "val", "test"):
        stem = f"{split}/x/x_000001_000019"
        picture(tmp_path / f"leftImg8bit/{stem}_leftImg8bit.png", (34, 1))
        mask(tmp_path / f"gtFine/{stem}_gtFine_labelIds.png", ids)
        mask(tmp_path / f"gtFine/{stem}_gtFine_color.png", np.zeros((1, 34, 3), np.uint8))
        mask(tmp_path / f"gtFine/{stem}_gtFine_instanceIds.png", ids.astype(np.uint16) * 1000)
        (tmp_path / f"gtFine/{stem}_gtFine_polygons.json").write_text("{}")
        if kind == "labelTrainIds":
            mask(tmp_path / f"gtFine/{stem}_gtFine_labelTrainIds.png", expected[None])
    source = open_set("cityscapes", tmp_path)
    assert split_counts(source) == {"train": 1, "val": 1}
    assert kind in source.layout
    assert not source.notes
    np.testing.assert_array_equal(source.target(0)[0], expected)
    theirs = Cityscapes(str(tmp_path), split="val", target_type="semantic")
    assert [Path(path) for path in theirs.images] == [source.open(1)]


def test_lip(tmp_path: Path) -> None:
    pairs = [f"{s}_images/1_2.jpg TrainVal_parsing_annotations/{s}_segmentations/1_2.png" for s in ("train", "val")]
    source = open_set("lip", tree(tmp_path, *pairs))
    assert split_counts(source) == {"train": 1, "val": 1}
    assert source.classes[13:] == ["face", "left arm", "right arm", "left leg", "right leg", "left shoe", "right shoe"]


def test_voc_as_torchvision_reads_it(tmp_path: Path) -> None:
    from torchvision.datasets import VOCSegmentation

    root = tmp_path / "VOCdevkit/VOC2012"
    for i in range(6):
        picture(root / f"JPEGImages/2007_{i}.jpg")
        if i < 4:
            values = np.where(INDEX == 1, i, INDEX).astype(np.uint8)
            mask(root / f"SegmentationClass/2007_{i}.png", values, palette=[*range(0, 250)] * 3)
    lists = {"train": [0, 2], "val": [1], "trainval": [0, 1, 2]}
    for split, numbers in lists.items():
        (root / "ImageSets/Segmentation").mkdir(parents=True, exist_ok=True)
        (root / f"ImageSets/Segmentation/{split}.txt").write_text("".join(f"2007_{i}\n" for i in numbers))
    source = open_set("voc", tmp_path)
    assert open_set("voc", root).splits.tolist() == source.splits.tolist() == ["train", "train", "val"]
    assert len(source.classes) == 21
    for split in ("train", "val"):
        theirs = VOCSegmentation(str(tmp_path), "2012", split)
        ours = np.flatnonzero(source.splits == split)
        assert [Path(path).name for path in theirs.images] == [Path(source.names[i]).name for i in ours]
        for i, j in enumerate(ours):
            np.testing.assert_array_equal(source.target(j), np.asarray(theirs[i][1]))
    plain = open_masks(str(root))
    assert plain.splits.tolist() == source.splits.tolist()
    assert "palette" in plain.layout
    # others' longer list
    (root / "ImageSets/Segmentation/train_aug.txt").write_text(
        "".join(f"/JPEGImages/2007_{i}.jpg /SegmentationClassAug/2007_{i}.png\n" for i in (0, 2, 3))
    )
    for i in range(4):
        mask(root / f"SegmentationClassAug/2007_{i}.png")
    assert split_counts(open_set("voc-aug", tmp_path)) == {"train": 3, "val": 1}


@pytest.mark.parametrize("layout", ["SegNet", "folders"])
def test_camvid_with_values(tmp_path: Path, layout: str) -> None:
    values = np.array([[0, 3, 8, 10, 11]] * 3, np.uint8)
    names = ("{s}/a.png {s}annot/a.png" if layout == "SegNet" else "{s}/images/a.jpg {s}/masks/a.png",)
    pairs = [name.format(s=split) for name in names for split in ("train", "val", "test")]
    source = open_set("camvid", tree(tmp_path, *pairs, values=values))
    assert split_counts(source) == {"train": 1, "val": 1, "test": 1}
    assert [source.classes[i] for i in (0, 3, 8, 10)] == ["sky", "road", "car", "bicyclist"]
    np.testing.assert_array_equal(source.target(0)[0], [0, 3, 8, 10, 255])
    with pytest.raises(WeftError, match="only 11 classes"):
        open_set("camvid-32", tmp_path)


def test_camvid_with_colours(tmp_path: Path) -> None:
    colours = np.array([[(128, 128, 128), (128, 0, 192), (0, 0, 192), (64, 0, 128), (0, 0, 0)]] * 3, np.uint8)
    tree(tmp_path, "701_StillsRaw_full/0001TP_1.png LabeledApproved_full/0001TP_1_L.png", values=colours)
    source = open_set("camvid", tmp_path)
    numbers = source.target(0)[0].tolist()
    assert [source.classes[i] for i in numbers[:4]] == ["sky", "road", "pavement", "car"]
    source = open_set("camvid-32", tmp_path)
    numbers = source.target(0)[0].tolist()
    assert [source.classes[i] for i in numbers[:4]] == ["Sky", "LaneMkgsDriv", "Sidewalk", "Car"]
    assert numbers[4] == 255


@pytest.mark.parametrize("name", MASK_SETS)
def test_sets_that_are_not_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "something").mkdir()
    with pytest.raises(WeftError, match=rf"{name}:.*: expected "):
        open_set(name, tmp_path)


@pytest.fixture(scope="module")
def camvid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real CamVid, the first pictures of each split."""
    import zipfile

    if not (DATA / "camvid/train.zip").is_file():
        pytest.skip("no camvid/train.zip under ../shared/data or WEFT_DATA")
    root = tmp_path_factory.mktemp("camvid")
    for split in ("train", "val", "test"):
        with zipfile.ZipFile(DATA / f"camvid/{split}.zip") as file:
            file.extractall(root / split if "images/" in "".join(file.namelist()[:3]) else root)
    return root


def test_real_camvid_has_the_pixels_of_its_table(camvid: Path) -> None:
    """Its README says how many pixels of the training split each class has."""
    rows = re.findall(r"\| (\d+) \| ([a-z]+)[^|]*\| ([\d.]+)", (DATA / "camvid/README.md").read_text())
    expected = {int(value): float(part) for value, _, part in rows}
    source = open_set("camvid", camvid)
    assert split_counts(source) == {"train": 367, "val": 101, "test": 233}
    counts = np.zeros(256, np.int64)
    for i in np.flatnonzero(source.splits == "train"):
        counts += np.bincount(source.target(i).ravel(), minlength=256)
    parts = 100 * counts / counts.sum()
    assert {name: value for value, name, _ in rows if name != "void"} == {
        c: str(i) for i, c in enumerate(source.classes)
    }
    np.testing.assert_allclose(parts[[*range(11), 255]], [expected[i] for i in range(12)], atol=0.006)
    plain = open_masks(str(camvid / "val"), ignore=[11])
    assert len(plain.classes) == 11
    np.testing.assert_array_equal(plain.target(5), source.target(367 + 5))
