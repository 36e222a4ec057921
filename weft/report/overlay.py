"""Answers painted over pictures: classes as colours, objects as outlines with names. Pixels in, pixels out."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from weft.data.masks.values import IGNORE
from weft.data.preprocessing import Preprocessing, to_channels_first
from weft.data.read import Picture, decode

if TYPE_CHECKING:
    from torch import Tensor

ALPHA = 0.5  # of a colour over a picture
DARK, DARKEST = 128, 32  # a picture without brighter pixels is brightened, but never so much that black noise is white
CROWDED = 30  # from so many objects on only outlines are drawn
NAMED = 15  # up to so many objects have their names beside them; more have a legend
LEGEND = 8  # classes in it, at most, and
LEGEND_PART = 0.25  # of the picture
BACKGROUND = {"background", "_background_", "bg"}

# Okabe and Ito's colours, which people see apart however they see colours; what follows them is searched for
FIRST = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
# How linear red, green and blue look to people without the first, second and third kind of cones (Machado et al. 2009)
DEFICIENCIES = (
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
)


# Colours --------------------------------------------------------------------------------------------------------


def colours(k: int) -> np.ndarray:
    """(k, 3) uint8: as different as can be for all kinds of eyes; more classes never change the first ones."""
    found = _all_colours()
    return found[np.arange(k) % len(found)]


def background(classes: Sequence[str]) -> list[int]:
    """The classes that mean "nothing of interest", which are not painted."""
    return [i for i, name in enumerate(classes) if name.lower() in BACKGROUND]


def palette(classes: Sequence[str]) -> np.ndarray:
    """(classes, 3) uint8: a colour for each class, black for the background."""
    plain = background(classes)
    table = np.zeros((len(classes), 3), np.uint8)
    table[[i for i in range(len(classes)) if i not in plain]] = colours(len(classes) - len(plain))
    return table


@lru_cache(maxsize=1)
def _all_colours() -> np.ndarray:
    """(255, 3): after the first ones always the candidate that is farthest from all chosen, for the worst eyes."""
    steps = np.linspace(0, 255, 9).round()
    grid = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, 3)
    lab = seen_by_all(grid)[0]
    vivid = (lab[:, 0] > 0.42) & (lab[:, 0] < 0.93) & (np.hypot(lab[:, 1], lab[:, 2]) > 0.05)
    candidates = np.concatenate([FIRST, grid[vivid]])
    seen = seen_by_all(candidates)  # (4, n, 3)
    chosen = list(range(len(FIRST)))
    nearest = np.min([_apart(seen, seen[:, i : i + 1]) for i in chosen], axis=0)
    while len(chosen) < 255:
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, _apart(seen, seen[:, chosen[-1] : chosen[-1] + 1]))
    return candidates[chosen].astype(np.uint8)


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(4, n, 3) and (4, 1, 3) to (n,): the distance as the eyes see it that see it least."""
    return np.linalg.norm(a - b, axis=-1).min(axis=0)


def seen_by_all(rgb: np.ndarray) -> np.ndarray:
    """(n, 3) of 0 to 255 to (4, n, 3) in OKLab, where distance is difference: usual eyes, then three other kinds."""
    share = np.asarray(rgb, np.float64) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    kinds = np.stack([linear, *(linear @ np.array(m).T for m in DEFICIENCIES)]).clip(0, 1)
    cones = kinds @ np.array(
        [
            [0.4122214708, 0.2119034982, 0.0883024619],
            [0.5363325363, 0.6806995451, 0.2817188376],
            [0.0514459929, 0.1073969566, 0.6299787005],
        ]
    )
    return np.cbrt(cones) @ np.array(
        [
            [0.2104542553, 1.9779984951, 0.0259040371],
            [0.7936177850, -2.4285922050, 0.7827717662],
            [-0.0040720468, 0.4505937099, -0.8086757660],
        ]
    )


# Pictures -------------------------------------------------------------------------------------------------------


def visible(picture: "Tensor", *, brighten: bool = False) -> np.ndarray:
    """A (C, H, W) picture for human eyes: (H, W, 1 or 3) uint8, its first three channels.

    Eight bits in up to four channels are taken for grey or colour as they are, unless they are to be `brighten`ed and
    are dark, as many pictures of microscopes. Of anything else (16 bit, float, many bands) the values between the
    first and the last hundredth are stretched over the range, else most would be black.
    """
    channels = len(picture)
    pixels = picture[: 3 if channels >= 3 else 1].permute(1, 2, 0).cpu().numpy()
    if pixels.dtype == np.uint8 and channels <= 4:
        if not brighten or (top := np.percentile(pixels, 99.5)) >= DARK:
            return pixels
        return (pixels * (255 / max(top, DARKEST))).clip(0, 255).round().astype(np.uint8)
    pixels = np.nan_to_num(pixels.astype(np.float32))
    low, high = np.percentile(pixels, (1, 99), axis=(0, 1) if channels > 4 else None)  # bands: each by itself
    return (255 * ((pixels - low) / np.maximum(high - low, 1e-6)).clip(0, 1)).round().astype(np.uint8)


def read_visible(file: Picture, preprocessing: Preprocessing) -> np.ndarray:
    """(H, W, 1 or 3) uint8: a picture at its own size for human eyes, dark ones brightened; raises BadPicture."""
    pixels = decode(file, channels=preprocessing.channels, max_pixels=preprocessing.max_pixels)
    return visible(to_channels_first(pixels, preprocessing.depth), brighten=True)


def paint_mask(
    picture: np.ndarray,
    mask: np.ndarray,
    palette: np.ndarray,
    alpha: float = ALPHA,
    outlines: bool = True,
    skip: Collection[int] = (),
) -> np.ndarray:
    """(H, W, 3) uint8: each pixel's class in its colour over the picture; classes in `skip` and IGNORE stay bare.

    picture (H, W, 1 or 3) uint8, mask (H, W) uint8, palette (classes, 3). Outlines are the pixels of a class beside
    which another begins, in full colour.
    """
    painted = np.broadcast_to(picture, (*mask.shape, 3)).copy()
    bare = np.isin(mask, [IGNORE, *skip])
    table = np.zeros((256, 3), np.uint8)
    table[: len(palette)] = palette
    colour = table[mask]
    painted[~bare] = _mixed(painted[~bare], colour[~bare], alpha)
    if outlines:
        edge = border(mask) & ~bare
        painted[edge] = colour[edge]
    return painted


def border(mask: np.ndarray) -> np.ndarray:
    """(H, W) bool: pixels whose neighbour to the right, to the left, above or below has another value."""
    edge = np.zeros(mask.shape, bool)
    down, right = mask[1:] != mask[:-1], mask[:, 1:] != mask[:, :-1]
    edge[1:] |= down
    edge[:-1] |= down
    edge[:, 1:] |= right
    edge[:, :-1] |= right
    return edge


def paint_objects(
    picture: np.ndarray,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray | None,
    masks: np.ndarray | None,
    classes: Sequence[str],
) -> np.ndarray:
    """(H, W, 3) uint8: objects over the picture (H, W, 1 or 3), the surest on top.

    boxes (n, 4) left, top, right, bottom; labels (n,); scores (n,) or None; masks (n, H, W) bool or None. A class has
    its colour; where there is one class only, objects take turns. Objects are filled and have names and scores while
    they are few; more have a legend. What is true of one class needs no names. Boxes are drawn where there are no masks
    or there are names.
    """
    height, width = picture.shape[:2]
    painted = np.broadcast_to(picture, (height, width, 3)).copy()
    table = colours(max(len(classes), 1) if len(classes) > 1 else len(FIRST))
    tells = len(labels) > 0 and (len(classes) > 1 or scores is not None)
    named = tells and len(labels) <= NAMED
    line = max(1, round(min(height, width) / 320))
    order = range(len(labels)) if scores is None else np.argsort(scores, kind="stable").tolist()
    colour = [table[labels[i] if len(classes) > 1 else i % len(table)] for i in range(len(labels))]
    if masks is not None:
        for i in order:
            _paint_shape(painted, masks[i], colour[i], 0.0 if len(labels) > CROWDED else ALPHA * 0.8, line)
    if masks is None or named:
        for i in order:
            _frame(painted, boxes[i], colour[i], line if masks is None else 1)
    if named:
        return _with_names(painted, boxes, labels, scores, classes, colour, order)
    return _with_legend(painted, boxes, labels, classes, table) if tells else painted


def _paint_shape(painted: np.ndarray, mask: np.ndarray, colour: np.ndarray, alpha: float, line: int) -> None:
    """Fills and outlines one mask, in place; only where it is, because a picture may hold hundreds."""
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if not len(rows):
        return
    window = slice(rows[0], rows[-1] + 1), slice(cols[0], cols[-1] + 1)
    part, inner = painted[window], np.pad(mask[window], 1)
    for _ in range(line):  # what is left after wearing off `line` pixels is not outline
        core = inner[1:-1, 1:-1] & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]
        inner = np.pad(core, 1)
    part[mask[window]] = _mixed(part[mask[window]], colour, alpha)
    part[mask[window] & ~inner[1:-1, 1:-1]] = colour


def _frame(painted: np.ndarray, box: np.ndarray, colour: np.ndarray, line: int) -> None:
    """The outline of a box, `line` pixels wide, inside it and inside the picture."""
    height, width = painted.shape[:2]
    left, top = (int(max(0, np.floor(v))) for v in box[:2])
    right, bottom = int(min(width, np.ceil(box[2]))), int(min(height, np.ceil(box[3])))
    if left < right and top < bottom:
        part = painted[top:bottom, left:right]
        part[:line] = part[-line:] = part[:, :line] = part[:, -line:] = colour


def _with_names(
    painted: np.ndarray,
    boxes: np.ndarray,
    labels: np.ndarray,
    scores: np.ndarray | None,
    classes: Sequence[str],
    colour: Sequence[np.ndarray],
    order: Collection[int],
) -> np.ndarray:
    """The name of each object, and how sure it is in per cent, above its box or, where there is no room, inside."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(painted)
    draw, size = ImageDraw.Draw(image), min(28, max(10, round(min(image.size) / 32)))
    font = ImageFont.load_default(size)
    for i in order:
        name = printable(classes[int(labels[i])])[:24]
        text = name if scores is None else f"{name} {100 * scores[i]:.0f}"
        width, height = (round(v) for v in draw.textbbox((0, 0), text, font, anchor="lt")[2:])
        left = min(max(0, round(float(boxes[i][0]))), max(0, image.width - width - 4))
        top = round(float(boxes[i][1])) - height - 4
        top = top if top >= 0 else min(max(0, round(float(boxes[i][1]))), max(0, image.height - height - 4))
        fill = tuple(int(v) for v in colour[i])
        draw.rectangle((left, top, left + width + 3, top + height + 3), fill=fill)
        ink = "black" if np.dot(fill, (0.299, 0.587, 0.114)) > 110 else "white"
        draw.text((left + 2, top + 2), text, ink, font, anchor="lt")
    return np.asarray(image)


def _with_legend(
    painted: np.ndarray, boxes: np.ndarray, labels: np.ndarray, classes: Sequence[str], table: np.ndarray
) -> np.ndarray:
    """Each class with its colour and how many there are, in the corner that the fewest objects touch."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(painted)
    size = min(28, max(10, round(min(image.size) / 32)))
    font, counts = ImageFont.load_default(size), np.bincount(labels, minlength=len(classes))
    order: list[int] = [i for i in np.argsort(-counts, kind="stable").tolist() if counts[i]]
    lines = [f"{printable(classes[i])[:24]} {counts[i]}" for i in order[:LEGEND]]
    lines += [f"and {len(order) - LEGEND} classes more"] if len(order) > LEGEND else []
    width = round(max(font.getlength(line) for line in lines)) + 2 * size
    height = round(1.3 * size * len(lines)) + size // 2
    if width * height > LEGEND_PART * image.width * image.height or width > image.width or height > image.height:
        return painted
    corners = [(x, y) for y in (0, image.height - height) for x in (0, image.width - width)]
    left, top = min(corners, key=lambda corner: _touched(boxes, *corner, width, height))
    part = painted[top : top + height, left : left + width]
    image.paste(Image.fromarray((part * 0.25).astype(np.uint8)), (left, top))
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        y = top + size // 2 + round(1.3 * size * number)
        if number < LEGEND and len(classes) > 1:
            fill = tuple(int(v) for v in table[order[number]])
            draw.rectangle((left + size // 3, y, left + size, y + 2 * size // 3), fill=fill)
        draw.text((left + round(1.4 * size), y), line, "white", font, anchor="lt")
    return np.asarray(image)


def _touched(boxes: np.ndarray, left: int, top: int, width: int, height: int) -> int:
    """How many boxes reach into a rectangle."""
    beside = (boxes[:, 0] >= left + width) | (boxes[:, 2] <= left)
    apart = (boxes[:, 1] >= top + height) | (boxes[:, 3] <= top)
    return int((~(beside | apart)).sum())


def printable(text: str) -> str:
    """The letters that the font can draw; others as ?."""
    return "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in text)


def _mixed(below: np.ndarray, above: np.ndarray, alpha: float) -> np.ndarray:
    return (below * (1 - alpha) + above * alpha).round().astype(np.uint8)
