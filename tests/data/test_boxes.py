"""Boxes and shapes from COCO, VOC and YOLO files, against pycocotools and against what was written."""

import json
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image
from pycocotools import mask as reference
from pycocotools.coco import COCO

from tests.helpers.places import DATA
from weft.data.boxes.coco import BOX_SETS, open_boxes, open_coco, recognise
from weft.data.boxes.shapes import area_of, box_of, draw, encode, extent
from weft.data.demo import nuclei, open_nuclei
from weft.data.read import BadPicture
from weft.data.sources.open import open_source
from weft.data.sources.source import fingerprint
from weft.errors import WeftError

SQUARE = [1, 1, 5, 1, 5, 5, 1, 5]


def pictures(root: Path, *paths: str, size: tuple[int, int] = (20, 10)) -> Path:
    """Grey pictures of (width, height)."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", size).save(root / path)
    return root


def thing(number: int, box: list, image: int = 1, category: int = 1, **more) -> dict:
    return {"id": number, "image_id": image, "category_id": category, "bbox": box, **more}


def coco(file: Path, *objects: dict, images: int = 1, categories: dict[int, str] | None = None) -> Path:
    """A JSON file with pictures 1.png, 2.png, ... of 20 x 10 pixels."""
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "info": {"about": [1, {"images": []}]},
        "images": [{"id": i, "file_name": f"{i}.png", "width": 20, "height": 10} for i in range(1, images + 1)],
        "annotations": list(objects),
        "categories": [{"id": i, "name": name} for i, name in (categories or {1: "cat"}).items()],
    }
    file.write_text(json.dumps(content, indent=1))
    return file


def one(root: Path, *objects: dict, **more):
    """A set of one file beside its pictures."""
    pictures(root, *(f"{i}.png" for i in range(1, more.get("images", 1) + 1)))
    return open_coco(str(coco(root / "boxes.json", *objects, **more)))


# shapes


@given(arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=40)))
@settings(max_examples=60, deadline=None)
def test_run_lengths_are_those_of_pycocotools(mask):
    theirs = reference.encode(np.asfortranarray(mask.astype(np.uint8)))
    ours = encode(mask)
    assert ours == {"size": theirs["size"], "counts": theirs["counts"].decode()}
    json.dumps(ours)
    plain = {"size": theirs["size"], "counts": _counts(mask)}
    for shape in (ours, theirs, plain):
        assert np.array_equal(draw(shape, *mask.shape), mask)
        assert area_of(shape) == mask.sum()
        assert np.array_equal(extent(shape), box_of(mask))
    left, top, width, height = reference.toBbox(theirs)
    assert box_of(mask).tolist() == [left, top, left + width, top + height]


def _counts(mask: np.ndarray) -> list[int]:
    counts, now = [0], False
    for value in mask.T.ravel().tolist():
        if value != now:
            counts.append(0)
        counts[-1] += 1
        now = value
    return counts


def test_a_large_mask_keeps_its_run_lengths():
    """Runs of more than 2 ** 20 pixels take five letters."""
    mask = np.zeros((3000, 3000), bool)
    mask[:, 1500:] = True
    mask[7, 3] = True
    assert encode(mask)["counts"] == reference.encode(np.asfortranarray(mask.view(np.uint8)))["counts"].decode()
    assert np.array_equal(draw(encode(mask), 3000, 3000), mask)


coordinate = st.one_of(st.integers(-20, 60), st.integers(-200, 600).map(lambda x: x / 10), st.floats(-20, 60))


@given(
    st.lists(st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=9), min_size=1, max_size=3),
    st.integers(1, 40),
    st.integers(1, 40),
)
@settings(max_examples=120, deadline=None)
def test_polygons_are_drawn_as_by_pycocotools(polygons, height, width):
    shape = [[float(value) for point in polygon for value in point] for polygon in polygons]
    theirs = reference.decode(reference.merge(reference.frPyObjects(shape, height, width)))
    assert np.array_equal(draw(shape, height, width), theirs)


def test_area_of_polygons_is_what_is_inside():
    assert area_of([SQUARE, [10, 0, 14, 0, 10, 4]]) == 16 + 8
    assert area_of([SQUARE[::-1]]) == 16
    assert extent([SQUARE, [10, 0, 14, 0, 10, 4]]).tolist() == [1, 0, 14, 5]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([[1, 2, 3, 4]], "2 points"),
        ([[1, 2, 3, 4, 5]], "not a list of numbers"),
        ([["a", 2, 3, 4, 5, 6]], "not a list of numbers"),
        ([[1, 2, 3, float("nan"), 5, 6]], "NaN"),
        ([[0, 0, 1e12, 0, 0, 1e12]], "far beyond"),
        ({"size": [9, 8], "counts": [72]}, "[9, 8]"),
        ({"size": [8, 9], "counts": [71]}, "sum to 71"),
        ({"size": [8, 9], "counts": [80, -8]}, "negative or longer"),
        ({"size": [4, 4], "counts": [2**62] * 3 + [2**62 + 16]}, "negative or longer"),  # whose sum overflows to 16
        ({"size": [8, 9], "counts": [71.5, 0.5]}, "without counts"),
        ({"size": [8, 9], "counts": "\x01"}, "characters"),
        ({"size": [8, 9], "counts": "P"}, "characters"),
        ({"size": [8, 9], "counts": "ooooooooooooooo0"}, "too large"),
        ({"size": [8, 9]}, "without counts"),
        ({"counts": [72]}, "size"),
        ({"size": [1 << 30, 1 << 30], "counts": [1 << 60]}, "pixels"),
    ],
)
def test_shapes_that_cannot_be_drawn_say_why(shape, words):
    with pytest.raises(BadPicture) as error:
        draw(shape, 8, 9)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# COCO


SPLIT = ["train", "val"]


@pytest.mark.parametrize(
    ("files", "folders", "splits"),
    [
        (
            ["annotations/instances_train2017.json", "annotations/instances_val2017.json"],
            ["train2017", "val2017"],
            SPLIT,
        ),
        (["instances_train.json", "instances_val.json"], ["train", "val"], SPLIT),
        (["train/_annotations.coco.json", "valid/_annotations.coco.json"], ["train", "valid"], SPLIT),
        (["annotations/train.json", "annotations/val.json"], ["images/train", "images/val"], SPLIT),
        (["annotations/captions_train2017.json", "annotations/instances_train2017.json"], ["", "train2017"], ["train"]),
        (["annotations/instances_default.json"], ["images/default"], [""]),
        (["labels.json"], ["data"], [""]),
        (["result.json"], [""], [""]),
    ],
)
def test_layouts_of_coco(tmp_path, files, folders, splits):
    for file, folder in zip(files, folders, strict=True):
        coco(tmp_path / file, thing(1, [2, 3, 4, 5], image=2), images=2)
        pictures(tmp_path / folder, "1.png", "2.png")
    assert recognise(tmp_path) == "coco"
    source = open_boxes(str(tmp_path))
    assert source.splits.tolist() == [split for split in splits for _ in range(2)]
    assert (source.task, source.multilabel) == ("detect", True)
    assert source.labels.tolist() == [[False], [True]] * len(splits)
    for i in range(len(source)):
        assert source.open(i).is_file()
        assert len(source.target(i)) == i % 2
    assert source.target(1).boxes.tolist() == [[2, 3, 6, 8]]
    assert source.target(1).size == (10, 20)


def test_the_same_ids_in_two_files_are_two_pictures(tmp_path):
    """And classes are matched by name, since each file counts for itself."""
    coco(tmp_path / "instances_train.json", thing(1, [0, 0, 5, 5]), categories={1: "cat", 7: "dog"})
    coco(tmp_path / "instances_val.json", thing(1, [0, 0, 6, 6], category=2), categories={2: "cat", 3: "cow"})
    pictures(tmp_path, "train/1.png", "val/1.png")
    source = open_coco(str(tmp_path))
    assert source.classes == ["cat", "dog", "cow"]
    assert list(source.names) == ["train/1.png", "val/1.png"]
    assert [source.target(i).labels.tolist() for i in range(2)] == [[0], [0]]
    assert source.target(1).boxes.tolist() == [[0, 0, 6, 6]]


def test_gaps_crowds_shapes_and_areas(tmp_path):
    source = one(
        tmp_path,
        thing(5, [1, 1, 4, 4], category=90, segmentation=[SQUARE], area=15.5),
        thing(6, [0, 0, 20, 10], category=3, segmentation=encode(np.ones((10, 20), bool)), iscrowd=1),
        thing(7, [1, 1, 4, 4], category=3, segmentation=[SQUARE]),
        thing(8, [2, 2, 3, 5], category=3, segmentation=[]),
        thing(9, [], category=3, segmentation={"size": [10, 20], "counts": [31, 3, 166]}),
        categories={90: "bear", 3: "cow", 50: "unused"},
    )
    assert source.classes == ["cow", "unused", "bear"]
    assert any("gaps" in note for note in source.notes)
    assert source.targets.has_shapes
    found = source.target(0)
    assert found.labels.tolist() == [2, 0, 0, 0, 0]
    assert found.crowd.tolist() == [False, True, False, False, False]
    assert found.area.tolist() == [15.5, 200, 16, 15, 3]
    assert found.boxes[4].tolist() == [3, 1, 4, 4]
    assert np.array_equal(draw(found.shapes[3], 10, 20), _block(2, 2, 5, 7))  # the box, where there is no shape
    assert source.targets.faults.counts == {"no-shape": 1}
    assert source.labels.tolist() == [[True, False, True]]


def _block(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    mask = np.zeros((10, 20), bool)
    mask[top:bottom, left:right] = True
    return mask


def test_crowds_alone_are_no_occurrence(tmp_path):
    source = one(tmp_path, thing(1, [0, 0, 5, 5], iscrowd=1))
    assert not source.labels.any()
    assert len(source.target(0)) == 1
    assert not source.targets.has_shapes


def test_a_size_that_is_not_written_down_is_read_from_the_picture(tmp_path):
    file = coco(tmp_path / "boxes.json", thing(1, [2, 3, 4, 5]))
    content = json.loads(file.read_text())
    del content["images"][0]["width"]
    file.write_text(json.dumps(content))
    pictures(tmp_path, "1.png", size=(30, 40))
    assert open_coco(str(file)).target(0).size == (40, 30)


def test_workers_get_the_same_objects(tmp_path):
    source = one(tmp_path, thing(1, [1, 1, 4, 4], segmentation=[SQUARE]))
    copy = pickle.loads(pickle.dumps(source))
    assert copy.target(0).shapes == source.target(0).shapes == [[SQUARE]]


def test_a_changed_box_or_shape_changes_the_fingerprint(tmp_path):
    prints = set()
    for x, last, crowd in ((1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (1, 5, 0)):
        shape = [[*SQUARE[:-1], last]]
        prints.add(fingerprint(one(tmp_path, thing(1, [x, 1, 4, 4], segmentation=shape, iscrowd=crowd))))
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "expected {"),
        ("[1, 2]", "expected {"),
        ('{"images": [', "Expecting value"),
        ('{"images": [{"id": 1} {"id": 2}]}', "expected , or ]"),
        ('{"images": []}', "has no images"),
        ('{"images": [{"id": 1, "file_name": "1.png"}]}', "has no categories"),
        (
            '{"images": [{"id": 1, "file_name": "no.png"}], "categories": [{"id": 1, "name": "a"}]}',
            "none of its pictures",
        ),
        ('{"a": ' + "[" * 100_000, "not a COCO JSON"),
    ],
)
def test_files_that_are_not_coco_get_one_line(tmp_path, content, words):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(WeftError) as error:
        open_boxes(str(tmp_path / "a.json"))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("train_a.json", "train_b.json"):
        coco(tmp_path / name, thing(1, [0, 0, 5, 5]))
    with pytest.raises(WeftError, match=r"train_a.json and train_b.json, both for train"):
        open_coco(str(tmp_path))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_survived_or_told(tmp_path_factory, data):
    """Any value of a file replaced by any other: opening works, or one line says why not."""
    root = tmp_path_factory.mktemp("damage")
    pictures(root, "1.png")
    objects = [thing(i, [1, 1, 4, 4], segmentation=[SQUARE]) for i in (1, 2)]
    file = coco(root / "boxes.json", *objects)
    content = json.loads(file.read_text())
    places = [(content, key) for key in content]
    for holder in (record for name in ("images", "annotations", "categories") for record in content[name]):
        places += [(holder, key) for key in holder]
    holder, key = data.draw(st.sampled_from(places))
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3))
    holder[key] = data.draw(
        st.recursive(
            leaf,
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
            max_leaves=6,
        )
    )
    file.write_text(json.dumps(content))
    try:
        source = open_coco(str(file))
        found = source.target(0)
    except (WeftError, BadPicture) as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    assert np.isfinite(found.boxes).all()
    assert (found.boxes[:, 2:] - found.boxes[:, :2] >= 1).all()
    assert (found.boxes >= 0).all()
    assert ((found.labels >= 0) & (found.labels < len(source.classes))).all()
    for shape in found.shapes:
        with suppress(BadPicture):
            draw(shape, *found.size)


def unpacked(tmp_path: Path, name: str, only: str = "*.zip") -> Path:
    """A real set from its zips, or skips."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; WEFT_DATA names the folder that holds {name}")
    for file in folder.glob(only):
        with zipfile.ZipFile(file) as packed:
            packed.extractall(tmp_path)
    for file in folder.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    return tmp_path


@pytest.mark.parametrize(("name", "left_out"), [("coco-mini", 1), ("nuclei-dsb2018", 0)])
def test_real_sets_are_read_as_by_pycocotools(tmp_path, name, left_out):
    root = unpacked(tmp_path, name)
    source = open_coco(str(root))
    number = {path: i for i, path in enumerate(source.names)}
    seen = 0
    for file in sorted(root.glob("*.json")):
        theirs = COCO(file)
        classes = {identity: theirs.cats[identity]["name"] for identity in theirs.getCatIds()}
        for identity, image in theirs.imgs.items():
            i = next(number[path] for path in number if path.endswith("/" + image["file_name"]))
            ours, mine = source.target(i), source.targets.numbers[source.targets.rows(i)]
            seen += len(mine)
            assert ours.size == (image["height"], image["width"])
            assert set(mine) <= set(theirs.getAnnIds(identity))
            for k, entry in enumerate(theirs.loadAnns(mine.tolist())):
                x, y, width, height = entry["bbox"]
                np.testing.assert_allclose(ours.boxes[k], [x, y, x + width, y + height], atol=1)  # clipped
                assert source.classes[ours.labels[k]] == classes[entry["category_id"]]
                assert ours.crowd[k] == entry["iscrowd"]
                np.testing.assert_allclose(ours.area[k], entry["area"], rtol=1e-6)
                if identity % 20 == 0:
                    assert np.array_equal(draw(ours.shapes[k], *ours.size), theirs.annToMask(entry))
        seen -= len(theirs.anns)
    assert seen == -left_out


# VOC


def voc_xml(*objects: str, size: str = "<size><width>20</width><height>10</height></size>") -> str:
    return f"<annotation><filename>x.png</filename>{size}{''.join(objects)}</annotation>"


def voc_object(name: str, xmin, ymin, xmax, ymax, more: str = "") -> str:
    corners = zip(("xmin", "ymin", "xmax", "ymax"), (xmin, ymin, xmax, ymax), strict=True)
    box = "".join(f"<{side}>{value}</{side}>" for side, value in corners)
    part = "<part><name>head</name><bndbox><xmin>9</xmin></bndbox></part>"
    return f"<object><name>{name}</name>{more}{part}<bndbox>{box}</bndbox></object>"


@pytest.mark.parametrize(
    ("xml", "folder", "lists", "splits"),
    [
        ("Annotations/{}.xml", "JPEGImages", True, ["train", "val"]),
        ("VOCdevkit/VOC2007/Annotations/{}.xml", "VOCdevkit/VOC2007/JPEGImages", True, ["train", "val"]),
        ("VOC2012/Annotations/{}.xml", "VOC2012/JPEGImages", False, ["", ""]),
        ("annotations/{}.xml", "images", False, ["", ""]),
        ("train/{}.xml", "train", False, ["train", "train"]),
        ("{}.xml", "", False, ["", ""]),
    ],
)
def test_layouts_of_voc(tmp_path, xml, folder, lists, splits):
    pictures(tmp_path / folder, "2.png", "10.png")
    (tmp_path / xml).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / xml.format(2)).write_text(voc_xml(voc_object("dog10", 1, 1, 20, 10), voc_object("dog2", 3, 4, 6, 8)))
    (tmp_path / xml.format(10)).write_text(voc_xml(voc_object("dog2", 2, 2, 5, 5, "<difficult>1</difficult>")))
    if lists:
        main = tmp_path / xml.partition("Annotations")[0] / "ImageSets/Main"
        main.mkdir(parents=True)
        for name, stems in {"train": "2", "val": "10", "trainval": "2\n10", "dog_train": "10 -1"}.items():
            (main / f"{name}.txt").write_text(f"{stems}\n")
    assert recognise(tmp_path) == "voc"
    source = open_boxes(str(tmp_path))
    assert [Path(name).name for name in source.names] == ["2.png", "10.png"]
    assert source.splits.tolist() == splits
    assert source.classes == ["dog2", "dog10"]
    assert source.target(0).boxes.tolist() == [[0, 0, 20, 10], [2, 3, 6, 8]]  # VOC counts from 1 and includes the last
    assert source.target(0).labels.tolist() == [1, 0]
    assert source.target(1).crowd.tolist() == [True]
    assert source.labels.tolist() == [[True, True], [False, False]]
    assert not source.targets.has_shapes


def test_boxes_that_begin_at_zero_count_from_zero(tmp_path):
    pictures(tmp_path, "a.png")
    (tmp_path / "a.xml").write_text(voc_xml(voc_object("dog", 0, 2, 7, 8), size=""))
    source = open_boxes(str(tmp_path))
    assert source.target(0).boxes.tolist() == [[0, 2, 7, 8]]
    assert source.target(0).size == (10, 20)


BOMB = '<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;&b;&b;">]>' + voc_xml(voc_object("&c;", 1, 1, 9, 9))
SPY = '<!DOCTYPE a [<!ENTITY b SYSTEM "{}">]>' + voc_xml(voc_object("&b;", 1, 1, 9, 9)).replace("{", "{{")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("text", [BOMB, SPY, "<annotation>", "no XML", voc_xml(voc_object("&nbsp;", 1, 1, 9, 9))])
def test_hostile_xml_is_left_out(tmp_path, text, encoding):
    pictures(tmp_path, "a.png", "b.png")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (tmp_path / "a.xml").write_text(voc_xml(voc_object("dog", 1, 1, 9, 9)))
    (tmp_path / "b.xml").write_bytes(text.replace("{}", secret.as_uri()).encode(encoding))
    source = open_boxes(str(tmp_path))
    assert source.classes == ["dog"]
    assert list(source.names) == ["a.png"]
    assert source.targets.faults.named["malformed"].keys() == {"b.xml"}


# YOLO


@pytest.mark.parametrize(
    ("pictures_in", "labels_in", "splits"),
    [
        (["images/train", "images/val"], ["labels/train", "labels/val"], SPLIT),
        (["train/images", "valid/images"], ["train/labels", "valid/labels"], SPLIT),
        (["images"], ["labels"], [""]),
        ([""], [""], [""]),
        (["obj_train_data"], ["obj_train_data"], [""]),
    ],
)
def test_layouts_of_yolo(tmp_path, pictures_in, labels_in, splits):
    for folder, texts in zip(pictures_in, labels_in, strict=True):
        pictures(tmp_path / folder, "1.png", "2.png")
        (tmp_path / texts).mkdir(parents=True, exist_ok=True)
        (tmp_path / texts / "2.txt").write_text("1 0.5 0.5 0.2 0.4\n\n0 0.25 0.5 0.5 1\n")
    (tmp_path / "data.yaml").write_text("nc: 2\nnames: [cat, dog]\n")
    assert recognise(tmp_path) == "yolo"
    for given_as in (tmp_path, tmp_path / "data.yaml"):
        source = open_boxes(str(given_as))
        assert source.splits.tolist() == [split for split in splits for _ in range(2)]
        assert source.classes == ["cat", "dog"]
        assert len(source.target(0)) == 0
        assert source.target(1).size == (10, 20)
        np.testing.assert_allclose(source.target(1).boxes, [[8, 3, 12, 7], [0, 0, 10, 10]], atol=1e-5)
        assert source.target(1).labels.tolist() == [1, 0]
        assert source.target(1).area.tolist() == pytest.approx([16, 100])
        assert not source.targets.has_shapes


def test_yolo_polygons(tmp_path):
    pictures(tmp_path, "images/1.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("0 0.1 0.2 0.4 0.2 0.4 0.6 0.1 0.6\n")
    (tmp_path / "labels/classes.txt").write_text("leaf\n")
    source = open_boxes(str(tmp_path))
    found = source.target(0)
    assert source.classes == ["leaf"]
    np.testing.assert_allclose(found.boxes, [[2, 2, 8, 6]], atol=1e-5)
    assert np.array_equal(draw(found.shapes[0], 10, 20), _block(2, 2, 8, 6))
    assert found.area.tolist() == pytest.approx([24])


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("names: {0: a, 2: c}", ["a", "1", "c"]),
        ("names: [x, 7]", ["x", "7"]),
        ("train: images", ["0", "1"]),
        ("- 1", ["0", "1"]),
    ],
)
def test_names_of_yolo_classes(tmp_path, names, classes):
    pictures(tmp_path, "images/1.png")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("1 0.5 0.5 0.2 0.4\n")
    (tmp_path / "data.yaml").write_text(names)
    assert open_boxes(str(tmp_path)).classes == classes


def test_yolo_follows_the_exif_rotation(tmp_path):
    """Fractions are of the picture as people see it."""
    pictures(tmp_path, "images/1.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("L", (20, 10)).save(tmp_path / "images/1.jpg", exif=exif)
    (tmp_path / "images/1.png").unlink()
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/1.txt").write_text("0 0.5 0.5 0.2 0.4\n")
    assert open_boxes(str(tmp_path)).target(0).size == (20, 10)


# which is which


@pytest.mark.parametrize(
    "paths",
    [
        ["cat/1.png", "dog/2.png"],
        ["train/cat/1.png", "val/cat/2.png"],
        ["images/1.png", "masks/1.png"],
        ["images/1.png", "labels/1.png"],
        ["1.png"],
    ],
)
def test_other_data_is_not_taken_for_boxes(tmp_path, paths):
    pictures(tmp_path, *paths)
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "notes.json").write_text('{"images": [], "categories": []}')
    (tmp_path / Path(paths[0]).parent / "caption.txt").write_text("a cat on a mat\n")
    assert recognise(tmp_path) == ""
    with pytest.raises(WeftError, match="no boxes"):
        open_boxes(str(tmp_path))


def test_sets_by_name(tmp_path):
    coco(tmp_path / "annotations/instances_train2017.json", thing(1, [0, 0, 5, 5]))
    pictures(tmp_path, "train2017/1.png")
    assert BOX_SETS["coco"]("coco:here", tmp_path).root == "coco:here"
    assert set(BOX_SETS) == {"coco", "voc-detect"}


def test_segmentation_of_boxes_is_refused(tmp_path):
    coco(tmp_path / "boxes.json", thing(1, [0, 0, 5, 5]))
    pictures(tmp_path, "1.png")
    with pytest.raises(WeftError, match=r"no shapes from which masks could be drawn"):
        open_source(str(tmp_path), task="segment")


# the embedded nuclei


def test_embedded_nuclei_as_objects_and_as_masks():
    objects, masks = open_nuclei("detect"), open_nuclei("segment")
    numbers = np.concatenate([nuclei("train")[1], nuclei("val")[1]])
    assert objects.classes == ["nucleus"]
    assert masks.classes == ["background", "nucleus"]
    assert objects.splits.tolist() == masks.splits.tolist() == ["train"] * 224 + ["val"] * 64
    assert objects.labels.shape == (288, 1)
    assert objects.labels.all()
    assert fingerprint(objects) != fingerprint(masks)
    for i in range(0, 288, 24):
        found = objects.target(i)
        assert len(found) == numbers[i].max()
        drawn = np.zeros((256, 256), np.uint8)
        for k, shape in enumerate(found.shapes, 1):
            mask = reference.decode(reference.frPyObjects(shape, 256, 256)).astype(bool)
            drawn[mask] = k
            assert found.boxes[k - 1].tolist() == box_of(mask).tolist()
            assert found.area[k - 1] == mask.sum()
        assert np.array_equal(drawn, numbers[i])
        assert np.array_equal(masks.target(i), (numbers[i] > 0).astype(np.uint8))


def test_embedded_nuclei_are_the_published_ones(tmp_path):
    """Those of validation; in one of them two nuclei share a pixel, which one has here."""
    theirs = open_coco(str(unpacked(tmp_path, "nuclei-dsb2018")))
    ours = open_nuclei("detect")
    theirs_at, ours_at = (np.flatnonzero(source.splits == "val") for source in (theirs, ours))
    other = 0
    for i, k in zip(theirs_at, ours_at, strict=True):
        assert np.array_equal(np.asarray(Image.open(theirs.open(i))), ours.open(k))
        assert np.abs(theirs.target(i).boxes - ours.target(k).boxes).max() <= 1
        other += int((theirs.target(i).area != ours.target(k).area).sum())
    assert other == 1
