"""Sets of masks by name, against torchvision's sets and metadata."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_masks import INDEX, mask, picture, tree
from tests.helpers.places import DATA
from weft.data.masks import sets as mask_sets
from weft.data.masks.folders import open_masks
from weft.data.masks.sets import MASK_SETS
from weft.data.sources.source import Source
from weft.errors import WeftError


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


def test_stuff_alone(tmp_path: Path) -> None:
    values = np.array([[0, 12, 91, 181, 255]] * 3, np.uint8)  # person, stop sign, banner, wood
    pairs = [f"{split}2017/1.jpg stuffthingmaps/{split}2017/1.png" for split in ("train", "val")]
    source = open_set("coco-stuff-91", tree(tmp_path, *pairs, values=values))
    assert len(source.classes) == len(set(source.classes)) == 91
    assert (source.classes[0], source.classes[90]) == ("banner", "wood")
    np.testing.assert_array_equal(source.target(0)[0], [255, 255, 0, 90, 255])


# Detectron2's numbers of COCO's panoptic stuff, and COCO-Stuff's numbers that go into them, from its own table
MERGED = {94: 37, 97: 37, 129: 37, 169: 37, 99: 38, 120: 40, 116: 44, 140: 44, 158: 50, 174: 52, 131: 53, 152: 53}
ALONE = {92: 1, 93: 2, 95: 3, 100: 4, 107: 5, 118: 8, 128: 12, 154: 23, 159: 26, 178: 34, 181: 36}
VOID = [104, 105, 123, 126, 132, 142, 143, 160, 164, 167, 179, 182]


def test_stuff_as_detectron2_merges_it(tmp_path: Path) -> None:
    """Things are 0, stuff follows, what COCO's panoptic annotations gave up is ignored; the maps count from 0."""
    expected = {**dict.fromkeys(range(1, 91), 0), **ALONE, **MERGED, **dict.fromkeys(VOID, 255)}
    values = np.array([[number - 1 for number in expected] + [255]], np.uint8)
    for split in ("train", "val"):
        picture(tmp_path / f"{split}2017/1.jpg", (values.shape[1], 1))
        mask(tmp_path / f"stuffthingmaps/{split}2017/1.png", values)
    source = open_set("coco-stuff-54", tmp_path)
    assert len(source.classes) == len(set(source.classes)) == 54
    np.testing.assert_array_equal(source.target(0)[0], [*expected.values(), 255])
    assert (source.classes[37], source.classes[53]) == ("tree-merged", "rug-merged")


def test_masks_that_detectron2_made_are_taken_as_they_are(tmp_path: Path) -> None:
    values = np.array([[0, 1, 37, 53, 255]] * 3, np.uint8)
    pairs = [f"{split}2017/1.jpg panoptic_stuff_{split}2017/1.png" for split in ("train", "val")]
    source = open_set("coco-stuff-54", tree(tmp_path, *pairs, values=values))
    np.testing.assert_array_equal(source.target(0)[0], values[0])
    assert "panoptic_stuff" in source.layout


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
