"""Sets of pictures and masks by name from a local folder, NAME:ROOT, laid out as they were published."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from weft.data.masks.classes import read_sample
from weft.data.masks.folders import MaskFolders, find_pairs, make_source, places_in, read_list, read_lists
from weft.data.masks.values import IGNORE, Coding
from weft.data.sources.folders import list_folder
from weft.data.sources.named import expect
from weft.data.sources.source import Source
from weft.errors import WeftError
from weft.words import some


def _words(text: str) -> list[str]:
    """Names between commas."""
    return [" ".join(name.split()) for name in text.split(",")]


ADE20K = _words("""
    wall, building, sky, floor, tree, ceiling, road, bed, windowpane, grass, cabinet, sidewalk, person, earth, door,
    table, mountain, plant, curtain, chair, car, water, painting, sofa, shelf, house, sea, mirror, rug, field,
    armchair, seat, fence, desk, rock, wardrobe, lamp, bathtub, railing, cushion, base, box, column, signboard,
    chest of drawers, counter, sand, sink, skyscraper, fireplace, refrigerator, grandstand, path, stairs, runway,
    case, pool table, pillow, screen door, stairway, river, bridge, bookcase, blind, coffee table, toilet, flower,
    book, hill, bench, countertop, stove, palm, kitchen island, computer, swivel chair, boat, bar, arcade machine,
    hovel, bus, towel, light, truck, tower, chandelier, awning, streetlight, booth, television receiver, airplane,
    dirt track, apparel, pole, land, bannister, escalator, ottoman, bottle, buffet, poster, stage, van, ship,
    fountain, conveyer belt, canopy, washer, plaything, swimming pool, stool, barrel, basket, waterfall, tent, bag,
    minibike, cradle, oven, ball, food, step, tank, trade name, microwave, pot, animal, bicycle, lake, dishwasher,
    screen, blanket, sculpture, hood, sconce, vase, traffic light, tray, ashcan, fan, pier, crt screen, plate,
    monitor, bulletin board, shower, radiator, glass, clock, flag""")

# in the order of their numbers, 1 to 182; those that were never annotated are empty
COCO_STUFF = _words("""
    person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, , stop sign,
    parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, , backpack, umbrella, ,
    , handbag, tie, suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard,
    surfboard, tennis racket, bottle, , wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange,
    broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted plant, bed, , dining table, , , toilet, ,
    tv, laptop, mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, , book, clock,
    vase, scissors, teddy bear, hair drier, toothbrush, , banner, blanket, branch, bridge, building-other, bush,
    cabinet, cage, cardboard, carpet, ceiling-other, ceiling-tile, cloth, clothes, clouds, counter, cupboard,
    curtain, desk-stuff, dirt, door-stuff, fence, floor-marble, floor-other, floor-stone, floor-tile, floor-wood,
    flower, fog, food-other, fruit, furniture-other, grass, gravel, ground-other, hill, house, leaves, light, mat,
    metal, mirror-stuff, moss, mountain, mud, napkin, net, paper, pavement, pillow, plant-other, plastic, platform,
    playingfield, railing, railroad, river, road, rock, roof, rug, salad, sand, sea, shelf, sky-other, skyscraper,
    snow, solid-other, stairs, stone, straw, structural-other, table, tent, textile-other, towel, tree, vegetable,
    wall-brick, wall-concrete, wall-other, wall-panel, wall-stone, wall-tile, wall-wood, water-other, waterdrops,
    window-blind, window-other, wood""")

# of COCO's panoptic classes, those that put several kinds of stuff together; and the kinds that were given up
COCO_MERGED = {
    "tree-merged": "branch, tree, bush, leaves",
    "fence-merged": "cage, fence, railing",
    "ceiling-merged": "ceiling-tile, ceiling-other",
    "sky-other-merged": "clouds, sky-other, fog",
    "cabinet-merged": "cupboard, cabinet",
    "table-merged": "desk-stuff, table",
    "floor-other-merged": "floor-marble, floor-other, floor-tile",
    "pavement-merged": "floor-stone, pavement",
    "mountain-merged": "hill, mountain",
    "grass-merged": "moss, grass, straw",
    "dirt-merged": "mud, dirt",
    "paper-merged": "napkin, paper",
    "food-other-merged": "salad, vegetable, food-other",
    "building-other-merged": "skyscraper, building-other",
    "rock-merged": "stone, rock",
    "wall-other-merged": "wall-other, wall-concrete, wall-panel",
    "rug-merged": "mat, rug, carpet",
}
COCO_DROPPED = _words("""
    furniture-other, metal, plastic, solid-other, structural-other, waterdrops, textile-other, cloth, clothes,
    plant-other, wood, ground-other""")
COCO_THINGS = 91  # numbers up to here are things, those after it stuff

CITYSCAPES = {  # to the number in the files *_labelIds.png; numbers without a class do not count
    **{"road": 7, "sidewalk": 8, "building": 11, "wall": 12, "fence": 13, "pole": 17, "traffic light": 19},
    **{"traffic sign": 20, "vegetation": 21, "terrain": 22, "sky": 23, "person": 24, "rider": 25, "car": 26},
    **{"truck": 27, "bus": 28, "train": 31, "motorcycle": 32, "bicycle": 33},
}

LIP = _words("""
    background, hat, hair, glove, sunglasses, upper clothes, dress, coat, socks, pants, jumpsuits, scarf, skirt,
    face, left arm, right arm, left leg, right leg, left shoe, right shoe""")

VOC = _words("""
    background, aeroplane, bicycle, bird, boat, bottle, bus, car, cat, chair, cow, diningtable, dog, horse,
    motorbike, person, pottedplant, sheep, sofa, train, tvmonitor""")

CAMVID = _words("sky, building, pole, road, pavement, tree, sign, fence, car, pedestrian, bicyclist")
# CamVid's own classes: colour, and the one of the 11 that SegNet puts it into
CAMVID_32 = {
    "Animal": (0x408040, "pedestrian"),
    "Archway": (0xC00080, "building"),
    "Bicyclist": (0x0080C0, "bicyclist"),
    "Bridge": (0x008040, "building"),
    "Building": (0x800000, "building"),
    "Car": (0x400080, "car"),
    "CartLuggagePram": (0x4000C0, "pedestrian"),
    "Child": (0xC08040, "pedestrian"),
    "Column_Pole": (0xC0C080, "pole"),
    "Fence": (0x404080, "fence"),
    "LaneMkgsDriv": (0x8000C0, "road"),
    "LaneMkgsNonDriv": (0xC00040, "road"),
    "Misc_Text": (0x808040, "sign"),
    "MotorcycleScooter": (0xC000C0, "bicyclist"),
    "OtherMoving": (0x804040, "car"),
    "ParkingBlock": (0x40C080, "pavement"),
    "Pedestrian": (0x404000, "pedestrian"),
    "Road": (0x804080, "road"),
    "RoadShoulder": (0x8080C0, "pavement"),
    "Sidewalk": (0x0000C0, "pavement"),
    "SignSymbol": (0xC08080, "sign"),
    "Sky": (0x808080, "sky"),
    "SUVPickupTruck": (0x4080C0, "car"),
    "TrafficCone": (0x000040, "pole"),
    "TrafficLight": (0x004040, "sign"),
    "Train": (0xC04080, "car"),
    "Tree": (0x808000, "tree"),
    "Truck_Bus": (0xC080C0, "car"),
    "Tunnel": (0x400040, "building"),
    "VegetationMisc": (0xC0C000, "tree"),
    "Wall": (0x40C000, "building"),
}


def _counted(classes: Sequence[str], first: int = 0, ignored: Sequence[int] = ()) -> Coding:
    """Values that count on from `first`; empty names are gaps."""
    values = [first + i for i, name in enumerate(classes) if name]
    return Coding.of(dict.fromkeys([*ignored, IGNORE], IGNORE) | {value: i for i, value in enumerate(values)})


def _inner(root: Path, *folders: str) -> Path:
    """The folder that an archive unpacks into, where `root` is the one above it."""
    return next((root / folder for folder in folders if (root / folder).is_dir()), root)


def _places(given: str, root: Path, wanted: Mapping[str, tuple[list[str], list[str]]]) -> list[MaskFolders]:
    """Folders of pictures and masks, each by the first of its names that is there; one split is enough."""

    def here(folders: list[str]) -> str | None:
        return next((folder for folder in folders if (root / folder).is_dir()), None)

    found = {split: (here(pictures), here(masks)) for split, (pictures, masks) in wanted.items()}
    whole = [MaskFolders(a, b, split) for split, (a, b) in found.items() if a is not None and b is not None]
    if not whole:
        for kind in next(iter(wanted.values())):
            expect(given, root, *kind)
    return whole


def _open(given: str, root: Path, places: list[MaskFolders], name: str, classes: list[str], coding: Coding) -> Source:
    notes: list[str] = []
    pairs, _ = find_pairs(given, root, places, notes)
    return make_source(given, root, pairs, coding, classes, name, notes)


def _ade20k(given: str, root: Path) -> Source:
    root = _inner(root, "ADEChallengeData2016")
    folders = {"train": "training", "val": "validation"}
    wanted = {split: ([f"images/{name}"], [f"annotations/{name}"]) for split, name in folders.items()}
    places = _places(given, root, wanted)
    return _open(given, root, places, "ADE20K, 150 classes; 0 (other) is ignored", ADE20K, _counted(ADE20K, 1, [0]))


def _coco_maps(given: str, root: Path) -> list[MaskFolders]:
    """COCO-Stuff as published: maps that hold the numbers of the classes less 1."""
    wanted = {}
    for split in ("train", "val"):
        year = f"{split}2017"
        masks = [f"stuffthingmaps/{year}", f"stuffthingmaps_trainval2017/{year}", f"annotations/{year}"]
        wanted[split] = ([year, f"images/{year}"], masks)
    return _places(given, root, wanted)


def _coco_stuff(given: str, root: Path) -> Source:
    classes = [name for name in COCO_STUFF if name]
    return _open(given, root, _coco_maps(given, root), "COCO-Stuff, 171 classes", classes, _counted(COCO_STUFF))


def _coco_stuff_91(given: str, root: Path) -> Source:
    """Stuff alone."""
    stuff, things = COCO_STUFF[COCO_THINGS:], range(COCO_THINGS)
    layout = "COCO-Stuff, 91 classes of stuff; things are ignored"
    return _open(given, root, _coco_maps(given, root), layout, stuff, _counted(stuff, COCO_THINGS, things))


def _coco_stuff_54(given: str, root: Path) -> Source:
    """Detectron2's masks for semantic FPN, where it has made them; else its classes from the maps of COCO-Stuff.

    Detectron2 makes them from COCO's panoptic annotations, whose borders are not everywhere those of the maps.
    """
    merged = {kind: name for name, kinds in COCO_MERGED.items() for kind in _words(kinds)}
    alone = [kind for kind in COCO_STUFF[COCO_THINGS:] if kind not in merged and kind not in COCO_DROPPED]
    classes = ["things", *alone, *COCO_MERGED]
    prepared = {s: ([f"{s}2017", f"images/{s}2017"], [f"panoptic_stuff_{s}2017"]) for s in ("train", "val")}
    if any((root / folder).is_dir() for _, folders in prepared.values() for folder in folders):
        layout = "COCO, Detectron2's 53 classes of stuff and one of things, from panoptic_stuff_*"
        return _open(given, root, _places(given, root, prepared), layout, classes, _counted(classes))
    numbers = dict.fromkeys(range(COCO_THINGS), 0) | {IGNORE: IGNORE}
    for value, kind in enumerate(COCO_STUFF[COCO_THINGS:], COCO_THINGS):
        numbers[value] = IGNORE if kind in COCO_DROPPED else classes.index(merged.get(kind, kind))
    layout = "COCO-Stuff, merged into Detectron2's 53 classes of stuff and one of things"
    return _open(given, root, _coco_maps(given, root), layout, classes, Coding.of(numbers))


def _cityscapes(given: str, root: Path) -> Source:
    """Train and val: the labels of test were never published. The 19 classes that count, from either kind of file."""
    wanted = {split: ([f"leftImg8bit/{split}"], [f"gtFine/{split}"]) for split in ("train", "val")}
    notes: list[str] = []
    pairs, _ = find_pairs(given, root, _places(given, root, wanted), notes)
    endings = {pair.mask.rpartition("_")[2].partition(".")[0] for pair in pairs}
    if not endings <= {"labelTrainIds", "labelIds"} or len(endings) > 1:
        raise WeftError(f"{given}: expected masks *_labelTrainIds.png or *_labelIds.png in gtFine/, all of one kind.")
    coding = _counted(list(CITYSCAPES))
    if endings == {"labelIds"}:
        numbers = {value: i for i, value in enumerate(CITYSCAPES.values())}
        coding = Coding.of(dict.fromkeys([*range(34), IGNORE], IGNORE) | numbers)
    layout = f"Cityscapes, 19 classes, from *_{endings.pop()}.png"
    # instance maps, colours and polygons lie beside the masks and need no note
    notes = [note for note in notes if "without a picture" not in note and "do not end as pictures" not in note]
    return make_source(given, root, pairs, coding, list(CITYSCAPES), layout, notes)


def _lip(given: str, root: Path) -> Source:
    wanted = {}
    for split in ("train", "val"):
        pictures, masks = f"{split}_images", f"{split}_segmentations"
        above, beside = "TrainVal_images/", "TrainVal_parsing_annotations/"  # archives unpack into these, once or twice
        wanted[split] = (
            [pictures, above + pictures, above * 2 + pictures],
            [beside + masks, beside * 2 + masks, masks],
        )
    return _open(given, root, _places(given, root, wanted), "LIP, 20 classes", LIP, _counted(LIP))


def _voc(augmented: bool) -> Callable[[str, Path], Source]:
    """`augmented`: the masks and the longer training list of SBD, which others made for VOC 2012."""

    def read(given: str, root: Path) -> Source:
        root = _inner(root, "VOCdevkit/VOC2012", "VOC2012")
        masks = "SegmentationClassAug" if augmented else "SegmentationClass"
        place = _places(given, root, {"": (["JPEGImages"], [masks])})[0]
        folder = expect(given, root, *["ImageSets/SegmentationAug"] * augmented, "ImageSets/Segmentation")
        lists = read_lists(folder)
        if augmented:
            lists["train"] = read_list(expect(given, folder, "train_aug.txt", "trainaug.txt"))
        if "train" not in lists:
            expect(given, folder, "train.txt")
        pairs, _ = find_pairs(given, root, [place], [])
        named = {PurePosixPath(pair.picture).stem: pair for pair in pairs}
        # val last: the longer training list has pictures of val in some copies of it
        wanted = {name: split for split in ("train", "val") for name in lists.get(split, ())}
        chosen = {name: named[name]._replace(split=split) for name, split in wanted.items() if name in named}
        missing = sorted(wanted.keys() - chosen.keys())
        notes = [f"No picture or mask for {len(missing)} names in the lists: {some(missing)}."] if missing else []
        if not chosen:
            raise WeftError(f"{given}: no name in the lists of {folder} has a picture and a mask in {masks}/.")
        layout = f"VOC 2012, {masks}, 21 classes; 255 (borders) is ignored"
        return make_source(given, root, list(chosen.values()), _counted(VOC), list(VOC), layout, notes)

    return read


def _camvid(all_classes: bool) -> Callable[[str, Path], Source]:
    """SegNet's form with values from 0 to 11, or the original with colours, as 11 classes or as its own."""

    def read(given: str, root: Path) -> Source:
        root = _inner(root, "CamVid", "camvid")
        original = MaskFolders("701_StillsRaw_full", "LabeledApproved_full")
        places = [original] if (root / original.masks).is_dir() else places_in(root, list_folder(root))
        if not places:
            raise WeftError(
                f"{given}: expected train/ and trainannot/, train/images/ and train/masks/, or 701_StillsRaw_full/ and "
                f"LabeledApproved_full/ in {root}."
            )
        notes: list[str] = []
        pairs, _ = find_pairs(given, root, places, notes)
        by_colour = read_sample([Path(root, pair.mask) for pair in pairs], 1)[0].indices is None
        if all_classes and not by_colour:
            raise WeftError(f"{given}: these masks have only 11 classes; open them as camvid:{root}")
        classes = list(CAMVID_32) if all_classes else CAMVID
        coding = _counted(CAMVID, ignored=[11])
        if by_colour:
            own = enumerate(CAMVID_32.values())
            numbers = {colour: i if all_classes else CAMVID.index(merged) for i, (colour, merged) in own}
            coding = Coding.of({0: IGNORE, **numbers}, colours=True)
        layout = f"CamVid, {len(classes)} classes; void is ignored"
        return make_source(given, root, pairs, coding, classes, layout, notes)

    return read


MASK_SETS: dict[str, Callable[[str, Path], Source]] = {
    "ade20k": _ade20k,
    "camvid": _camvid(all_classes=False),
    "camvid-32": _camvid(all_classes=True),
    "cityscapes": _cityscapes,
    "coco-stuff": _coco_stuff,
    "coco-stuff-54": _coco_stuff_54,
    "coco-stuff-91": _coco_stuff_91,
    "lip": _lip,
    "voc": _voc(augmented=False),
    "voc-aug": _voc(augmented=True),
}
