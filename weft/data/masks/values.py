"""Masks as files: safe reading of what they hold, and the rule that turns their values into class numbers.

A value is a grey level, a position in a palette, or a colour written as 0xRRGGBB. Values are exact or useless, so
JPEG is refused, and a value that is no class is an error rather than a guess.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.read import MAX_PIXELS, TURNED, BadPicture, Header, OpenedPicture, one_line
from weft.data.sources.source import Files, Names
from weft.words import listed, many

IGNORE = 255  # the class number of pixels that count in neither loss nor metric
MOST_CLASSES = 255


class BadMask(BadPicture):
    """A mask that cannot be used; `kind` says why, for programs."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class RawMask:
    """The values of a mask file, before they mean anything."""

    pixels: np.ndarray  # (H, W) uint8, or (H, W, 3) uint8 of colours
    palette: np.ndarray | None = None  # (256,) uint32 of 0xRRGGBB

    @property
    def form(self) -> str:
        return "palette" if self.palette is not None else "index" if self.pixels.ndim == 2 else "RGB"

    def indices(self) -> np.ndarray:
        """(H, W) uint8: grey levels or positions in the palette, which itself does not count."""
        if self.pixels.ndim == 2:
            return self.pixels
        first = self.pixels[..., 0]
        if (self.pixels[..., 1:] != first[..., None]).any():
            raise BadMask("mixed-masks", "an RGB-coded mask among masks that hold class numbers")
        return first

    def colours(self) -> np.ndarray:
        """(H, W) uint32 of 0xRRGGBB; a grey level is the colour it looks like."""
        if self.palette is not None:
            return self.palette[self.pixels]
        if self.pixels.ndim == 2:
            return self.pixels * np.uint32(0x010101)
        bytes_of_each = np.zeros((*self.pixels.shape[:2], 4), np.uint8)
        for i in range(3):
            bytes_of_each[..., 2 - i] = self.pixels[..., i]
        return bytes_of_each.view("<u4")[..., 0]


def read_raw(file: Path, max_pixels: int = MAX_PIXELS) -> RawMask:
    """The values in a mask file, not turned by EXIF: `upright` sees to that. Raises BadMask."""
    try:
        with OpenedPicture(file, max_pixels) as opened, one_line():
            if opened.header.format in ("JPEG", "MPO"):
                raise BadMask("jpeg-mask", "a JPEG, whose values are not exact; save masks as PNG")
            image = opened.image
            if image is None:
                return RawMask(_shallow(opened._read_array()))
            if opened.header.depth == 16 and opened.header.channels > 1:
                raise BadMask("deep-mask", f"{opened.header.channels} channels of 16 bits; save masks with 8 bits")
            image.load()
            if image.mode in ("P", "PA"):
                colours = np.array((image.getpalette("RGB") or [])[: 3 * 256], np.uint32).reshape(-1, 3)
                palette = np.zeros(256, np.uint32)
                palette[: len(colours)] = colours @ np.array([1 << 16, 1 << 8, 1], np.uint32)
                return RawMask(np.asarray(image.getchannel(0)), palette)
            if image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
                image = image.convert("RGB")
            return RawMask(_shallow(np.asarray(image)))
    except BadMask:
        raise
    except BadPicture as error:
        raise BadMask("unreadable-mask", str(error)) from None
    except OSError as error:
        raise BadMask("unreadable-mask", error.strerror or str(error)) from None


def _shallow(values: np.ndarray) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8 of whatever a file holds; an alpha channel does not count."""
    if values.ndim == 3:
        values = values[..., :3] if values.shape[2] > 2 else values[..., 0]
    if values.dtype.kind == "b":
        return values.astype(np.uint8)
    if values.dtype.kind == "f" and (values != values.round()).any():
        raise BadMask("deep-mask", "fractions instead of class numbers")
    low, high = values.min(), values.max()
    if low < 0 or (values.dtype != np.uint8 and high > IGNORE):
        kind = "fractions" if values.dtype.kind == "f" else f"{values.dtype.itemsize * 8} bits"
        raise BadMask(
            "deep-mask", f"values from {low:g} to {high:g} ({kind}); class numbers are 0 to 254, and 255 is ignored"
        )
    return values.astype(np.uint8)


@dataclass(frozen=True)
class Coding:
    """Which value stands for which class: the same for all masks of a set."""

    values: tuple[int, ...]  # sorted
    numbers: tuple[int, ...]  # the class of each value, or 255
    colours: bool = False  # values are 0xRRGGBB

    def __post_init__(self) -> None:
        assert list(self.values) == sorted(set(self.values))

    @classmethod
    def of(cls, numbers: dict[int, int], colours: bool = False) -> "Coding":
        """From value to class number."""
        return cls(tuple(sorted(numbers)), tuple(numbers[value] for value in sorted(numbers)), colours)

    def __call__(self, raw: RawMask) -> np.ndarray:
        """(H, W) uint8 class numbers; raises BadMask where a value is no class."""
        return self._of_colours(raw.colours()) if self.colours else self._of_indices(raw.indices())

    def _of_indices(self, found: np.ndarray) -> np.ndarray:
        table = bytearray(256)
        for value, number in zip(self.values, self.numbers, strict=True):
            table[value] = number
        content = found.tobytes()  # whose `translate` is several times faster than numpy's indexing
        if strange := content.translate(None, delete=bytes(self.values)):
            raise BadMask(
                "unknown-values", self._unknown(*np.unique(np.frombuffer(strange, np.uint8), return_counts=True))
            )
        return np.frombuffer(bytearray(content.translate(table)), np.uint8).reshape(found.shape)

    def _of_colours(self, found: np.ndarray) -> np.ndarray:
        values, numbers = np.array(self.values, np.uint32), np.array(self.numbers, np.uint8)
        colours, lengths = runs(found)
        position = np.minimum(np.searchsorted(values, colours), len(values) - 1)
        strange = values[position] != colours
        if strange.any():
            kinds, inverse = np.unique(colours[strange], return_inverse=True)
            raise BadMask("unknown-values", self._unknown(kinds, np.bincount(inverse, lengths[strange]).astype(int)))
        return np.repeat(numbers[position], lengths).reshape(found.shape)

    def _unknown(self, kinds: np.ndarray, counts: np.ndarray) -> str:
        most = sorted(zip(counts.tolist(), kinds.tolist(), strict=True), key=lambda entry: (-entry[0], entry[1]))
        shown = [f"{self.show(value)} in {many(n, 'pixel')}" for n, value in most[:4]]
        shown += [f"{len(kinds) - 4} more"] if len(kinds) > 4 else []
        if len(kinds) == 1:
            return f"value {shown[0]} is not a class ({self.describe()})"
        return f"values {listed(shown)} are not classes ({self.describe()})"

    def of_classes(self, classes: int) -> list[int]:
        """The value that stands for each class, of several the lowest; empty where a class has none."""
        first = {number: value for value, number in reversed([*zip(self.values, self.numbers, strict=True)])}
        return [first[number] for number in range(classes)] if first.keys() >= {*range(classes)} else []

    def describe(self) -> str:
        """`classes are 0 to 10, ignored are 11 and 255`"""
        used = [v for v, n in zip(self.values, self.numbers, strict=True) if n != IGNORE]
        ignored = [v for v, n in zip(self.values, self.numbers, strict=True) if n == IGNORE]
        text = f"classes are {self._range(used)}"
        return text + (f", ignored: {self._range(ignored)}" if ignored else "")

    def _range(self, values: Sequence[int]) -> str:
        if len(values) > 3 and not self.colours and values[-1] - values[0] == len(values) - 1:
            return f"{values[0]} to {values[-1]}"
        shown = [self.show(value) for value in values[:8]]
        return listed([*shown, f"{len(values) - 8} more"] if len(values) > 8 else shown)

    def show(self, value: int) -> str:
        return f"#{value:06x}" if self.colours else str(value)


def runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and lengths of the runs of equal values: far fewer than pixels, because masks are made of regions."""
    flat = values.reshape(-1)
    starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
    return flat[starts], np.diff(starts, append=len(flat))


def upright(mask: np.ndarray, picture: Header) -> np.ndarray:
    """A mask as its picture is shown: turned with it where it has the size that the file had before EXIF rotation."""
    height, width = mask.shape
    if (height, width) == (picture.height, picture.width):
        return mask
    if picture.orientation >= 5 and (height, width) == (picture.width, picture.height):
        from PIL import Image

        return np.asarray(Image.fromarray(mask).transpose(TURNED[picture.orientation]))
    sizes = f"the mask has {width} x {height} pixels, its picture {picture.width} x {picture.height}"
    raise BadMask("mask-size", sizes)


@dataclass(frozen=True)
class CheckedMask:
    """One mask, read for `weft check`."""

    mask: np.ndarray  # (H, W) uint8 class numbers
    raw: RawMask
    turned: bool


class MaskFiles:
    """The targets of a source whose masks are files: position to (H, W) uint8 of class numbers, 255 where ignored."""

    def __init__(self, root: str | os.PathLike[str], paths: Names, coding: Coding, pictures: Files) -> None:
        self.files, self.coding, self.pictures = Files(root, paths), coding, pictures

    def __call__(self, index: int) -> np.ndarray:
        return self.examine(index).mask

    def examine(self, index: int, max_pixels: int = MAX_PIXELS) -> CheckedMask:
        """Raises BadMask that names the mask; BadPicture where it is the picture that cannot be read."""
        with OpenedPicture(self.pictures(index), None) as opened:
            picture = opened.header
        try:
            raw = read_raw(self.files(index), max_pixels)
            mask = self.coding(raw)
            return CheckedMask(upright(mask, picture), raw, mask.shape != (picture.height, picture.width))
        except BadMask as error:
            raise BadMask(error.kind, f"{self.files.paths[index]}: {error}") from None

    def sizes(self, positions: range) -> bytes:
        return repr(self.coding).encode() + self.files.sizes(positions)
