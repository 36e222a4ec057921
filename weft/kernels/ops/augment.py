"""A step of an augmentation policy on a batch of 8-bit pictures, to each picture its own operation, as Pillow does it.

A step is four numbers for each picture: a `Code`, what it is done by, and the interpolation; `Step` names the columns.
Values come out as Pillow's, except that rotations, shears and translations interpolate in single precision, so that
rarely a value differs by one.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from weft.kernels.ops.op import define

NEAREST, BILINEAR, BICUBIC = 0, 2, 3  # Pillow's numbers


class Code(IntEnum):
    """Operations by number; those up to EQUALIZE look each value up in a table of its channel."""

    NOTHING = 0
    INVERT = 1
    POSTERIZE = 2  # by the bits that stay
    SOLARIZE = 3  # by the least value that is inverted
    SOLARIZE_ADD = 4  # by what is added to values below 128
    BRIGHTNESS = 5  # by a factor, like all that are called after what they change
    CONTRAST = 6
    AUTO_CONTRAST = 7
    EQUALIZE = 8
    COLOR = 9
    SHARPNESS = 10
    SHEAR_X = 11  # by pixels for each pixel across
    SHEAR_Y = 12
    TRANSLATE_X = 13  # by a part of the side
    TRANSLATE_Y = 14
    ROTATE = 15  # by cosine and sine


class Step(IntEnum):
    """The columns of a step."""

    CODE = 0
    BY = 1
    SINE = 2
    MODE = 3


# Value by value -------------------------------------------------------------------------------------------------


def invert(pictures: Tensor, _: Tensor) -> Tensor:
    return 255 - pictures


def posterize(pictures: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper bits; large magnitudes ask for fewer than none."""
    return pictures & (0xFF00 >> bits.int().clamp(0, 8)).to(torch.uint8)[..., None, None]


def solarize(pictures: Tensor, thresholds: Tensor) -> Tensor:
    return torch.where(pictures < thresholds[..., None, None], pictures, 255 - pictures)


def solarize_add(pictures: Tensor, amounts: Tensor) -> Tensor:
    brighter = (pictures + amounts.short()[..., None, None]).clamp_(max=255).to(torch.uint8)
    return torch.where(pictures < 128, brighter, pictures)


def auto_contrast(pictures: Tensor, _: Tensor) -> Tensor:
    low, high = (side.double() for side in pictures.flatten(2).aminmax(dim=2, keepdim=True))  # (G, C, 1)
    values = torch.arange(256, device=pictures.device)
    scale = values[255] / (high - low)  # a tensor above, because torch takes a number times the reciprocal
    stretched = (values * scale + -low * scale).clamp(0, 255)  # as Pillow adds it up, so that it rounds alike
    return _look_up(pictures, torch.where(high > low, stretched, values))


def equalize(pictures: Tensor, _: Tensor) -> Tensor:
    places = pictures.flatten(2).long()  # (G, C, h*w)
    one = torch.ones((), dtype=torch.int32, device=pictures.device)
    counts = torch.zeros(*places.shape[:2], 256, dtype=torch.int32, device=pictures.device)
    counts.scatter_add_(2, places, one.expand(places.shape))
    step = (places.shape[2] - counts.gather(2, places.amax(2, keepdim=True))) // 255  # (G, C, 1)
    below = counts.cumsum(2) - counts
    flat = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    return _look_up(pictures, torch.where(step > 0, flat, torch.arange(256, device=pictures.device)))


def _look_up(pictures: Tensor, tables: Tensor) -> Tensor:
    """Each value replaced by that of its channel's table, (G, C, 256), rounded down."""
    return tables.to(torch.uint8).gather(2, pictures.flatten(2).long()).view_as(pictures)


# Towards another picture, and away from it ----------------------------------------------------------------------


def blend(base: Tensor, pictures: Tensor, factors: Tensor) -> Tensor:
    """The base where the factor is 0, the picture where it is 1."""
    return (base + factors.float()[..., None, None] * (pictures.float() - base)).clamp_(0, 255).to(torch.uint8)


def brightness(pictures: Tensor, factors: Tensor) -> Tensor:
    return blend(torch.zeros_like(pictures), pictures, factors)


def color(pictures: Tensor, factors: Tensor) -> Tensor:
    return blend(_grey(pictures), pictures, factors)


def contrast(pictures: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(pictures).flatten(1)
    count = grey.shape[1]
    mean = (2 * grey.sum(1) + count) // (2 * count)  # rounded
    return blend(mean.view(-1, 1, 1, 1), pictures, factors)


def sharpness(pictures: Tensor, factors: Tensor) -> Tensor:
    """The base is smoothed by a 3 x 3 kernel of 1 around 5; pixels on the edge stay as they are."""
    x = pictures.short()
    rows = x[..., :-2, :] + x[..., 1:-1, :] + x[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * x[..., 1:-1, 1:-1]
    x[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return blend(x, pictures, factors)


def _grey(pictures: Tensor) -> Tensor:
    """(G, 1, h, w) int32, with Pillow's weights."""
    if pictures.shape[1] == 1:
        return pictures.int()
    red, green, blue = pictures.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


# Moved ----------------------------------------------------------------------------------------------------------


def move(pictures: Tensor, rows: Tensor, *, down: slice, across: slice) -> Tensor:
    """Pillow's affine transformation; `down` and `across` are those of the four taps each way that can have a weight.

    Pixels have their centres at 0.5, 1.5 ...; what comes from outside the picture gets the fill colour, and close to
    the edge the picture goes on as it ends.
    """
    count, channels, height, width = pictures.shape
    matrix, size, mode, fill = rows[..., None, None].split([6, 2, 1, channels], dim=1)  # in double precision, as Pillow
    x = torch.arange(width, device=pictures.device) + 0.5
    y = torch.arange(height, device=pictures.device)[:, None] + 0.5
    by_x, by_y, constant = matrix.unflatten(1, (2, 3)).unbind(2)
    source = by_x * x + by_y * y + constant  # (G, 2, h, w): x and y of where values come from
    outside = ((source < 0) | (source >= size)).any(1, keepdim=True)
    pixels, weights = _taps(source - 0.5, size[:, :, None], mode)  # (G, 2, 4, h, w)
    places = pixels[:, 1, down, None] * width + pixels[:, 0, None, across]  # (G, taps down, taps across, h, w)
    weights = weights[:, 1, down, None] * weights[:, 0, None, across]
    values = pictures.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, channels, -1))
    total = (values.view(count, channels, -1, height, width) * weights.flatten(1, 2)[:, None]).sum(2)
    total += 2e-4  # so that 7 - 1e-5 counts as 7 below
    return torch.where(outside, fill.float(), total).clamp_(0, 255).to(torch.uint8)


def _taps(places: Tensor, size: Tensor, mode: Tensor) -> tuple[Tensor, Tensor]:
    """The four pixels of a line around each place, and their weights; the outer two are for bicubic alone."""
    whole = places.floor()
    d = (places - whole).float()  # the way from the second to the third
    d = torch.where(mode == NEAREST, (d >= 0.5).float(), d)
    bend = (mode == BICUBIC) * d * (1 - d)
    near, far = bend * (1 - d), bend * d  # Pillow's cubic has a slope of -1
    offsets = torch.arange(-1, 3, device=places.device)[:, None, None]
    pixels = (whole[:, :, None] + offsets).clamp_(min=0).minimum(size - 1).long()
    return pixels, torch.stack([-near, 1 - d + near, d + far, -far], dim=2)


EVERY, SECOND = slice(None), slice(1, 2)
along_x = partial(move, down=SECOND, across=EVERY)
along_y = partial(move, down=EVERY, across=SECOND)
turn = partial(move, down=EVERY, across=EVERY)

# All of them ----------------------------------------------------------------------------------------------------

Change = Callable[[Tensor, Tensor], Tensor]  # (G, C, h, w) pictures and (G, n) parameters to pictures, all uint8

CHANGES: dict[Code, Change] = {
    Code.INVERT: invert,
    Code.POSTERIZE: posterize,
    Code.SOLARIZE: solarize,
    Code.SOLARIZE_ADD: solarize_add,
    Code.BRIGHTNESS: brightness,
    Code.CONTRAST: contrast,
    Code.AUTO_CONTRAST: auto_contrast,
    Code.EQUALIZE: equalize,
    Code.COLOR: color,
    Code.SHARPNESS: sharpness,
    Code.SHEAR_X: along_x,
    Code.SHEAR_Y: along_y,
    Code.TRANSLATE_X: along_x,
    Code.TRANSLATE_Y: along_y,
    Code.ROTATE: turn,
}


def _reference(pictures: Tensor, rows: Tensor, first: int, fill: tuple[int, ...]) -> Tensor:
    """(B, C, h, w) uint8 after the step that begins in column `first` of `rows`; `fill` is the colour from outside.

    Pictures with the same operation are done at once, so that this waits for the device.
    """
    steps, pictures = rows[:, first : first + len(Step)].double(), pictures.clone()
    codes = steps[:, Step.CODE].int()
    for code in codes.unique().tolist():
        if code != Code.NOTHING:
            index = (codes == code).nonzero()[:, 0]
            chosen = pictures[index]
            pictures[index] = CHANGES[Code(code)](chosen, _parameters(Code(code), steps[index], chosen, fill))
    return pictures


def _parameters(code: Code, steps: Tensor, pictures: Tensor, fill: tuple[int, ...]) -> Tensor:
    """The parameters of the operation for each picture."""
    if code < Code.SHEAR_X:
        return steps[:, Step.BY : Step.SINE]
    height, width = pictures.shape[2:]
    constant = steps.new_tensor([width, height, *fill]).expand(len(steps), -1)
    matrix = _matrices(code, steps[:, Step.BY], steps[:, Step.SINE], height, width)
    return torch.cat([matrix, constant[:, :2], steps[:, Step.MODE :], constant[:, 2:]], dim=1)


def _matrices(code: Code, by: Tensor, sine: Tensor, height: int, width: int) -> Tensor:
    """(G, 6) a to f with which a value at (x, y) comes from (ax + by + c, dx + ey + f)."""
    a = e = torch.ones_like(by)
    b, c, d, f = torch.zeros(4, *by.shape, dtype=by.dtype, device=by.device)
    match code:
        case Code.SHEAR_X:
            b = by
        case Code.SHEAR_Y:
            d = by
        case Code.TRANSLATE_X:
            c = by * width
        case Code.TRANSLATE_Y:
            f = by * height
        case _:  # about the centre, anticlockwise
            x, y = width / 2, height / 2
            a, b, c = by, -sine, x - by * x + sine * y
            d, e, f = sine, by, y - sine * x - by * y
    return torch.stack([a, b, c, d, e, f], dim=1)


augment_step = define("augment_step", _reference, "augment.forward")
