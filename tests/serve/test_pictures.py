"""Pictures that nobody would want, line by line of the checklist of reliability: I1 to I6."""

import io
import json
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.helpers.serving import form
from tests.serve.conftest import encoded


def png_of(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG of black pixels, however many, in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = zlib.compressobj(9)
    data = b"".join(row.compress(bytes(1 + width // 8)) for _ in range(min(height, 2000))) + row.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *(chunk(*one) for one in chunks), chunk(b"IDAT", data), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def many_frames(kind: str) -> bytes:
    file, frames = io.BytesIO(), [Image.new("L", (1000, 1000), 255 * (i % 2)) for i in range(60)]
    options = {"compression": "tiff_deflate"} if kind == "TIFF" else {}
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("bomb", "status"),
    [
        (lambda: png_of(30_000, 30_000), 422),
        (lambda: many_frames("GIF"), 422),
        (lambda: many_frames("WEBP"), 422),
        (lambda: many_frames("TIFF"), 422),
        (lambda: png_of(64, 64, *[(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))] * 90), 422),
        (lambda: png_of(64, 64, (b"iCCP", b"a\0\0" + zlib.compress(bytes(10**8)))), None),
        (lambda: png_of(64, 64, (b"eXIf", b"MM\0*" + bytes(5 * 10**6))), None),
    ],
    ids=["pixels", "gif", "webp", "tiff", "texts", "profile", "exif"],
)
def test_i1_bombs_are_refused_before_they_go_off(served, bomb, status):
    """By the header, in little time and memory; a block beside the pixels that is too large is refused or left
    alone.
    """
    data = bomb()
    assert len(data) < 10**7
    before = {pid: peak(pid) for pid in served.service.decoders.pids}
    begun = time.monotonic()
    answer = served.predict(data, model="classes")
    assert time.monotonic() - begun < 5
    assert answer.status_code == status or (status is None and answer.status_code in (200, 422))
    assert served.service.decoders.pids == [*before]  # none of them died
    assert max(peak(pid) - before[pid] for pid in before) < 200


def peak(pid: int) -> float:
    """The most memory in megabytes that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def cut(data: bytes, part: float) -> bytes:
    return data[: int(len(data) * part)]


NOISE = np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("name", "data", "status"),
    [
        ("truncated.jpg", cut(encoded(NOISE, "JPEG"), 0.5), 422),
        ("progressive.jpg", cut(encoded(NOISE, "JPEG", progressive=True), 0.6), 422),
        ("truncated.png", cut(encoded(NOISE), 0.5), 422),
        ("a jpeg.png", encoded(NOISE, "JPEG"), 200),
        ("empty.jpg", b"", 415),
        ("text.jpg", b"Dear diary, this is no picture.", 415),
        ("profile.png", encoded(NOISE, icc_profile=b"no profile at all"), 200),
        ("zero.png", png_of(0, 10), 415),
    ],
)
def test_i2_bad_files_are_told_and_others_go_on(served, name, data, status):
    good = encoded(NOISE)
    alone = served.client.post("/predict", files=form((name, data)))
    assert alone.status_code == (400 if not data else status), alone.text
    both = served.client.post("/predict", files=form((name, data), ("good.png", good)))
    assert both.status_code == 200
    first, second = both.json()["pictures"]
    assert [first["name"], second["name"]] == [name, "good.png"]
    assert ("error" in first) == (status != 200)
    assert first.get("error") or first["labels"]
    assert second["labels"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_i3_exif_rotation(served, orientation):
    """A scene stored in eight ways has one answer; masks are as large as the upright picture."""
    upright = Image.fromarray(np.random.default_rng(2).integers(0, 255, (48, 64, 3), np.uint8))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    exif, file, plain = Image.Exif(), io.BytesIO(), io.BytesIO()
    exif[0x0112] = orientation
    stored.save(file, "PNG", exif=exif)
    upright.save(plain, "PNG")
    for model in ("classes", "masks"):
        (turned,), (usual,) = (
            served.predict(data.getvalue(), model=model).json()["pictures"] for data in (file, plain)
        )
        notes = turned.pop("notes", [])
        assert turned == usual
        assert any("EXIF" in note for note in notes) == (orientation > 1)
    assert usual["size"] == [48, 64]


GREY = NOISE[..., 0]
MODES = {
    "1": lambda: Image.fromarray(GREY).convert("1"),
    "L": lambda: Image.fromarray(GREY),
    "LA": lambda: Image.fromarray(GREY).convert("LA"),
    "P": lambda: Image.fromarray(NOISE).convert("P"),
    "RGBA": lambda: Image.fromarray(NOISE).convert("RGBA"),
    "CMYK": lambda: Image.fromarray(NOISE).convert("CMYK"),
    "YCbCr": lambda: Image.fromarray(NOISE).convert("YCbCr"),
    "I;16": lambda: Image.fromarray(GREY.astype(np.uint16) * 257),
    "I": lambda: Image.fromarray(GREY.astype(np.int32) * 200),
    "F": lambda: Image.fromarray(GREY.astype(np.float32)),
}


@pytest.mark.parametrize("mode", MODES)
def test_i4_modes_are_those_of_training(served, runs, mode):
    """Whatever mode a file has, the server answers as `weft predict` does, or refuses with the same reason."""
    import weft

    file = io.BytesIO()
    MODES[mode]().save(file, "TIFF" if mode in ("F", "YCbCr", "CMYK", "I") else "PNG")
    (expected,) = weft.load(runs["classes"], "cpu").predict([file.getvalue()])
    answer = served.predict(file.getvalue(), model="classes")
    if expected.error:
        assert answer.status_code == 422
        assert answer.json()["error"] == expected.error
    else:
        (row,) = answer.json()["pictures"]
        assert row["labels"] == expected.labels
        assert row["probabilities"] == pytest.approx(expected.probabilities, abs=1e-6)


@pytest.mark.parametrize(("top", "told"), [(4096, True), (65536, False)])
def test_i4_values_of_12_bits_are_reported(served, top, told):
    """They are what 65535 for white makes of them: nearly black."""
    deep = np.random.default_rng(0).integers(0, top, (40, 40), np.uint16)
    (row,) = served.predict(encoded(deep), model="classes").json()["pictures"]
    assert (
        row.get("notes", [])
        == ["its values are small for 16 bits, perhaps those of 12: the model saw it nearly black"] * told
    )


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO", "TIFF"])
def test_i5_first_frame_and_profiles_are_reported(served, kind):
    frames = [Image.fromarray(np.full((32, 32, 3), value, np.uint8)) for value in (20, 200, 90)]
    several, one = io.BytesIO(), io.BytesIO()
    frames[0].save(several, kind, save_all=True, append_images=frames[1:])
    frames[0].save(one, "JPEG" if kind == "MPO" else kind)
    (animated,), (still,) = (served.predict(f.getvalue()).json()["pictures"] for f in (several, one))
    assert animated.pop("notes") == ["the first of 3 frames"]
    assert animated["labels"] == still["labels"]
    assert animated["probabilities"] == pytest.approx(still["probabilities"], abs=1e-3)


def test_i5_another_profile_is_reported(served):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    (row,) = served.predict(encoded(NOISE, icc_profile=profile)).json()["pictures"]
    assert "colour profile" in row["notes"][0]
    plain = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    (row,) = served.predict(encoded(NOISE, icc_profile=plain)).json()["pictures"]
    assert "notes" not in row


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "TGA", "SGI", "PCX", "JPEG2000", "DDS"])
def test_i6_only_listed_formats_are_decoded(served, kind):
    """Pillow writes and reads them; the server does not even try."""
    if kind == "JPEG2000" and not Image.core.__dict__.get("jpeg2k_decoder"):
        pytest.skip("this Pillow has no JPEG 2000")
    answer = served.predict(encoded(NOISE, kind))
    assert answer.status_code == 415
    assert "JPEG, PNG, WEBP" in json.loads(answer.text)["error"]


@pytest.mark.parametrize("beginning", [b"8BPS\0\1", b"SIMPLE  =                    T", b"\x00\x00\x00\x20ftypavif"])
def test_i6_other_beginnings_are_refused(served, beginning):
    assert served.predict(beginning + bytes(200)).status_code == 415
