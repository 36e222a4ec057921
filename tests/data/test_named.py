"""Sets by name: tiny copies in the layouts of their publishers, compared with what torchvision itself reads there."""

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from tests.helpers.made_data import picture, refused, tree
from weft.config import DataConfig
from weft.data.sources.named import OTHERS, TORCHVISION
from weft.data.sources.open import open_source
from weft.data.sources.source import evaluated
from weft.data.split import make_split
from weft.errors import WeftError

RNG = np.random.default_rng(0)


def text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def idx(path: Path, array: np.ndarray) -> None:
    """MNIST's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes())


def matrix(path: Path, **columns) -> None:
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, columns)


def mnist(root: Path, folder: str = "MNIST", prefixes: tuple[str, str] = ("train", "t10k")) -> None:
    for prefix, n in zip(prefixes, (5, 3), strict=True):
        idx(root / f"{folder}/raw/{prefix}-images-idx3-ubyte", RNG.integers(0, 255, (n, 28, 28), np.uint8))
        idx(root / f"{folder}/raw/{prefix}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8))


def cifar(root: Path, folder: str, files: list[str], meta: str, key: str, label: str) -> None:
    (root / folder).mkdir()
    for file in files:
        content = {"data": RNG.integers(0, 255, (3, 3072), np.uint8), label: [0, 1, 2]}
        (root / folder / file).write_bytes(pickle.dumps(content))
    (root / folder / meta).write_bytes(pickle.dumps({key: ["a", "b", "c"]}))


def cifar10(root: Path) -> None:
    files = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    cifar(root, "cifar-10-batches-py", files, "batches.meta", "label_names", "labels")


def cifar100(root: Path) -> None:
    cifar(root, "cifar-100-python", ["train", "test"], "meta", "fine_label_names", "fine_labels")


def country211(root: Path) -> None:
    tree(root / "country211", *(f"{split}/{c}/1.jpg" for split in ("train", "valid", "test") for c in ("AD", "ZW")))


def dtd(root: Path) -> None:
    for i, split in enumerate(("train", "val", "test")):
        lines = [f"{c}/{c}_{i}.jpg" for c in ("banded", "zigzagged")]
        tree(root / "dtd/dtd/images", *lines)
        text(root / f"dtd/dtd/labels/{split}1.txt", "\n".join(lines))


def eurosat(root: Path) -> None:
    tree(root / "eurosat/2750", *(f"{c}/{c}_{i}.jpg" for c in ("Forest", "River") for i in range(2)))


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b/data"
    text(data / "variants.txt", "707-320\nA330")
    for i, split in enumerate(("train", "val", "test")):
        tree(data / "images", f"{i}0.jpg", f"{i}1.jpg")
        text(data / f"images_variant_{split}.txt", f"{i}0 A330\n{i}1 707-320")


def flowers(root: Path) -> None:
    tree(root / "flowers-102/jpg", *(f"image_{i:05}.jpg" for i in range(1, 7)))
    matrix(root / "flowers-102/imagelabels.mat", labels=np.array([1, 2, 3, 102, 5, 6]))
    matrix(root / "flowers-102/setid.mat", trnid=[1, 4], valid=[2, 3], tstid=[5, 6])


def food(root: Path) -> None:
    for i, split in enumerate(("train", "test")):
        names = {c: [f"{c}/{i}", f"{c}/{i}5"] for c in ("waffles", "apple_pie")}
        tree(root / "food-101/images", *(f"{name}.jpg" for files in names.values() for name in files))
        text(root / f"food-101/meta/{split}.json", json.dumps(names))


def gtsrb(root: Path) -> None:
    folder = root / "gtsrb/GTSRB"
    for path in ("Training/00000/0.ppm", "Training/00001/0.ppm", "Final_Test/Images/0.ppm", "Final_Test/Images/1.ppm"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 3), (len(path), 0, 0)).save(folder / path)
    text(root / "gtsrb/GT-final_test.csv", "Filename;Width;ClassId\n0.ppm;3;42\n1.ppm;3;7")


def inaturalist(root: Path) -> None:
    kinds = [f"{i:05}_Animalia_Chordata_Aves_Order_Family_Genus_species{i}" for i in range(2)]
    tree(
        root, *(f"{split}/{kind}/{i}.jpg" for split in ("2021_train", "2021_valid") for kind in kinds for i in range(2))
    )


def pets(root: Path) -> None:
    folder = root / "oxford-iiit-pet"
    for i, split in enumerate(("trainval", "test")):
        tree(folder / "images", f"Abyssinian_{i}.jpg", f"pug_{i}.jpg")
        text(folder / f"annotations/{split}.txt", f"Abyssinian_{i} 1 1 1\npug_{i} 2 2 1")


def rendered(root: Path) -> None:
    splits = ("train", "valid", "test")
    tree(root / "rendered-sst2", *(f"{split}/{c}/1.png" for split in splits for c in ("negative", "positive")))


def cars(root: Path) -> None:
    folder = root / "stanford_cars"
    tree(folder, *(f"cars_{split}/{i}.jpg" for split in ("train", "test") for i in (1, 2)))
    notes = np.array([("1.jpg", 2), ("2.jpg", 1)], dtype=[("fname", object), ("class", object)])
    matrix(folder / "devkit/cars_train_annos.mat", annotations=notes)
    matrix(folder / "cars_test_annos_withlabels.mat", annotations=notes)
    matrix(folder / "devkit/cars_meta.mat", class_names=np.array(["Acura", "BMW"], object))


def stl(root: Path) -> None:
    folder = root / "stl10_binary"
    text(folder / "class_names.txt", "airplane\nbird\n")
    for name, labels in (("train", [1, 2]), ("test", [2, 1]), ("unlabeled", [])):
        RNG.integers(0, 255, (len(labels), 3, 96, 96), np.uint8).tofile(folder / f"{name}_X.bin")
        np.array(labels, np.uint8).tofile(folder / f"{name}_y.bin")


def sun(root: Path) -> None:
    text(root / "SUN397/ClassName.txt", "/a/abbey\n/z/zoo/inner\n")
    tree(root / "SUN397", "a/abbey/sun_1.jpg", "z/zoo/inner/sun_2.jpg")


def svhn(root: Path) -> None:
    for split in ("train", "test"):
        matrix(root / f"{split}_32x32.mat", X=RNG.integers(0, 255, (32, 32, 3, 4), np.uint8), y=[[10], [1], [2], [9]])


SETS = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "country211": country211,
    "dtd": dtd,
    "emnist-balanced": lambda root: mnist(root, "EMNIST", ("emnist-balanced-train", "emnist-balanced-test")),
    "eurosat": eurosat,
    "fashion-mnist": lambda root: mnist(root, "FashionMNIST"),
    "fgvc-aircraft": aircraft,
    "flowers102": flowers,
    "food101": food,
    "gtsrb": gtsrb,
    "inaturalist-2021": inaturalist,
    "kmnist": lambda root: mnist(root, "KMNIST"),
    "mnist": mnist,
    "oxford-iiit-pet": pets,
    "rendered-sst2": rendered,
    "stanford-cars": cars,
    "stl10": stl,
    "sun397": sun,
    "svhn": svhn,
}


def test_every_set_is_tested():
    assert {name for name in TORCHVISION if not name.startswith("emnist")} <= SETS.keys()


@pytest.mark.parametrize("name", SETS)
def test_pictures_and_labels_are_torchvisions(tmp_path, monkeypatch, name):
    if name in ("flowers102", "stanford-cars", "svhn"):
        pytest.importorskip("scipy")
    for module in ("cifar", "flowers102", "stl10", "svhn"):  # these are not the published files
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda path, md5: Path(path).exists())
    SETS[name](tmp_path)
    named, source = TORCHVISION[name], open_source(f"{name}:{tmp_path}")
    assert len(set(source.names)) == len(source)
    assert not source.notes
    start = 0
    for split, arguments in named.splits.items():
        peer = getattr(datasets, named.kind)(tmp_path, **named.options, **arguments)
        assert (source.splits == split).sum() == len(peer) > 0
        for i in range(len(peer)):
            expected, label = peer[i]
            found = source.open(start + i)
            if isinstance(found, Path):
                found = np.asarray(Image.open(found).convert("RGB"))
                assert not source.names[start + i].startswith("/")
            assert np.array_equal(found, np.asarray(expected))
            assert source.labels[start + i] == label
            if hasattr(peer, "classes"):
                assert source.classes == [*peer.classes]
        start += len(peer)
    assert start == len(source)
    assert source.labels.max() < len(source.classes)
    make_split(source, DataConfig(val_fraction=0.5), 0)


@pytest.mark.parametrize("name", [*TORCHVISION, *OTHERS, "inaturalist"])
def test_missing_files_are_named(tmp_path, name):
    """Nothing is fetched, nothing is made, and the message says what was looked for where."""
    if name == "pcam":
        pytest.importorskip("h5py")
    message = refused(f"{name}:{tmp_path}", str(tmp_path))
    assert name in ("imagenet", "imagenet-v2") or "expected" in message
    assert not list(tmp_path.iterdir())
    refused(f"{name}:", "after the colon comes the folder")


def test_a_set_that_is_not_whole_is_refused(tmp_path):
    cifar10(tmp_path)  # other files than the published ones
    refused(f"cifar10:{tmp_path}", "cannot be read", "cifar-10-batches-py", "whole")


def test_one_missing_split_is_noted(tmp_path):
    food(tmp_path)
    (tmp_path / "food-101/meta/test.json").unlink()
    source = open_source(f"Food101:{tmp_path}")
    assert set(source.splits) == {"train"}
    assert "test cannot be read" in source.notes[0]


def test_caltech_has_no_background_class(tmp_path):
    tree(tmp_path / "caltech101/101_ObjectCategories", "BACKGROUND_Google/1.jpg", "Faces/1.jpg", "accordion/1.jpg")
    assert open_source(f"caltech101:{tmp_path}").classes == ["accordion", "Faces"]


def test_inaturalist_with_its_published_split(tmp_path):
    for split, ids in (("train", [1, 2, 3]), ("val", [4, 5])):
        images = [{"id": i, "file_name": f"train_val2018/Aves/{i % 2 + 7}/{i}.jpg"} for i in ids]
        content = {
            "images": images,
            "annotations": [{"image_id": i, "category_id": i % 2 + 7} for i in reversed(ids)],
            "categories": [{"id": 8, "name": "owl"}, {"id": 7, "name": "jay"}],
        }
        text(tmp_path / f"{split}2018.json", json.dumps(content))
        tree(tmp_path, *(image["file_name"] for image in images))
    source = open_source(f"inaturalist:{tmp_path}")
    assert source.classes == ["jay", "owl"]
    assert source.labels.tolist() == [1, 0, 1, 0, 1]
    assert source.splits.tolist() == ["train"] * 3 + ["val"] * 2
    assert source.open(0) == tmp_path / "train_val2018/Aves/8/1.jpg"


def test_imagenet_v2_folders_are_class_numbers(tmp_path):
    tree(tmp_path / "imagenetv2-matched-frequency-format-val", "0/a.jpeg", "10/b.jpeg", "999/c.jpeg")
    source = open_source(f"imagenet-v2:{tmp_path}")
    assert source.labels.tolist() == [0, 10, 999]
    assert len(source.classes) == 1000
    assert (source.classes[0], source.classes[999]) == ("n01440764", "n15075141")  # tench, toilet paper
    assert source.classes == sorted(source.classes)  # the folders of ImageNet
    assert len(evaluated(source)) == 3
    tree(tmp_path / "imagenetv2-matched-frequency-format-val", "1000/a.jpeg")
    refused(f"imagenet-v2:{tmp_path}", "0 to 999")


def test_imagenet_real_counts_any_of_its_labels(tmp_path):
    for i, folder in ((1, "n01440764"), (2, "n01440764"), (4, "n01443537")):
        picture(tmp_path / f"val/{folder}/ILSVRC2012_val_{i:08}.JPEG")
    text(tmp_path / "real.json", json.dumps([[3, 5], [], [9], [1]]))
    source = open_source(f"imagenet-real:{tmp_path}")
    assert [name[-13:] for name in source.names] == ["00000001.JPEG", "00000004.JPEG"]
    assert source.valid is not None
    assert [np.flatnonzero(row).tolist() for row in source.valid] == [[3, 5], [1]]
    assert source.labels.tolist() == [3, 1]
    assert "1 picture without a label" in source.notes[0]
    text(tmp_path / "real.json", "no")
    refused(f"imagenet-real:{tmp_path}", "not a valid JSON file")


def test_patch_camelyon(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "pcam").mkdir()
    pixels = RNG.integers(0, 255, (3, 96, 96, 3), np.uint8)
    for split in ("train", "valid", "test"):
        for column, content in (("x", pixels), ("y", np.array([0, 1, 1]).reshape(3, 1, 1, 1))):
            with h5py.File(tmp_path / f"pcam/camelyonpatch_level_2_split_{split}_{column}.h5", "w") as file:
                file[column] = content
    source, peer = open_source(f"pcam:{tmp_path}"), datasets.PCAM(tmp_path, "val")
    for i in range(3):
        assert np.array_equal(source.open(3 + i), np.asarray(peer[i][0]))
        assert source.labels[3 + i] == peer[i][1]
    assert source.splits.tolist() == [*["train"] * 3, *["val"] * 3, *["test"] * 3]


def test_a_set_without_its_folder_is_pointed_out():
    with pytest.raises(WeftError, match="The set of that name is cifar10:FOLDER"):
        open_source("cifar10")
