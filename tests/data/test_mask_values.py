"""Codings of masks: grey levels, palettes, colours; values that are ignored or not known."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image, ImageOps

from tests.helpers.made_masks import INDEX, mask, picture, tree
from weft.data.masks.folders import open_masks
from weft.data.read import BadPicture
from weft.errors import WeftError

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
