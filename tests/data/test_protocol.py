"""Known sets in their published protocol: as many pictures train and test as the papers print.

Stand-ins have the published files with the published numbers of entries, and no pictures.
"""

import io
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.data.test_named import SETS, matrix, mnist, text
from tests.helpers.made_data import tree
from weft.config import Config, DataConfig, override
from weft.data.sampler import SamplingPlan
from weft.data.sources.open import open_configured, open_source
from weft.data.split import make_split
from weft.errors import WeftError
from weft.run.recipes import find_recipe


def cifar(root: Path, folder: str, files: dict[str, int], meta: str, key: str) -> None:
    (root / folder).mkdir()
    for file, pictures in files.items():
        (root / folder / file).write_bytes(pickle.dumps(pictures))
    (root / folder / meta).write_bytes(pickle.dumps({key: ["a", "b"]}))


def load_pictures(file: io.BufferedReader, encoding: str) -> dict:
    """Stands in for pickle.load: as many blank pictures as the file says."""
    content = pickle.load(file)
    if isinstance(content, dict):
        return content
    return {"data": np.zeros((content, 3072), np.uint8), "labels": [i % 2 for i in range(content)]}


def cifar10(root: Path) -> None:
    files = {**{f"data_batch_{i}": 10_000 for i in range(1, 6)}, "test_batch": 10_000}
    cifar(root, "cifar-10-batches-py", files, "batches.meta", "label_names")


def cifar100(root: Path) -> None:
    cifar(root, "cifar-100-python", {"train": 50_000, "test": 10_000}, "meta", "fine_label_names")


def pets(root: Path) -> None:
    (root / "oxford-iiit-pet/images").mkdir(parents=True)
    for split, count in (("trainval", 3680), ("test", 3669)):
        lines = [f"breed{i % 37}_{split}{i} {i % 37 + 1} 1 1" for i in range(count)]
        text(root / f"oxford-iiit-pet/annotations/{split}.txt", "\n".join(lines))


def cars(root: Path) -> None:
    folder = root / "stanford_cars"
    for split, count, file in (
        ("train", 8144, "devkit/cars_train_annos.mat"),
        ("test", 8041, "cars_test_annos_withlabels.mat"),
    ):
        (folder / f"cars_{split}").mkdir(parents=True)
        rows = [(f"{i:05}.jpg", i % 196 + 1) for i in range(count)]
        matrix(folder / file, annotations=np.array(rows, dtype=[("fname", object), ("class", object)]))
    matrix(folder / "devkit/cars_meta.mat", class_names=np.array([f"car {i}" for i in range(196)], object))


def flowers(root: Path) -> None:
    (root / "flowers-102/jpg").mkdir(parents=True)
    ids = np.arange(1, 8190)
    matrix(root / "flowers-102/imagelabels.mat", labels=ids % 102 + 1)
    matrix(root / "flowers-102/setid.mat", trnid=ids[:1020], valid=ids[1020:2040], tstid=ids[2040:])


def aircraft(root: Path) -> None:
    data = root / "fgvc-aircraft-2013b/data"
    (data / "images").mkdir(parents=True)
    text(data / "variants.txt", "707-320\nA330")
    for split, count in (("train", 3334), ("val", 3333), ("test", 3333)):
        text(data / f"images_variant_{split}.txt", "\n".join(f"{split}{i} A330" for i in range(count)))


def dtd(root: Path) -> None:
    (root / "dtd/dtd/images").mkdir(parents=True)
    for split in ("train", "val", "test"):
        lines = [f"kind{c}/{split}_{i}.jpg" for c in range(47) for i in range(40)]
        text(root / f"dtd/dtd/labels/{split}1.txt", "\n".join(lines))


PUBLISHED = {  # pictures that train, and those that test; CeiT's table 3 has the first five, with 8,133 of Cars' 8,144
    "cifar10": (cifar10, 50_000, 10_000),
    "cifar100": (cifar100, 50_000, 10_000),
    "oxford-iiit-pet": (pets, 3_680, 3_669),
    "stanford-cars": (cars, 8_144, 8_041),
    "flowers102": (flowers, 2_040, 6_149),
    "dtd": (dtd, 3_760, 1_880),
    "fgvc-aircraft": (aircraft, 6_667, 3_333),
}


@pytest.fixture
def unchecked(monkeypatch):
    """Torchvision takes stand-ins for the published files."""
    for module in ("cifar", "flowers102", "stl10", "svhn"):
        monkeypatch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda path, md5: Path(path).exists())


@pytest.fixture
def blank_cifar(monkeypatch, unchecked):
    monkeypatch.setattr("torchvision.datasets.cifar.pickle", SimpleNamespace(load=load_pictures))


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_pictures_as_the_papers_have(tmp_path, blank_cifar, name):
    if name in ("flowers102", "stanford-cars"):
        pytest.importorskip("scipy")
    make, train, test = PUBLISHED[name]
    make(tmp_path)
    source = open_source(f"{name}:{tmp_path}")
    split = make_split(source, DataConfig(), 0)
    assert (len(split.train), len(split.val), len(split.test)) == (train, 0, test)
    assert split.reported is split.test

    chosen = make_split(source, DataConfig(val_fraction=0.1), 0)
    assert len(chosen.train) + len(chosen.val) == train
    assert len(chosen.val) == pytest.approx(0.1 * train, abs=1)
    np.testing.assert_array_equal(chosen.reported, split.test)


@pytest.mark.parametrize(
    ("year", "train", "val"),
    [
        pytest.param(2018, 437_513, 24_426, marks=pytest.mark.slow),
        (2019, 265_240, 3_003),
    ],
)
def test_inaturalist_reports_on_its_validation_pictures(tmp_path, monkeypatch, year, train, val):
    """The labels of its test pictures were never published."""

    def content(given, path):
        first, count = (0, train) if path.name.startswith("train") else (train, val)
        images = [{"id": i, "file_name": f"{i}.jpg"} for i in range(first, first + count)]
        annotations = [{"image_id": i, "category_id": i % 10} for i in range(first, first + count)]
        return {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": i, "name": str(i)} for i in range(10)],
        }

    for split in ("train", "val"):
        (tmp_path / f"{split}{year}.json").touch()
    monkeypatch.setattr("weft.data.sources.named._json", content)
    split = make_split(open_source(f"inaturalist-{year}:{tmp_path}"), DataConfig(), 0)
    assert (len(split.train), len(split.reported)) == (train, val)
    assert split.report_on == "val"


@pytest.mark.parametrize("name", [name for name in SETS if name not in ("eurosat", "sun397", "inaturalist-2021")])
def test_everything_but_the_test_part_trains(tmp_path, unchecked, name):
    if name in ("flowers102", "stanford-cars", "svhn"):
        pytest.importorskip("scipy")
    SETS[name](tmp_path)
    source = open_source(f"{name}:{tmp_path}")
    split = make_split(source, DataConfig(), 0)
    assert (source.splits[split.test] == "test").all()
    assert len(split.test) == (source.splits == "test").sum() > 0
    assert len(split.train) == (source.splits != "test").sum()
    assert not len(split.val)


@pytest.mark.parametrize("parts", [("train", "val"), ("train", "val", "test")])
def test_imagenet_is_as_it_is_laid_out(tmp_path, parts):
    """Its validation pictures never train, not even where somebody has put a test folder beside them."""
    tree(tmp_path, *(f"{part}/n0{c}/{i}.png" for part in parts for c in range(2) for i in range(3)))
    source = open_source(f"imagenet:{tmp_path}")
    split = make_split(source, DataConfig(val_fraction=0.2), 0)
    assert (len(split.train), len(split.val), split.report_on) == (6, 6, "val")
    assert len(split.test) == 6 * (len(parts) - 2)


def test_a_set_without_a_split_is_split(tmp_path):
    SETS["eurosat"](tmp_path)
    split = make_split(open_source(f"eurosat:{tmp_path}"), DataConfig(), 0)
    assert (len(split.train), len(split.val), split.report_on) == (3, 1, "val")


@pytest.mark.parametrize(("config", "held"), [(DataConfig(protocol="split"), 3), (DataConfig(folds=5), 3)])
def test_split_protocol_and_folds_hold_out(tmp_path, unchecked, config, held):
    SETS["cifar10"](tmp_path)  # 15 pictures train, 3 test
    split = make_split(open_source(f"cifar10:{tmp_path}"), config, 0)
    assert (len(split.train), len(split.val), len(split.test), split.report_on) == (15 - held, held, 3, "val")


def test_a_second_source_validates(tmp_path):
    mnist(tmp_path)
    data = f"mnist:{tmp_path}"
    source = open_configured(DataConfig(source=data, val=data))
    split = make_split(source, DataConfig(source=data, val=data), 0)
    assert (len(split.train), len(split.val), split.report_on) == (5, 3, "val")


@pytest.mark.parametrize(
    ("recipe", "pictures", "given", "steps"),
    [
        ("cvt-transfer", 50_000, {}, 10_000),
        ("cvt-transfer", 3_680, {"run.steps": 500}, 500),
        ("cvt-transfer", 2_040, {"run.steps": 500}, 500),
        ("cvt-384", 1_281_167, {}, 20_000),
        ("ceit-transfer", 50_000, {}, 100 * 97),
        ("vitae-cifar", 50_000, {}, (1000 + 10) * 97),
        ("vt-fpn-coco-stuff", 118_287, {}, 90_000),
    ],
)
def test_lengths_of_recipes_in_steps(recipe, pictures, given, steps):
    from weft.run.session import total_steps

    config = override(Config(), {**find_recipe(recipe), **given})
    assert total_steps(config, SamplingPlan(np.arange(pictures), batch=config.run.batch, seed=0)) == steps


@pytest.mark.parametrize(("steps", "fits"), [(15 * 97, False), (15 * 97 + 1, True)])
def test_steps_must_be_more_than_warm_up_and_cool_down(steps, fits):
    """5 epochs of one and 10 of the other; the cosine between them would have a length below 0."""
    from weft.run.session import total_steps

    config = override(Config(), {**find_recipe("cvt-imagenet"), "run.steps": steps, "run.batch": 512})
    plan = SamplingPlan(np.arange(50_000), batch=512, seed=0)
    if fits:
        assert total_steps(config, plan) == steps
    else:
        with pytest.raises(WeftError, match=r"run\.steps=1455 are 15 epochs here, not more than"):
            total_steps(config, plan)
