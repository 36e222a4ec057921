"""Pictures with masks beside them, in any usual layout: `images/` and `masks/`, splits inside or outside, VOC's lists.

| layout | |
|---|---|
| `images/a.jpg masks/a.png` | and other usual names of the two folders |
| `images/train/a.jpg masks/train/a.png` | splits inside; deeper folders as well |
| `train/images/a.jpg train/masks/a.png` | splits outside |
| `train/a.jpg trainannot/a.png`, `train_images/ train_masks/` | splits in the names |
| `JPEGImages/ SegmentationClass/ ImageSets/Segmentation/train.txt` | splits as lists |
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from weft.data.boxes.shapes import draw
from weft.data.masks.classes import choose_classes, find_classes
from weft.data.masks.values import IGNORE, Coding, MaskFiles, upright
from weft.data.read import header
from weft.data.sources.folders import LeftOut, Listing, descend, list_folder, walk
from weft.data.sources.source import PICTURE_ENDINGS, SPLIT_NAMES, Files, Names, Source, ending, natural, split_of
from weft.errors import WeftError
from weft.words import listed, many, some

# the usual names without case, blanks and underscores; of several the first that is there and holds pictures
PICTURES = ("images", "image", "imgs", "img", "jpegimages", "leftimg8bit", "pictures", "photos", "rgb", "inputs")
MASKS = (
    *("masks", "mask", "segmentationclassaug", "segmentationclass", "gtfine", "labels", "label", "annotations"),
    *("annotation", "annots", "annot", "groundtruth", "gt", "segmentation", "segmentations", "segmentationmasks"),
    *("semantic", "semanticlabels", "targets", "target"),
)
SPLITS = ("train", "val", "test", "")
LISTS = ("ImageSets/Segmentation", "ImageSets", "splits", "")  # where lists of names may lie
# what names may have beside the part that picture and mask share; earlier ones win
PICTURE_PATTERNS = ("*", "*_leftImg8bit", "*_image", "*_img", "*_sat", "*_rgb", "image_*", "img_*")
MASK_PATTERNS = (
    *("*", "*_gtFine_labelTrainIds", "*_gtFine_labelIds", "*_labelTrainIds", "*_labelIds", "*_mask", "*-mask"),
    *("*_masks", "*_label", "*_labels", "*_L", "*_seg", "*_segmentation", "*_gt", "*_GT", "*_annotation"),
    *("mask_*", "label_*", "gt_*", "*.jpg", "*.jpeg", "*.png"),
)


class PictureAndMask(NamedTuple):
    picture: str  # path relative to the root
    mask: str
    split: str


class MaskFolders(NamedTuple):
    """A folder of pictures and the folder of their masks, relative to the root."""

    pictures: str
    masks: str
    split: str = ""  # "": the folders inside say it, or nothing does


def recognise(path: Path) -> bool:
    """Whether a folder holds pictures and masks side by side. Lists a few folders, opens nothing."""
    try:
        root, top, _ = descend(path)
        return bool(places_in(root, top))
    except (OSError, WeftError):
        return False


def open_masks(source: str, *, masks: str = "", classes: str = "", ignore: Sequence[int] = ()) -> Source:
    """Pictures and masks under `source`; `masks` names the folder of masks where it does not lie beside the pictures.

    `classes` is a file with names, values or colours (docs/data.md), `ignore` are values that do not count.
    """
    path = Path(source).expanduser()
    if masks:
        root, notes, places = path, [], [MaskFolders("", _mask_folder(path, masks))]
    else:
        root, top, notes = descend(path)
        places = places_in(root, top)
    if not places:
        raise WeftError(
            f"{source} has no folder of pictures beside a folder of masks; expected images/ and masks/, the same under "
            "train/ and val/, or --data.masks FOLDER"
        )
    pairs, words = find_pairs(source, root, places, notes)
    pairs = _by_lists(root, pairs, notes)
    named, from_file = find_classes(root, classes)
    files = [Path(root, pair.mask) for pair in pairs]
    chosen = choose_classes(files, named, ignore)
    layout = f"{words}; {chosen.words}, {many(len(chosen.classes), 'class')}"
    return make_source(source, root, pairs, chosen.coding, chosen.classes, layout, [*notes, *from_file, *chosen.notes])


def make_source(
    given: str,
    root: Path,
    pairs: Sequence[PictureAndMask],
    coding: Coding,
    classes: list[str],
    layout: str,
    notes: list[str],
) -> Source:
    pairs = sorted(pairs, key=lambda pair: (SPLITS.index(pair.split), natural(pair.picture)))
    names = Names(pair.picture for pair in pairs)
    reader = Files(root, names)
    return Source(
        root=given,
        layout=layout,
        classes=classes,
        names=names,
        labels=np.zeros(len(names), np.int64),
        reader=reader,
        splits=np.array([pair.split for pair in pairs]),
        notes=notes,
        task="segment",
        targets=MaskFiles(root, Names(pair.mask for pair in pairs), coding, reader),
    )


def places_in(root: Path, top: Listing) -> list[MaskFolders]:
    """Folders of pictures with their masks: under `root` itself, or in each of its split folders."""
    if found := _beside(root, "", top):
        return found
    places = []
    for name in top.folders:
        if split := split_of(name):
            inner = _beside(root, f"{name}/", list_folder(root / name))
            places += [place._replace(split=split) for place in inner if not place.split]
    return sorted(places, key=lambda place: SPLITS.index(place.split))


def _beside(root: Path, prefix: str, listing: Listing) -> list[MaskFolders]:
    """Pairs of folders in one folder: images/ masks/, or train/ trainannot/ for each split."""
    pictures: dict[str, str] = {}
    masks: dict[str, list[str]] = {}
    for name in sorted(listing.folders, key=lambda name: _rank(name)):
        kind, split = _role(name)
        if kind == "masks":
            masks.setdefault(split, []).append(name)
        elif kind:
            pictures.setdefault(split, name)
    places = []
    for split, name in pictures.items():
        holding = (folder for folder in masks.get(split, []) if _holds_pictures(root / prefix / folder))
        if (folder := next(holding, None)) and _holds_pictures(root / prefix / name):
            places.append(MaskFolders(prefix + name, prefix + folder, split))
    return sorted(places, key=lambda place: SPLITS.index(place.split))


def _role(name: str) -> tuple[str, str]:
    """("pictures" or "masks" or "", split): of "trainannot" ("masks", "train"), of "val" ("pictures", "val")."""
    word = re.sub(r"[-_ ]", "", name.casefold())
    if split := split_of(name):
        return "pictures", split
    for split_word in ("", *sorted(SPLIT_NAMES, key=len, reverse=True)):
        for rest in {word.removeprefix(split_word), word.removesuffix(split_word)}:
            if split_word and rest == word:
                continue
            kind = "pictures" if rest in PICTURES else "masks" if rest in MASKS else ""
            if kind:
                return kind, SPLIT_NAMES.get(split_word, "")
    return "", ""


def _rank(name: str) -> tuple[int, str]:
    """Folders in the order in which they are preferred, `train_images` before `train`."""
    word = re.sub(r"[-_ ]", "", name.casefold())
    order = [i for i, usual in enumerate((*PICTURES, *MASKS)) if usual in word]
    return (min(order, default=99) if word not in MASKS else len(PICTURES) + MASKS.index(word), name)


def _holds_pictures(folder: Path, depth: int = 3) -> bool:
    """Whether the first files found are pictures: YOLO's labels/ and COCO's annotations/ hold text."""
    listing = list_folder(folder)
    if listing.files:
        return any(ending(name) in PICTURE_ENDINGS for name in listing.files)
    return depth > 0 and any(_holds_pictures(folder / name, depth - 1) for name in sorted(listing.folders)[:3])


def _mask_folder(root: Path, masks: str) -> str:
    """The folder of masks relative to `root`, or absolute where it lies elsewhere."""
    for folder in (root / masks, Path(masks).expanduser()):
        if folder.is_dir():
            return os.path.relpath(folder, root) if folder.is_relative_to(root) else str(folder.resolve())
    raise WeftError(f"data.masks={masks!r} is not a folder, neither here nor in {root}.")


def find_pairs(
    given: str, root: Path, places: Sequence[MaskFolders], notes: list[str]
) -> tuple[list[PictureAndMask], str]:
    """Each picture with its mask, and a few words on the layout; what has no partner is noted."""
    passed, pairs, rules = LeftOut(), [], []
    lonely: dict[str, list[str]] = {"picture": [], "mask": []}
    for place in places:
        found = {}
        for kind in ("pictures", "masks"):
            folder = getattr(place, kind)
            paths = walk(root, folder or ".", passed)
            found[kind] = [path.removeprefix("./") for path in paths]
        if Path(root, place.masks).is_relative_to(Path(root, place.pictures)) and place.masks != place.pictures:
            within = set(found["masks"])
            found["pictures"] = [path for path in found["pictures"] if path not in within]
        matched, rule = match(found["pictures"], found["masks"], place)
        rules += [rule] if rule not in rules else []
        pairs += [PictureAndMask(*pair, place.split or _inner_split(pair[0], place.pictures)) for pair in matched]
        for number, kind in enumerate(lonely):
            used = {pair[number] for pair in matched}
            lonely[kind] += [path for path in found[f"{kind}s"] if path not in used]
    if not pairs:
        examples = [f"{kind}s such as {some(paths, 2) or 'none'}" for kind, paths in lonely.items()]
        raise WeftError(f"{given}: no picture has a mask of the same name: {' and '.join(examples)}.")
    for (kind, paths), other in zip(lonely.items(), ("mask", "picture"), strict=True):
        if paths:
            notes.append(f"Left out {many(len(paths), kind)} without a {other}: {some(paths, 3)}.")
    notes += passed.notes()
    folders = [f"{place.pictures or '.'}/ with {place.masks}/" for place in places]
    return pairs, f"masks: {listed(folders)}" + "".join(f", {rule}" for rule in rules if rule)


def match(pictures: Sequence[str], masks: Sequence[str], place: MaskFolders) -> tuple[list[tuple[str, str]], str]:
    """(picture, mask) by the rule on names that finds the most, and that rule in words, "" where names are the same."""
    for in_folders in (True, False):  # first with the folders they lie in, then by name alone
        known = {
            pattern: {_key(p, place.pictures, in_folders, pattern) for p in pictures} for pattern in PICTURE_PATTERNS
        }
        sample = masks[:: len(masks) // 500 + 1]
        best, most = ("*", "*"), 0
        for of_picture, of_mask in product(PICTURE_PATTERNS, MASK_PATTERNS):
            keys = (_key(path, place.masks, in_folders, of_mask) for path in sample)
            hits = sum(key is not None and key in known[of_picture] for key in keys)
            if hits > most:
                best, most = (of_picture, of_mask), hits
        if found := _match(pictures, masks, place, in_folders, *best):
            return found, _rule(in_folders, *best)
    return [], ""


def _match(
    pictures: Sequence[str], masks: Sequence[str], place: MaskFolders, in_folders: bool, of_picture: str, of_mask: str
) -> list[tuple[str, str]]:
    by_key: dict[tuple[str, ...], str] = {}
    for path in masks:
        if key := _key(path, place.masks, in_folders, of_mask):
            if not in_folders and key in by_key:
                return []  # names alone are ambiguous
            by_key.setdefault(key, path)
    keys = ((path, _key(path, place.pictures, in_folders, of_picture)) for path in pictures)
    return [(path, by_key[key]) for path, key in keys if key in by_key and by_key[key] != path]


def _key(path: str, folder: str, in_folders: bool, pattern: str) -> tuple[str, ...] | None:
    """The folders inside `folder` and the name without what `pattern` says; None where the name has not got that."""
    inner, _, name = path.removeprefix(folder).rpartition("/")
    stem = name.rpartition(".")[0]
    before, _, after = pattern.partition("*")
    if not (stem.startswith(before) and stem.endswith(after)) or len(stem) <= len(before) + len(after):
        return None
    core = stem[len(before) : len(stem) - len(after)]
    return (*(split_of(part) or part for part in inner.strip("/").split("/")), core) if in_folders else (core,)


def _rule(in_folders: bool, of_picture: str, of_mask: str) -> str:
    words = [] if (of_picture, of_mask) == ("*", "*") else [f"{of_picture} has the mask {of_mask}"]
    return ", ".join([*words, *([] if in_folders else ["matched by name in whatever folder"])])


def _inner_split(path: str, folder: str) -> str:
    """The split that a folder inside the folder of pictures says."""
    inner = path.removeprefix(folder).strip("/").split("/")[:-1]
    return next((split for part in inner if (split := split_of(part))), "")


def _by_lists(root: Path, pairs: list[PictureAndMask], notes: list[str]) -> list[PictureAndMask]:
    """Splits from lists of names (train.txt, val.txt), where folders do not say them."""
    if any(pair.split for pair in pairs):
        return pairs
    for place in LISTS:
        lists = read_lists(root / place)
        if not lists:
            continue
        stems = {name: split for split, names in lists.items() for name in names}
        placed = [pair._replace(split=stems.get(PurePosixPath(pair.picture).stem, "")) for pair in pairs]
        rest = sum(not pair.split for pair in placed)
        if rest == len(placed):
            continue
        where = f"{place}/" if place else ""
        notes.append(f"Splits from the lists {listed([f'{where}{split}' for split in lists])}.")
        if "train" not in lists:
            return [pair._replace(split=pair.split or "train") for pair in placed]
        if rest:
            notes.append(f"Left out {many(rest, 'picture')} that these lists do not name.")
        return [pair for pair in placed if pair.split]
    return pairs


def read_lists(folder: Path) -> dict[str, list[str]]:
    """Split to names: the files train.txt, val.txt and test.txt, by any of their usual names."""
    files = sorted(filter(Path.is_file, folder.glob("*.txt"))) if folder.is_dir() else []
    lists = {split: read_list(file) for file in files if (split := split_of(file.stem))}
    return {split: lists[split] for split in SPLITS if split in lists}


def read_list(file: Path) -> list[str]:
    """Names without folders and endings, from a file that has a name or a path at the beginning of each line."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    paths = [PurePosixPath(line.split()[0].replace("\\", "/")) for line in lines if line.strip()]
    return [path.stem if path.suffix.lower() in PICTURE_ENDINGS else path.name for path in paths]


class DrawnMasks:
    """Masks drawn from the shapes of objects, small ones over large ones; crowds are ignored."""

    def __init__(self, objects: Any, pictures: Callable[[int], Any]) -> None:
        self.objects, self.pictures = objects, pictures

    def __call__(self, index: int) -> np.ndarray:
        objects, picture = self.objects(index), header(self.pictures(index))
        height, width = objects.size or (picture.height, picture.width)
        mask = np.zeros((height, width), np.uint8)
        for i in np.lexsort((-objects.area, ~objects.crowd)):  # crowds first, then from large to small
            mask[draw(objects.shapes[i], height, width)] = IGNORE if objects.crowd[i] else objects.labels[i] + 1
        return upright(mask, picture)

    def sizes(self, positions: range) -> bytes:
        return b"drawn" + self.objects.sizes(positions)


def semantic_from_objects(source: Source) -> Source:
    """A set of objects with shapes as a set of masks: the background and a class for each kind of object."""
    if not source.has_shapes:
        raise WeftError(f"The objects of {source.root} have no shapes from which masks could be drawn.")
    return replace(
        source,
        layout=f"{source.layout}; masks drawn from shapes",
        classes=["background", *source.classes],
        labels=np.zeros(len(source), np.int64),
        multilabel=False,
        task="segment",
        targets=DrawnMasks(source.targets, source.reader),
    )
