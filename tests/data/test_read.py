"""Every mode has its rule, every hostile file one line, and no file costs memory before its header was looked at."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, ImageOps, PngImagePlugin
from torchvision.transforms.v2.functional import pil_to_tensor

from weft.data.read import BadPicture, decode, header

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (12, 16, 3), dtype=np.uint8)
SMOOTH = np.stack([*np.meshgrid(np.linspace(0, 255, 64), np.linspace(0, 255, 48)), np.full((48, 64), 90.0)], -1)
SMOOTH = SMOOTH.astype(np.uint8)  # (48, 64, 3), which JPEG keeps well


def encoded(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand, also with what Pillow would not write."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *chunks]
    parts += [(b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts)
    return b"\x89PNG\r\n\x1a\n" + body


RGB = Image.fromarray(NOISE)
LOSSLESS = [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True}), ("PPM", {})]


@pytest.mark.parametrize(("format", "options"), LOSSLESS)
def test_lossless_formats_keep_every_value(format: str, options: dict, tmp_path: Path) -> None:
    data = encoded(RGB, format, **options)
    (tmp_path / "wrong.ending").write_bytes(data)
    for file in (data, tmp_path / "wrong.ending", RGB, NOISE):
        np.testing.assert_array_equal(decode(file, channels=3), NOISE)
    found = header(data)
    assert (found.format, found.width, found.height, found.channels, found.depth) == (format, 16, 12, 3, 8)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "CMYK", "YCbCr", "HSV", "LAB", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_modes_without_alpha_follow_pillow(mode: str, channels: int) -> None:
    image = ImageCms.profileToProfile(RGB, *map(ImageCms.createProfile, ("sRGB", "LAB")), outputMode="LAB")
    image = image if mode == "LAB" else RGB.convert(mode)
    colour = image if mode in ("1", "L") else image.convert("RGB")
    expected = np.asarray(colour.convert("L" if channels == 1 else "RGB")).reshape(12, 16, channels)
    np.testing.assert_array_equal(decode(image, channels=channels), expected)


@pytest.mark.parametrize("mode", ["LA", "RGBA", "PA", "P"])
@pytest.mark.parametrize("channels", [1, 3])
def test_alpha_is_laid_over_white(mode: str, channels: int) -> None:
    alpha = np.tile(np.array([0, 255], np.uint8), (12, 8))  # every second column is transparent
    image = Image.fromarray(np.dstack([NOISE, alpha]))
    if mode == "P":
        image = RGB.convert("P", palette=Image.Palette.ADAPTIVE, colors=8)
        image.info["transparency"] = image.getpixel((3, 4))
        alpha = np.where(np.asarray(image) == image.info["transparency"], 0, 255).astype(np.uint8)
    elif mode != "RGBA":
        image = RGB.convert(mode[0])
        image.putalpha(Image.fromarray(alpha))
        assert image.mode == mode
    pixels = decode(image, channels=channels)
    opaque = np.asarray(image.convert("RGBA"))[..., :3]
    opaque = opaque if channels == 3 else np.asarray(Image.fromarray(opaque).convert("L"))[..., None]
    np.testing.assert_array_equal(pixels, np.where(alpha[..., None] == 0, 255, opaque))
    file = encoded(image, "PNG") if mode != "PA" else image
    np.testing.assert_array_equal(decode(file, channels=channels), pixels)


def test_alpha_stays_where_four_channels_are_wanted() -> None:
    image = Image.fromarray(RNG.integers(0, 256, (5, 7, 4), dtype=np.uint8))
    np.testing.assert_array_equal(decode(encoded(image, "PNG"), channels=4), np.asarray(image))
    np.testing.assert_array_equal(decode(RGB, channels=4), np.asarray(RGB.convert("RGBA")))


def test_cmyk_of_jpegs_is_not_inverted() -> None:
    data = encoded(Image.fromarray(SMOOTH).convert("CMYK"), "JPEG", quality=100)
    assert b"Adobe" in data
    assert np.abs(decode(data, channels=3).astype(int) - SMOOTH).max() < 12


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_grey_of_16_bits_keeps_its_range(order: str) -> None:
    values = np.array([[0, 1, 255, 256], [40000, 65534, 65535, 7]], np.uint16)
    mode = "I;16" if order == "<u2" else "I;16B"
    image = Image.frombytes(mode, (4, 2), values.astype(order).tobytes())
    for file in (image, encoded(image, "TIFF"), encoded(image, "PNG")):
        assert header(file).depth == 16
        pixels = decode(file, channels=1)
        assert pixels.dtype == np.uint16
        np.testing.assert_array_equal(pixels[..., 0], values)
        np.testing.assert_array_equal(decode(file, channels=3)[..., 2], values)


def tiff(values: np.ndarray, order: str) -> bytes:
    """An uncompressed TIFF of 16 bits written by hand: Pillow writes none with colour."""
    height, width, channels = values.shape
    data, end = values.astype(order + "u2").tobytes(), 8 + 2 + 9 * 12 + 4
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, channels, end), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, end + 2 * channels), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(data))]
    out = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HIH", 42, 8, len(tags))
    for tag, kind, count, value in tags:
        short = kind == 3 and count == 1
        out += struct.pack(order + "HHI" + ("HH" if short else "I"), tag, kind, count, value, *([0] if short else []))
    return out + struct.pack(order + "I" + channels * "H", 0, *[16] * channels) + data


def deep_png(values: np.ndarray, *chunks: tuple[bytes, bytes]) -> bytes:
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    colour = {2: 4, 3: 2, 4: 6}[values.shape[2]]
    return png(values.shape[1], values.shape[0], 16, colour, rows, *chunks)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("write", [deep_png, lambda v: tiff(v, "<"), lambda v: tiff(v, ">")], ids=["png", "II", "MM"])
def test_colour_of_16_bits_keeps_its_range(channels: int, write: Callable[[np.ndarray], bytes]) -> None:
    values = RNG.integers(0, 65536, (3, 5, channels), dtype=np.uint16)
    file = write(values)
    assert (header(file).channels, header(file).depth) == (channels, 16)
    np.testing.assert_array_equal(decode(file, channels=channels), values)
    grey = decode(file, channels=1)
    colour = values.astype(float)
    if channels == 4:
        alpha = colour[..., 3:] / 65535
        colour = colour[..., :3] * alpha + 65535 * (1 - alpha)
    assert grey.dtype == np.uint16
    assert np.abs(grey - (colour[..., :3] @ [[0.299], [0.587], [0.114]])).max() <= 1


def test_grey_with_alpha_of_16_bits_has_8_left() -> None:
    file = deep_png(np.full((2, 2, 2), 65535, np.uint16))
    assert (header(file).channels, header(file).depth) == (4, 8)
    np.testing.assert_array_equal(decode(file, channels=1), np.full((2, 2, 1), 255))


def test_tiffs_of_other_channel_counts_are_refused() -> None:
    with pytest.raises(BadPicture, match="NPY"):
        decode(tiff(np.zeros((2, 2, 5), np.uint16), "<"), channels=5)


def test_values_beyond_16_bits() -> None:
    image = Image.fromarray(np.array([[0, 65535], [9, 300]], np.int32))
    np.testing.assert_array_equal(decode(image, channels=1)[..., 0], np.asarray(image))
    with pytest.raises(BadPicture, match="65536"):
        decode(Image.fromarray(np.array([[65536]], np.int32)), channels=1)
    floats = np.array([[-1.5, 3e7]], np.float32)
    pixels = decode(encoded(Image.fromarray(floats), "TIFF"), channels=1)
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels[..., 0], floats)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 5)])
def test_arrays_of_any_number_of_channels(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    array = (RNG.random(shape) * (1 if dtype == "float32" else 200)).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    channels = shape[2] if len(shape) == 3 else 1
    pixels = decode(tmp_path / "a.npy", channels=channels)
    factor = 255 if dtype == "bool" else 1
    np.testing.assert_allclose(pixels, array.reshape(4, 6, channels).astype(float) * factor, rtol=1e-6)
    assert pixels.dtype == {"bool": "uint8", "float64": "float32"}.get(dtype, dtype)
    if channels == 5:
        with pytest.raises(BadPicture, match="5 channels; expected 3"):
            decode(tmp_path / "a.npy", channels=3)


@pytest.mark.parametrize("array", [np.zeros((2, 2), complex), np.zeros(3), np.zeros((0, 4)), np.full((2, 2), np.nan)])
def test_arrays_that_are_no_pictures(array: np.ndarray) -> None:
    with pytest.raises(BadPicture):
        decode(array, channels=1)


def test_arrays_with_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[print]], dtype=object), allow_pickle=True)
    with pytest.raises(BadPicture, match="object"):
        decode(tmp_path / "a.npy", channels=1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("TIFF", {}), ("JPEG", {"quality": 95})])
def test_exif_rotation(orientation: int, format: str, options: dict) -> None:
    """Seen through its orientation, every file shows what Pillow's own rotation shows."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(SMOOTH), format, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    np.testing.assert_array_equal(decode(data, channels=3), expected)
    found = header(data)
    assert (found.height, found.width) == expected.shape[:2]
    assert found.orientation == orientation


def test_rotation_of_16_bit_colour() -> None:
    values = RNG.integers(0, 65536, (3, 5, 3), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6
    file = deep_png(values, (b"eXIf", exif.tobytes()[6:]))
    np.testing.assert_array_equal(decode(file, channels=3), np.rot90(values, 3))


def test_the_decoder_shrinks_but_not_below() -> None:
    data = encoded(Image.fromarray(SMOOTH).resize((640, 480)), "JPEG", quality=95)
    assert decode(data, channels=3).shape == (480, 640, 3)
    assert decode(data, channels=3, at_least=(120, 120)).shape == (120, 160, 3)
    assert decode(data, channels=3, at_least=(121, 120)).shape == (240, 320, 3)
    assert decode(data, channels=3, at_least=(481, 641)).shape == (480, 640, 3)


def test_jpegs_are_decoded_as_by_pillow() -> None:
    data = encoded(Image.fromarray(SMOOTH), "JPEG", quality=90, progressive=True)
    np.testing.assert_array_equal(
        decode(data, channels=3), pil_to_tensor(Image.open(io.BytesIO(data))).permute(1, 2, 0)
    )


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_first_frame_of_several(format: str) -> None:
    frames = [Image.fromarray(np.full((40, 50, 3), value, np.uint8)) for value in (30, 200, 90)]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:])
    found = header(data)
    assert found.frames == 3
    assert np.abs(decode(data, channels=3).astype(int) - 30).max() < 5
    with pytest.raises(BadPicture, match="3 frames"):
        decode(data, channels=3, max_pixels=40 * 50 * 3 - 1)


def test_profiles_are_named() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert header(encoded(RGB, "PNG", icc_profile=srgb)).profile == ""
    assert "Lab" in header(encoded(RGB, "PNG", icc_profile=lab)).profile
    assert header(encoded(RGB, "JPEG", icc_profile=b"nonsense" * 40)).profile == "unreadable"
    decode(encoded(RGB, "JPEG", icc_profile=b"nonsense" * 40), channels=3)


JPEG = encoded(Image.fromarray(SMOOTH).resize((300, 200)), "JPEG", quality=90)
PROGRESSIVE = encoded(Image.fromarray(SMOOTH).resize((300, 200)), "JPEG", quality=90, progressive=True)
TEXT = PngImagePlugin.PngInfo()
TEXT.add_text("comment", "a" * 5_000_000, zip=True)
HOSTILE = {
    "empty": b"",
    "text": b"this is no picture\n" * 20,
    "cut jpeg": JPEG[: len(JPEG) // 2],
    "cut progressive jpeg": PROGRESSIVE[: len(PROGRESSIVE) // 2],
    "jpeg head": JPEG[:300],
    "cut png": encoded(RGB, "PNG")[:-40],
    "cut 16-bit png": png(200, 200, 16, 2, RNG.bytes(200 * 1201))[:9000],
    "cut webp": encoded(RGB, "WEBP")[:-20],
    "cut tiff": encoded(RGB, "TIFF")[:300],
    "cut npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|u1'",
    "zero width": png(0, 5, 8, 2, b""),
    "png text bomb": encoded(RGB, "PNG", pnginfo=TEXT),
    "png profile bomb": png(1, 1, 8, 0, b"\0\0", (b"iCCP", b"a\0\0" + zlib.compress(b"a" * 5_000_000))),
    "wrong checksum": encoded(RGB, "PNG")[:20] + b"x" + encoded(RGB, "PNG")[21:],
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n",
    "icon": encoded(RGB.resize((16, 16)), "ICO"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # what some other library asked for
    (tmp_path / "a.jpg").write_bytes(HOSTILE[name])
    for file in (HOSTILE[name], tmp_path / "a.jpg"):
        for at_least in (None, (20, 20)):
            with pytest.raises(BadPicture, match=r"^.{5,200}$"):
                decode(file, channels=3, at_least=at_least)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jpg", tmp_path):
        with pytest.raises(BadPicture):
            header(path)


def test_a_file_with_any_byte_changed_is_read_or_refused() -> None:
    for whole in (JPEG[:2000] + JPEG[2000:], encoded(RGB, "PNG"), encoded(RGB, "TIFF"), encoded(RGB, "GIF")):
        for _ in range(60):
            data = bytearray(whole)
            data[int(RNG.integers(len(data)))] ^= 1 << int(RNG.integers(8))
            with contextlib.suppress(BadPicture):
                assert decode(bytes(data), channels=3, max_pixels=10**6).shape[2] == 3


BOMB = r"""
import re, sys
from weft.data.read import BadPicture, decode, header
for file in sys.argv[1:]:
    header(open(file, "rb").read())
    try:
        decode(open(file, "rb").read(), channels=3)
    except BadPicture as error:
        print(error)
print(int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]) // 1024)  # peak since the start
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_bombs_are_refused_before_they_explode(tmp_path: Path) -> None:
    grey = png(30000, 30000, 1, 0, bytes(3751 * 30000))
    colour = png(30000, 30000, 16, 2, bytes(10**6))
    frames = [Image.new("L", (9, 9), 30 * i) for i in range(6)]
    gif = bytearray(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    gif[6:10] = struct.pack("<HH", 6000, 6000)
    for i, data in enumerate((grey, colour, bytes(gif))):
        assert len(data) < 150_000
        (tmp_path / str(i)).write_bytes(data)
    command = [sys.executable, "-c", BOMB, *map(str, sorted(tmp_path.iterdir()))]
    *lines, used = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    limit = "are more than data.max_pixels=178956970"
    assert lines[0] == lines[1] == f"30000 x 30000 pixels {limit}"
    assert lines[2] == f"6000 x 6000 x 6 frames pixels {limit}"
    assert int(used) < 200
