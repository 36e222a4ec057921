"""Sets by name from a local folder, NAME:ROOT: torchvision's, the ImageNet family, and the embedded demo.

Nothing is ever downloaded: where files are missing, the error says what was expected where.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.demo import open_demo
from weft.data.sources.folders import open_folders
from weft.data.sources.source import Files, JoinedReaders, Names, Pixels, Source
from weft.documents import read_json
from weft.errors import WeftError, did_you_mean
from weft.words import listed, many, some

TRAIN_TEST = {"train": {"train": True}, "test": {"train": False}}


def _splits(**names: str) -> dict[str, dict[str, Any]]:
    """Our split to torchvision's argument."""
    return {ours: {"split": theirs} for ours, theirs in names.items()}


@dataclass(frozen=True)
class TorchvisionSet:
    kind: str  # torchvision's class
    expects: str  # what must be under the root
    splits: dict[str, dict[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    classes: Sequence[str] = ()  # where torchvision does not know them


DIGITS = [str(i) for i in range(10)]
TORCHVISION = {
    "cifar10": TorchvisionSet("CIFAR10", "cifar-10-batches-py", TRAIN_TEST),
    "cifar100": TorchvisionSet("CIFAR100", "cifar-100-python", TRAIN_TEST),
    "country211": TorchvisionSet("Country211", "country211", _splits(train="train", val="valid", test="test")),
    "dtd": TorchvisionSet("DTD", "dtd/dtd/images", _splits(train="train", val="val", test="test")),
    "eurosat": TorchvisionSet("EuroSAT", "eurosat/2750", {"": {}}),
    "fashion-mnist": TorchvisionSet("FashionMNIST", "FashionMNIST/raw", TRAIN_TEST),
    "fgvc-aircraft": TorchvisionSet(
        "FGVCAircraft", "fgvc-aircraft-2013b", _splits(train="train", val="val", test="test")
    ),
    "flowers102": TorchvisionSet("Flowers102", "flowers-102/jpg", _splits(train="train", val="val", test="test")),
    "food101": TorchvisionSet("Food101", "food-101/images", _splits(train="train", test="test")),
    "gtsrb": TorchvisionSet(
        "GTSRB", "gtsrb/GTSRB", _splits(train="train", test="test"), {}, [str(i) for i in range(43)]
    ),
    "inaturalist-2021": TorchvisionSet(
        "INaturalist", "2021_train", {"train": {"version": "2021_train"}, "val": {"version": "2021_valid"}}
    ),
    "kmnist": TorchvisionSet("KMNIST", "KMNIST/raw", TRAIN_TEST),
    "mnist": TorchvisionSet("MNIST", "MNIST/raw", TRAIN_TEST),
    "oxford-iiit-pet": TorchvisionSet(
        "OxfordIIITPet", "oxford-iiit-pet/images", _splits(train="trainval", test="test")
    ),
    "rendered-sst2": TorchvisionSet("RenderedSST2", "rendered-sst2", _splits(train="train", val="val", test="test")),
    "stanford-cars": TorchvisionSet("StanfordCars", "stanford_cars/devkit", _splits(train="train", test="test")),
    "stl10": TorchvisionSet("STL10", "stl10_binary", _splits(train="train", test="test")),
    "sun397": TorchvisionSet("SUN397", "SUN397", {"": {}}),
    "svhn": TorchvisionSet("SVHN", "train_32x32.mat", _splits(train="train", test="test"), {}, DIGITS),
    **{
        f"emnist-{part}": TorchvisionSet("EMNIST", "EMNIST/raw", TRAIN_TEST, {"split": part})
        for part in ("balanced", "byclass", "bymerge", "letters", "digits", "mnist")
    },
}


def is_known(name: str) -> bool:
    return name in (*TORCHVISION, *OTHERS, "inaturalist")


def open_named(name: str, root: str) -> Source:
    """NAME:ROOT."""
    name = name.lower().replace("_", "-")
    given, path = f"{name}:{root}", Path(root).expanduser()
    if name != "demo" and not is_known(name):
        known = [*TORCHVISION, *OTHERS, "inaturalist", "demo"]
        raise WeftError(f"{given} is neither a file nor a set that Weft knows.{did_you_mean(name, known)}")
    if name == "demo":
        return open_demo(root)
    if not root or not path.is_dir():
        raise WeftError(f"{given}: after the colon comes the folder that holds the set; {root!r} is not a folder.")
    if name == "inaturalist":
        found = [year for year in (2021, 2019, 2018) if any(path.glob(f"*{year}*"))]
        name = f"inaturalist-{found[0] if found else 2021}"
    source = OTHERS[name](given, path) if name in OTHERS else _torchvision(given, path, TORCHVISION[name])
    source.published = name != "imagenet"  # reported on its validation part, whatever a test folder beside it holds
    return source


def _torchvision(given: str, root: Path, named: TorchvisionSet) -> Source:
    """The set as torchvision reads it, but pictures that are files stay files, to be decoded as all others are."""
    from torchvision import datasets

    expect(given, root, named.expects)
    kind = getattr(datasets, named.kind)
    options = {**named.options, "loader": _path} if "loader" in inspect.signature(kind).parameters else named.options
    parts, failures, classes = {}, [], [*named.classes]
    for split, arguments in named.splits.items():
        try:
            dataset = kind(root, **options, **arguments)
        except ImportError as error:
            raise WeftError(f"{given} needs another package: pip install {error.name}") from None
        except (RuntimeError, OSError, ValueError) as error:
            failures.append(f"{split or 'the set'} cannot be read: {str(error).split('You can use')[0].strip()}")
            continue
        parts[split] = _read(dataset)
        classes = classes or _classes(dataset)
    if not parts:
        raise WeftError(f"{given}: {failures[0]} Expected {named.expects} in {root}, unpacked and whole.")
    labels = np.concatenate([labels for _, labels in parts.values()]).astype(np.int64)
    splits = np.repeat(list(parts), [len(labels) for _, labels in parts.values()])
    if isinstance(next(iter(parts.values()))[0], np.ndarray):
        names = Names(f"{split}/{i}" for split, (_, labels) in parts.items() for i in range(len(labels)))
        reader: Any = JoinedReaders([(Pixels(pixels), np.arange(len(pixels))) for pixels, _ in parts.values()])
    else:
        names = Names(str(path).removeprefix(f"{root}/") for paths, _ in parts.values() for path in paths)
        reader = Files(root, names)
    layout = f"torchvision's {named.kind}" + (f", {listed([*parts])}" if "" not in parts else "")
    return Source(given, layout, classes, names, labels, reader, splits, notes=failures)


def _path(path: str | Path) -> str:
    """Stands in for torchvision's loader."""
    return str(path)


def _read(dataset: Any) -> tuple[np.ndarray | list[str], np.ndarray]:
    """Pixels (N, H, W) or (N, H, W, 3), or else paths; and labels."""
    if hasattr(dataset, "data"):
        pixels = np.asarray(dataset.data)
        if pixels.ndim == 4 and pixels.shape[-1] != 3:
            pixels = pixels.transpose(0, 2, 3, 1)
        return pixels, np.asarray(dataset.targets if hasattr(dataset, "targets") else dataset.labels)
    if hasattr(dataset, "_images"):  # Oxford-IIIT Pet, which takes no loader
        return dataset._images, np.asarray(dataset._labels)
    # GTSRB takes none either; the others give paths, because `_path` is their loader
    pairs = dataset._samples if type(dataset).__name__ == "GTSRB" else map(dataset.__getitem__, range(len(dataset)))
    paths, labels = zip(*pairs, strict=True)
    return list(paths), np.asarray(labels)


def _classes(dataset: Any) -> list[str]:
    return [str(name) for name in getattr(dataset, "classes", None) or dataset.all_categories]


def expect(given: str, root: Path, *places: str) -> Path:
    """The first of `places` that is there under `root`."""
    for place in places:
        if (root / place).exists():
            return root / place
    there = sorted(path.name for path in root.iterdir())
    raise WeftError(f"{given}: expected {listed(places)} in {root}, which holds {some(there) or 'nothing'}.")


def _folders(place: str = "", ignore: Sequence[str] = ()) -> Callable[[str, Path], Source]:
    """A set that is class folders under `place`."""

    def read(given: str, root: Path) -> Source:
        source = open_folders(str(expect(given, root, place)), ignore=ignore)
        source.root = given
        return source

    return read


def _inaturalist(year: int) -> Callable[[str, Path], Source]:
    """2018 and 2019 as published: pictures in one folder, train and val as JSON files."""

    def read(given: str, root: Path) -> Source:
        paths, labels, splits, categories = [], [], [], {}
        for split in ("train", "val"):
            content = _json(given, expect(given, root, f"{split}{year}.json"))
            number = {picture["image_id"]: picture["category_id"] for picture in content["annotations"]}
            categories |= {category["id"]: str(category["name"]) for category in content["categories"]}
            paths += (picture["file_name"] for picture in content["images"])
            labels += (number[picture["id"]] for picture in content["images"])
            splits += [split] * len(content["images"])
        position = {identity: i for i, identity in enumerate(sorted(categories))}
        names = Names(paths)
        return Source(
            root=given,
            layout=f"iNaturalist {year}, train and val",
            classes=[categories[identity] for identity in sorted(categories)],
            names=names,
            labels=np.array([position[label] for label in labels], np.int64),
            reader=Files(root, names),
            splits=np.array(splits),
        )

    return read


def _imagenet_classes() -> list[str]:
    """The 1000 WordNet identities in ImageNet's order, which are the folders of `imagenet:ROOT`."""
    from timm.data import ImageNetInfo

    return ImageNetInfo("imagenet-1k").label_names()


def _imagenet_v2(given: str, root: Path) -> Source:
    """Folders 0 to 999, which are ImageNet's class numbers."""
    source, classes = _folders()(given, root), _imagenet_classes()
    numbers = np.array([int(name) if name.isdecimal() else -1 for name in source.classes])
    if not ((numbers >= 0) & (numbers < len(classes))).all():
        raise WeftError(f"{given}: expected folders called 0 to 999, found {some(source.classes)}.")
    source.labels, source.classes = numbers[source.labels], classes
    source.splits, source.layout = np.full(len(source), "val"), "ImageNet-V2"
    return source


def _imagenet_real(given: str, root: Path) -> Source:
    """ImageNet's validation pictures with the labels of real.json, any of which is right; others are left out."""
    answers = _json(given, expect(given, root, "real.json"))
    folder, classes = expect(given, root, "val"), _imagenet_classes()
    found = {}
    for path in folder.rglob("ILSVRC2012_val_*.JPEG"):
        found[int(path.stem.rpartition("_")[2]) - 1] = path.relative_to(root).as_posix()
    if not found or max(found) >= len(answers):
        raise WeftError(f"{given}: expected pictures such as ILSVRC2012_val_00000001.JPEG in {folder}.")
    kept = [i for i in sorted(found) if answers[i]]
    names = Names(found[i] for i in kept)
    valid = np.zeros((len(kept), len(classes)), bool)
    for row, i in zip(valid, kept, strict=True):
        row[answers[i]] = True
    return Source(
        root=given,
        layout="ImageNet's validation pictures with the labels of ImageNet-ReaL",
        classes=classes,
        names=names,
        labels=np.array([answers[i][0] for i in kept], np.int64),
        reader=Files(root, names),
        splits=np.full(len(kept), "val"),
        notes=[f"Left out {many(len(found) - len(kept), 'picture')} without a label in real.json."],
        valid=valid,
    )


class Hdf5:
    """Reads pictures from an HDF5 file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, index: int) -> np.ndarray:
        import h5py  # pyright: ignore[reportMissingImports]  only this set needs it

        with h5py.File(self.path) as file:
            return file["x"][index]

    def sizes(self, positions: range) -> bytes:
        return str(self.path.stat().st_size).encode()


def _pcam(given: str, root: Path) -> Source:
    try:
        import h5py  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise WeftError(f"{given} needs another package: pip install h5py") from None
    parts, labels = {}, []
    for split, theirs in (("train", "train"), ("val", "valid"), ("test", "test")):
        place = f"pcam/camelyonpatch_level_2_split_{theirs}_{{}}.h5"
        with h5py.File(expect(given, root, place.format("y"))) as file:
            labels.append(np.asarray(file["y"]).reshape(-1).astype(np.int64))
        parts[split] = Hdf5(expect(given, root, place.format("x")))
    counts = [len(part) for part in labels]
    return Source(
        root=given,
        layout="PatchCamelyon, train, val and test",
        classes=["normal", "tumour"],
        names=Names(f"{split}/{i}" for split, n in zip(parts, counts, strict=True) for i in range(n)),
        labels=np.concatenate(labels),
        reader=JoinedReaders([(reader, np.arange(n)) for reader, n in zip(parts.values(), counts, strict=True)]),
        splits=np.repeat([*parts], counts),
    )


def _json(given: str, path: Path) -> Any:
    try:
        return read_json(path)
    except WeftError as error:
        raise WeftError(f"{given}: {error}") from None


OTHERS: dict[str, Callable[[str, Path], Source]] = {
    "caltech101": _folders("caltech101/101_ObjectCategories", ["BACKGROUND_Google"]),
    "caltech256": _folders("caltech256/256_ObjectCategories"),
    "imagenet": _folders(),
    "imagenet-v2": _imagenet_v2,
    "imagenet-real": _imagenet_real,
    "inaturalist-2018": _inaturalist(2018),
    "inaturalist-2019": _inaturalist(2019),
    "pcam": _pcam,
}
