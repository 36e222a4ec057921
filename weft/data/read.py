"""Pictures from files nobody has vouched for: the header is checked before pixels are decoded, every mode has a rule.

| What is in the file | What comes out |
|---|---|
| 1, L | grey, 8 bit |
| LA, RGBA, PA, P with transparency | laid over white; with `channels=4` (LA: 2) alpha stays |
| P, PA | the colours of the palette |
| RGB | as it is |
| CMYK | RGB, by Pillow's rule; JPEGs hold it inverted (Adobe), which Pillow undoes |
| YCbCr, LAB, HSV | RGB |
| I;16, either byte order | uint16, the whole range, nothing clipped |
| I (32 bit) | uint16 where all values are from 0 to 65535, else refused |
| F | float32, the values as they are |
| PNG and TIFF of 16 bits with RGB or RGBA | uint16: Pillow reads the upper bytes, and once more for the lower ones |
| PNG of 16 bits, grey with alpha | as RGBA of 8 bits, which is all Pillow reads; so is CMYK |
| .npy of (H, W) or (H, W, C) | as it is: bool, uint8, uint16 or floating point (as float32), any number of channels |

Channels: grey becomes RGB by repeating, RGB becomes grey by the ITU-R 601 luma, alpha is added opaque where 4 channels
are wanted; any other difference is refused. EXIF rotation is applied. Of several frames the first is taken. Formats
are JPEG (with MPO), PNG, WebP, BMP, TIFF, GIF and PPM: widely used, and with decoders that are looked after.
"""

import io
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, WebPImagePlugin  # noqa: F401  the last two register
from PIL.JpegImagePlugin import JpegImageFile

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")  # Pillow opens MPO as JPEG
MAX_PIXELS = 178_956_970  # twice what Pillow warns at

Picture = Path | bytes | np.ndarray | Image.Image

_CHANNELS = {"1": 1, "L": 1, "LA": 2, "La": 2, "RGBA": 4, "RGBa": 4, "PA": 4}  # 3 for the other modes of 8 bit
TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadPicture(Exception):
    """A file that is not a picture Weft reads; one line says why."""


class UnknownFormat(BadPicture):
    """A file in none of the formats that are read."""


@dataclass(frozen=True)
class Header:
    """Facts that a file states about its picture before a pixel is decoded."""

    format: str
    width: int  # after EXIF rotation, as the height
    height: int
    mode: str  # Pillow's, or the array's dtype
    channels: int
    depth: int  # bits of a value: 8, 16, or 32 for floating point
    frames: int = 1
    orientation: int = 1  # EXIF, 1 to 8
    profile: str = ""  # name of a colour profile that is not sRGB


def open_file(path: Path, buffering: int = -1) -> BinaryIO:
    """A file to be read; raises BadPicture for a pipe or a device, which might be waited for without end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise BadPicture("a folder, a pipe or a device, not a file")
    return open(path, "rb", buffering)


def header(file: Picture) -> Header:
    """The header of a picture, with its colour profile; raises BadPicture."""
    with OpenedPicture(file, max_pixels=None) as opened:
        return opened.header if opened.image is None else _with_profile(opened.header, opened.image)


def decode(
    file: Picture, *, channels: int, max_pixels: int = MAX_PIXELS, at_least: tuple[int, int] | None = None
) -> np.ndarray:
    """(H, W, channels) uint8, uint16 or float32; raises BadPicture.

    A JPEG's decoder may shrink the picture by 2, 4 or 8, but not below a height and width of `at_least`.
    """
    with OpenedPicture(file, max_pixels) as opened:
        pixels = np.asarray(opened.pixels(channels, at_least))
    return pixels[..., None] if pixels.ndim == 2 else pixels


class OpenedPicture:
    """A picture whose header is known and checked and whose pixels are still to be decoded."""

    header: Header
    image: Image.Image | None = None

    def __init__(self, file: Picture, max_pixels: int | None) -> None:
        self._limit = max_pixels
        self._stream: BinaryIO | None = None
        try:
            with one_line():
                self._open(file)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "OpenedPicture":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def pixels(self, channels: int, at_least: tuple[int, int] | None = None) -> Image.Image | np.ndarray:
        """A Pillow image of mode L or RGB where values have 8 bits and 1 or 3 channels are wanted, else an array."""
        with one_line():
            if at_least is not None and isinstance(self.image, JpegImageFile) and self._stream is not None:
                height, width = at_least
                self.image.draft(None, (height, width) if self.header.orientation >= 5 else (width, height))
            if self.image is None:
                return _array_channels(self._read_array(), channels)
            image = _turned(self.image, self.header)
            if self.header.depth == 16 and self.header.channels > 1:
                lower = _turned(self._lower_bytes(), self.header)
                return _array_channels(np.asarray(image).astype(np.uint16) << 8 | np.asarray(lower), channels)
            if self.header.depth > 8:
                return _array_channels(_deep_array(image), channels)
            return _image_channels(image, channels)

    def _open(self, file: Picture) -> None:
        self._array = None
        if isinstance(file, np.ndarray):
            self._array = file
            self.header = _array_header(file.shape, file.dtype, "array")
        elif isinstance(file, Image.Image):
            self.image = file
        else:
            self._stream = io.BytesIO(file) if isinstance(file, bytes) else open_file(file)
            if self._stream.read(6) == b"\x93NUMPY":
                self._stream.seek(0)
                self.header = _array_header(*_npy_header(self._stream), "NPY")
            else:
                self._stream.seek(0)
                self.image = Image.open(self._stream, formats=FORMATS)
        if self.image is not None:
            self.header = _image_header(self.image, self._stream is not None)
        found = self.header.width * self.header.height * self.header.frames
        if self._limit is not None and found > self._limit:
            frames = f" x {self.header.frames} frames" if self.header.frames > 1 else ""
            size = f"{self.header.width} x {self.header.height}{frames}"
            raise BadPicture(f"{size} pixels are more than data.max_pixels={self._limit}")

    def _lower_bytes(self) -> Image.Image:
        """A file of 16 bits once more, told that its bytes lie the other way round: Pillow keeps one of each two."""
        assert self._stream is not None
        self._stream.seek(0)
        image = Image.open(self._stream, formats=FORMATS)
        assert isinstance(image, ImageFile.ImageFile)
        swapped = {"B": "L", "L": "B", "N": "B" if sys.byteorder == "little" else "L"}
        for i, tile in enumerate(image.tile):
            mode, *rest = (tile.args,) if isinstance(tile.args, str) else tile.args  # type: ignore[misc]
            mode = mode[:-1] + swapped[mode[-1]]
            image.tile[i] = tile._replace(args=(mode, *rest) if rest else mode)
        return image

    def _read_array(self) -> np.ndarray:
        if self._array is not None:
            return self._array
        assert self._stream is not None
        self._stream.seek(0)
        return np.load(self._stream, allow_pickle=False)


@contextmanager
def one_line() -> Iterator[None]:
    """Turns whatever a decoder makes of hostile bytes into BadPicture; our limits hold instead of the process's."""
    limit, truncated = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = None, False  # `OpenedPicture` has its own limit
    try:
        yield
    except BadPicture:
        raise
    except MemoryError:
        raise BadPicture("there is not enough memory to decode it") from None
    except Image.UnidentifiedImageError:
        raise UnknownFormat(f"not a picture in one of the formats {', '.join(FORMATS)} or NPY") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, ...
        why = error.strerror if isinstance(error, OSError) else ""  # the system's, without a number and the path
        raise BadPicture(" ".join((why or str(error) or type(error).__name__).split())) from None
    finally:
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = limit, truncated


def _image_header(image: Image.Image, whole: bool) -> Header:
    width, height = image.size
    if width < 1 or height < 1:
        raise BadPicture(f"a picture of {width} x {height} pixels")
    exif = Image.Image.getexif(image)  # PNG's own would decode the pixels to look behind them
    orientation = exif.get(ExifTags.Base.Orientation, 1)
    orientation = orientation if orientation in TURNED else 1
    if orientation >= 5 and image.format != "TIFF":  # of which Pillow says the size after rotation
        width, height = height, width
    channels, depth = _layout(image, whole)
    frames = getattr(image, "n_frames", 1)
    return Header(image.format or "image", width, height, image.mode, channels, depth, frames, orientation)


def _layout(image: Image.Image, whole: bool = False) -> tuple[int, int]:
    """Channels and depth of what comes out; `whole` where the file is at hand, and with it both bytes of 16 bits."""
    if image.mode.startswith("I") or image.mode == "F":
        return 1, 32 if image.mode == "F" else 16
    if whole and isinstance(image, ImageFile.ImageFile) and re.search("RGBA?;16", str(image.tile[:1])):
        return len(image.mode), 16
    transparent = "transparency" in image.info and image.mode == "P"
    return (4 if transparent else _CHANNELS.get(image.mode, 3)), 8


def _turned(image: Image.Image, header: Header) -> Image.Image:
    """The pixels, loaded and rotated as EXIF says; of a TIFF Pillow sees to it."""
    image.load()
    if header.orientation == 1 or header.format == "TIFF":
        return image
    return image.transpose(TURNED[header.orientation])


def _with_profile(header: Header, image: Image.Image) -> Header:
    data = image.info.get("icc_profile")
    if not data:
        return header
    from dataclasses import replace

    from PIL import ImageCms

    try:
        name = ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(data))).strip()
    except (ImageCms.PyCMSError, OSError, ValueError):
        name = "unreadable"
    return header if "srgb" in name.lower() else replace(header, profile=" ".join(name.split()) or "unnamed")


def _npy_header(stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(stream)
    return shape, dtype


def _array_header(shape: tuple[int, ...], dtype: np.dtype, format: str) -> Header:
    depth = {"b1": 8, "u1": 8, "u2": 16}.get(dtype.kind + str(dtype.itemsize), 32 if dtype.kind == "f" else 0)
    if len(shape) not in (2, 3) or 0 in shape or not depth:
        raise BadPicture(
            f"an array of {shape} {dtype}; expected (H, W) or (H, W, C) of bool, uint8, uint16 or floating point"
        )
    return Header(format, shape[1], shape[0], dtype.name, shape[2] if len(shape) == 3 else 1, depth)


def _deep_array(image: Image.Image) -> np.ndarray:
    """(H, W) uint16 or float32 of the modes I;16, I and F."""
    values = np.asarray(image)
    if image.mode == "F" or image.mode.startswith("I;16"):
        return values.astype(values.dtype.newbyteorder("="))
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:
        raise BadPicture(f"values from {low} to {high}; expected 0 to 65535 (save floating point instead)")
    return values.astype(np.uint16)


def _array_channels(pixels: np.ndarray, channels: int) -> np.ndarray:
    """(H, W, channels) uint8, uint16 or float32 from an array of any layout that `_array_header` lets through."""
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.dtype.kind == "b":
        pixels = pixels.astype(np.uint8) * 255
    elif pixels.dtype.kind == "f":
        pixels = pixels.astype(np.float32)
        if not np.isfinite(pixels).all():
            raise BadPicture("NaN or infinity among its values")
    found = pixels.shape[2]
    if found == channels:
        return np.ascontiguousarray(pixels)
    top = 1.0 if pixels.dtype.kind == "f" else np.iinfo(pixels.dtype).max
    if channels in (1, 3) and found in (2, 4):  # over white
        alpha = pixels[..., -1:].astype(np.float64) / top
        mixed = pixels[..., :-1] * alpha + top * (1 - alpha)
        pixels = (mixed if pixels.dtype.kind == "f" else mixed.round()).astype(pixels.dtype)
    elif (found, channels) in ((1, 2), (3, 4)):
        return np.concatenate([pixels, np.full_like(pixels[..., :1], top)], axis=2)
    if pixels.shape[2] == 1 and channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if pixels.shape[2] == 3 and channels == 1:
        luma = pixels @ np.array([[0.299], [0.587], [0.114]])
        return (luma if pixels.dtype.kind == "f" else luma.round()).astype(pixels.dtype)
    if pixels.shape[2] == channels:
        return pixels
    raise BadPicture(f"{found} channels; expected {channels}")


def _image_channels(image: Image.Image, channels: int) -> Image.Image | np.ndarray:
    """An 8-bit image of any mode as L or RGB, or as an array where neither is wanted."""
    found = _layout(image)[0]
    if channels not in (1, 3):
        wanted = {2: "LA", 4: "RGBA"}.get(channels)
        if wanted is None or (channels == 2 and found > 2) or (channels == 4 and found < 3):
            raise BadPicture(f"{found} channels; expected {channels}")
        return np.asarray(image.convert(wanted))
    mode = "L" if channels == 1 else "RGB"
    if image.mode == mode:
        return image
    if found in (2, 4):
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    elif image.mode in ("CMYK", "YCbCr", "LAB", "HSV", "P", "RGBX"):
        image = image.convert("RGB")
    return image.convert(mode)
