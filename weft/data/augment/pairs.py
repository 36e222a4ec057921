"""A training picture together with its mask or its objects: what happens to one happens to the other.

A `CropView` says which box of a picture is shown, at which size, mirrored or not; pixels, masks and boxes follow it.
The box is cut out before anything is resized, so only what is shown costs time.
"""

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from weft.config import AugmentConfig
from weft.data.augment.picture import Box, cropped, drawing_from
from weft.data.boxes.objects import Objects
from weft.data.boxes.shapes import box_of, draw, encode
from weft.data.masks.values import IGNORE, upright
from weft.data.preprocessing import Preprocessing, fit, resize, to_channels_first, to_tensor
from weft.data.read import BadPicture, Header, OpenedPicture, Picture

DRAWS = 10  # of a window, until no class fills too much of it
SPARE = 2.0  # a JPEG's decoder leaves this many times the pixels needed on a side
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class CropView:
    """A box of the upright picture, resized, then mirrored."""

    box: Box  # in pixels of the picture
    size: tuple[int, int]  # height and width that the box gets
    flip: bool = False  # left to right
    vflip: bool = False  # top to bottom

    def picture(self, opened: OpenedPicture, preprocessing: Preprocessing, mode: str) -> Tensor:
        """(C, h, w) uint8 or float32."""
        whole = opened.header.height, opened.header.width
        sides = zip(whole, self.size, self.box[2:], strict=True)
        height, width = (math.ceil(side * SPARE * shown / cut) for side, shown, cut in sides)
        pixels = cropped(opened.pixels(preprocessing.channels, (height, width)), self.box, whole)
        picture = to_channels_first(pixels, preprocessing.depth)
        if picture.shape[1:] != self.size:
            picture = to_tensor(resize(picture, self.size, mode), preprocessing.depth)
        return picture.flip([axis for axis, mirror in ((2, self.flip), (1, self.vflip)) if mirror])

    def pixels(self) -> tuple[np.ndarray, np.ndarray]:
        """(h,) rows and (w,) columns of the picture that lie nearest to the rows and columns shown."""
        top, left, *sides = self.box
        rows, columns = (  # the middle of a pixel shown, in pixels of the box
            (2 * np.arange(shown) + 1) * side // (2 * shown) for shown, side in zip(self.size, sides, strict=True)
        )
        return top + rows[:: -1 if self.vflip else 1], left + columns[:: -1 if self.flip else 1]

    def mask(self, mask: np.ndarray) -> np.ndarray:
        """(H, W) of anything to (h, w): values are chosen, never mixed."""
        rows, columns = self.pixels()
        return mask[rows][:, columns]

    def boxes(self, boxes: np.ndarray) -> np.ndarray:
        """(n, 4) left, top, right, bottom; what lies outside of the view stays there."""
        (top, left, height, width), (h, w) = self.box, self.size
        moved = (boxes - np.array([left, top, left, top])) * np.array([w / width, h / height] * 2)
        return mirrored(moved, self.size, self.flip, self.vflip).astype(np.float32)


def mirrored(boxes: np.ndarray, size: tuple[int, int], flip: bool, vflip: bool) -> np.ndarray:
    """(n, 4) boxes in a picture of this height and width after it was mirrored."""
    left, top, right, bottom = boxes.T
    if flip:
        left, right = size[1] - right, size[1] - left
    if vflip:
        top, bottom = size[0] - bottom, size[0] - top
    return np.stack([left, top, right, bottom], axis=1)


class ColourMap(NamedTuple):
    """A linear map of colours, of one picture or of each of a batch."""

    matrix: Tensor  # (C, C) or (B, C, C) float32
    offset: Tensor  # () or (B,), in values of the pictures


@dataclass(frozen=True)
class DrawnPair:
    """All that is drawn for a picture with a target."""

    view: CropView
    mode: str  # of interpolation
    colours: ColourMap | None

    def picture(self, opened: OpenedPicture, preprocessing: Preprocessing) -> Tensor:
        """(C, h, w) uint8 or float32: the view of the picture, in other colours."""
        picture = self.view.picture(opened, preprocessing, self.mode)
        return recolour(picture, self.colours, preprocessing.depth) if self.colours else picture


class SegmentAugmentation:
    """Rescale, cut a window, mirror, distort colours, pad: a picture and its mask, always as large as `window`.

    The picture is resized by a factor drawn from `augment.rescale`, relative to the size that evaluation gives it, and
    a window is cut at a place drawn anew while one class fills more than `augment.class_limit` of the pixels that
    count. What the picture does not fill is the mean colour, and ignored in the mask.
    """

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing, window: tuple[int, int]) -> None:
        self.config, self.preprocessing, self.window = config, preprocessing, window

    def pair(self, file: Picture, mask: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
        """(C, h, w) and (h, w) uint8 from a mask (H, W) uint8: a function of its arguments; may raise BadPicture."""
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            mask = align(mask, opened.header)
            drawn = self.draw(opened.header, mask, seed)
            picture = drawn.picture(opened, self.preprocessing)
        view, target = drawn.view, torch.full(self.window, IGNORE, dtype=torch.uint8)
        target[: view.size[0], : view.size[1]] = torch.from_numpy(view.mask(mask))
        return pad(picture, self.window, self.preprocessing), target

    def draw(self, header: Header, mask: np.ndarray, seed: int) -> DrawnPair:
        """All that is random about an upright picture and its mask."""
        with drawing_from(seed):
            return draw_rest(self._view(mask), self.config, self.preprocessing)

    def _view(self, mask: np.ndarray) -> CropView:
        whole = mask.shape[0], mask.shape[1]
        part, size = random_part(whole, self.preprocessing, self.window, self.config.rescale)
        for _ in range(DRAWS):
            top, left, height, width = box = random_place(part, whole)
            if varied(mask[top : top + height, left : left + width], self.config.class_limit):
                break
        return CropView(box, size)  # pyright: ignore[reportPossiblyUnboundVariable]  drawn at least once


class DetectAugmentation:
    """Resize, mirror, distort colours: a picture and the objects in it, without crowds.

    The short side is drawn from `augment.short_sides`; with `augment.cut_short_sides` that is for half of the pictures
    the short side of a part, cut as DETR does it. With `augment.crop=random` the picture is resized as for
    segmentation instead, by a factor from `augment.rescale`, and a window of `augment.img_size` is cut (large-scale
    jitter): objects are cut with it, and their boxes drawn anew around what is left of their shapes. Objects of which
    less than a pixel remains are left out.
    """

    def __init__(self, config: AugmentConfig, preprocessing: Preprocessing) -> None:
        self.config, self.preprocessing = config, preprocessing

    def pair(self, file: Picture, objects: Objects, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        """(C, h, w) and `boxes` (n, 4) float32, `labels` (n,) int64, and where there are shapes `masks` (n, h, w)
        uint8: a function of its arguments; may raise BadPicture."""
        with OpenedPicture(file, self.preprocessing.max_pixels) as opened:
            header, objects = opened.header, align(objects, opened.header)
            drawn = self.draw(header, objects, seed)
            picture = drawn.picture(opened, self.preprocessing)
        return pad(picture, self.window(drawn), self.preprocessing), self.target(header, objects, drawn)

    def draw(self, header: Header, objects: Objects, seed: int) -> DrawnPair:
        """All that is random about an upright picture and its objects."""
        with drawing_from(seed):
            return draw_rest(self._view((header.height, header.width)), self.config, self.preprocessing)

    def target(self, header: Header, objects: Objects, drawn: DrawnPair) -> dict[str, Tensor]:
        return shown_objects(objects, drawn.view, (header.height, header.width), self.window(drawn))

    def window(self, drawn: DrawnPair) -> tuple[int, int]:
        side = self.config.img_size
        return (side, side) if self.config.crop == "random" else drawn.view.size

    def _view(self, whole: tuple[int, int]) -> CropView:
        cfg = self.config
        if cfg.crop == "random":
            part, size = random_part(whole, self.preprocessing, (cfg.img_size, cfg.img_size), cfg.rescale)
            return CropView(random_place(part, whole), size)
        short = random.choice(cfg.short_sides or [cfg.img_size])
        limits = short, cfg.long_side or round(1.6667 * short)
        if cfg.cut_short_sides and random.random() < 0.5:
            part, cut = random_cut(whole, cfg)
            return CropView(random_place(part, whole), fit(cut, limits))
        return CropView((0, 0, *whole), fit(whole, limits))


def random_part(
    whole: tuple[int, int], preprocessing: Preprocessing, window: tuple[int, int], rescale: list[float]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """How much of a picture's height and width is shown in the window, and how large, at a factor that is drawn."""
    factor = random.uniform(*rescale)
    part, size = [], []
    for side, base, most in zip(whole, preprocessing.fitted(*whole), window, strict=True):
        scaled = max(1, round(base * factor))
        size.append(min(scaled, most))
        part.append(max(1, round(side * size[-1] / scaled)))
    return (part[0], part[1]), (size[0], size[1])


def random_cut(whole: tuple[int, int], config: AugmentConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """How much of a picture's height and width is cut out where it was resized first, and how large that is then.

    The picture itself is resized only once, from the part to what is shown of it.
    """
    short = random.choice(config.cut_short_sides)
    least, most = config.cut_sides
    part, cut = [], []
    for side, resized in zip(whole, fit(whole, (short, config.long_side or round(1.6667 * short))), strict=True):
        cut.append(random.randint(min(resized, least), min(resized, most)))
        part.append(max(1, round(side * cut[-1] / resized)))
    return (part[0], part[1]), (cut[0], cut[1])


def random_place(part: tuple[int, int], whole: tuple[int, int]) -> Box:
    return random.randint(0, whole[0] - part[0]), random.randint(0, whole[1] - part[1]), *part


def mirror_view(view: CropView, config: AugmentConfig) -> CropView:
    flip, vflip = random.random() < config.flip, random.random() < config.vflip
    return dataclasses.replace(view, flip=flip, vflip=vflip)


def varied(mask: np.ndarray, limit: float) -> bool:
    """Whether there are pixels that count and no class has more than this part of them."""
    if limit == 1:
        return True
    counts = np.bincount(mask.ravel(), minlength=IGNORE + 1)[:IGNORE]
    return bool(0 < counts.max() <= limit * counts.sum())


def draw_rest(view: CropView, config: AugmentConfig, preprocessing: Preprocessing) -> DrawnPair:
    """The view with all that is drawn behind it: mirroring, interpolation, colours."""
    view = mirror_view(view, config)
    mode = random.choice(("bilinear", "bicubic")) if config.interpolation == "random" else config.interpolation
    colours = None
    if config.photometric:
        colours = draw_colours(config.photometric, preprocessing.channels, preprocessing.depth)
    return DrawnPair(view, mode, colours)


def draw_colours(strength: float, channels: int, depth: int) -> ColourMap:
    """SSD's photometric distortion, each step with probability 0.5; of other than three channels the first two steps.

    Brightness adds up to 32 of 255, contrast multiplies by 0.5 to 1.5, saturation goes from 0.5 to 1.5 times the
    distance to grey, hue turns by up to a tenth of the circle, at strength 1. The last two are done in RGB rather than
    HSV: then all four are one linear map, several times as fast.
    """
    add, contrast, saturation, turn = (
        random.uniform(-most, most) * strength if random.random() < 0.5 else 0.0 for most in (32 / 255, 0.5, 0.5, 0.1)
    )
    factor, top = max(0.0, 1 + contrast), 255 if depth == 8 else 1
    matrix = factor * (colours(1 + saturation, turn) if channels == 3 else np.eye(channels))
    offset = factor * add * top + (0.5 if depth == 8 else 0)  # whole numbers are rounded down below
    return ColourMap(torch.tensor(matrix, dtype=torch.float32), torch.tensor(offset))


def recolour(pictures: Tensor, colours: ColourMap, depth: int) -> Tensor:
    """(C, h, w), or (B, C, h, w) with as many maps, uint8 or float32, in other colours."""
    flat = pictures.flatten(-2).to(torch.float32)
    product = torch.addmm if flat.ndim == 2 else torch.baddbmm
    flat = product(colours.offset[..., None, None], colours.matrix, flat)
    top = 255 if depth == 8 else 1
    return (flat.clamp_(0, top) if depth < 32 else flat).to(pictures.dtype).view(pictures.shape)


def colours(saturation: float, turn: float) -> np.ndarray:
    """(3, 3): RGB to RGB at another distance from grey of the same luma, then turned around the axis of greys."""
    grey, across = np.full((3, 3), 1 / 3), np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    angle, factor = 2 * math.pi * turn, max(0.0, saturation)
    turned = grey + math.cos(angle) * (np.eye(3) - grey) + math.sin(angle) * across
    return turned @ (factor * np.eye(3) + (1 - factor) * np.array([LUMA] * 3))


def pad(picture: Tensor, window: tuple[int, int], preprocessing: Preprocessing) -> Tensor:
    """(C, h, w) in the upper left corner of a window of the mean colour."""
    if picture.shape[1:] == window:
        return picture.contiguous()
    padded = mean_colour(preprocessing, picture).repeat(1, *window)
    padded[:, : picture.shape[1], : picture.shape[2]] = picture
    return padded


def mean_colour(preprocessing: Preprocessing, like: Tensor) -> Tensor:
    """(C, 1, 1) of the type and on the device of pictures."""
    mean, _ = preprocessing.statistics(like.device)
    return ((mean * 255).round().clamp(0, 255) if preprocessing.depth == 8 else mean).to(like.dtype)


def shown_objects(
    objects: Objects, view: CropView, whole: tuple[int, int], window: tuple[int, int]
) -> dict[str, Tensor]:
    """The objects in a view of a picture of the size `whole`, as a detector is trained on them."""
    moved = view.boxes(objects.boxes)
    boxes = moved.clip(0, view.size[::-1] * 2)
    cut = np.abs(moved - boxes).max(axis=1, initial=0) > 1
    sides = boxes[:, 2:] - boxes[:, :2]  # (n, 2)
    kept = np.flatnonzero(~objects.crowd & (sides.min(axis=1, initial=np.inf) >= 1)).tolist()
    masks = np.zeros((len(kept), *window), np.uint8)
    if objects.has_shapes:
        candidates, kept = kept, []
        for i in candidates:
            mask = masks[len(kept)]
            if _draw_into(mask, objects.shapes[i], boxes[i], view, whole):
                boxes[i] = box_of(mask) if cut[i] else boxes[i]
                kept.append(i)
    target = {"boxes": torch.from_numpy(boxes[kept]), "labels": torch.from_numpy(objects.labels[kept])}
    if objects.has_shapes or not len(objects):  # where there is nothing, there is no shape to miss
        target["masks"] = torch.from_numpy(masks[: len(kept)])
    return target


def _draw_into(mask: np.ndarray, shape: Any, box: np.ndarray, view: CropView, whole: tuple[int, int]) -> bool:
    """Writes the part of a shape that lies in its box in the view into the mask (h, w); whether there is any."""
    left, top = np.floor(box[:2]).astype(int)
    right, bottom = np.ceil(box[2:]).astype(int)
    rows, columns = view.pixels()
    part = draw(shape, *whole)[rows[top:bottom]][:, columns[left:right]]
    mask[top:bottom, left:right] = part
    return bool(part.any())


@overload
def align(target: np.ndarray, header: Header) -> np.ndarray: ...
@overload
def align(target: Objects, header: Header) -> Objects: ...


def align(target: np.ndarray | Objects, header: Header) -> np.ndarray | Objects:
    """A mask or objects for the upright picture, turned as EXIF says where they were made for the one before rotation.

    Only where rotation swaps height and width can that be seen; a target of the upright size is taken as it is, and so
    are objects of which nobody knows the size. Any other size raises BadPicture.
    """
    if isinstance(target, np.ndarray):
        return upright(target, header)
    size = header.height, header.width
    if (target.size or size) == size:
        return target
    if header.orientation < 5 or target.size != size[::-1]:
        found = f"{target.size[1]} x {target.size[0]}" if target.size else "unknown size"
        raise BadPicture(f"the boxes are for a picture of {found} pixels; the picture has {size[1]} x {size[0]}")
    return _turned_objects(target, header)


def _turned(mask: np.ndarray, orientation: int) -> np.ndarray:
    """Transposed; then mirrored left to right (6 and 7) and top to bottom (7 and 8)."""
    return mask.T[:: -1 if orientation in (7, 8) else 1, :: -1 if orientation in (6, 7) else 1]


def _turned_objects(objects: Objects, header: Header) -> Objects:
    size, turn = (header.height, header.width), header.orientation
    boxes = mirrored(objects.boxes[:, [1, 0, 3, 2]], size, turn in (6, 7), turn in (7, 8))
    shapes = [encode(_turned(draw(shape, *size[::-1]), turn)) for shape in objects.shapes]
    return dataclasses.replace(objects, boxes=boxes, shapes=shapes, size=size)
