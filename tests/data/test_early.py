"""Pictures that are decoded by other processes before anybody asks for them: the same pixels, or none."""

import errno
import os
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weft.config import AugmentConfig
from weft.data import early, memory
from weft.data.augment.kept import KeptAugmentation
from weft.data.early import decode_early
from weft.data.keep import in_memory, keep_pictures, keep_validation
from weft.data.preprocessing import Preprocessing
from weft.data.read import decode
from weft.data.sources.open import open_source

CPU = torch.device("cpu")
HERE = os.getpid()
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shares memory by forking")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures of 12 x 10 pixels as PNG, JPEG, grey and with alpha; one is larger, one damaged, one is turned."""
    root, draw = tmp_path_factory.mktemp("early"), np.random.default_rng(0)
    for label in ("a", "b"):
        (root / label).mkdir()
        for number in range(20):
            image = Image.fromarray(draw.integers(0, 256, (10, 12, 3), dtype=np.uint8))
            image.save(root / label / f"{number:02}.png")
    Image.open(root / "a" / "03.png").convert("L").save(root / "a" / "03.png")
    Image.open(root / "a" / "04.png").convert("RGBA").save(root / "a" / "04.png")
    Image.open(root / "a" / "05.png").save(root / "a" / "05.jpg")
    (root / "a" / "05.png").unlink()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(draw.integers(0, 256, (12, 10, 3), dtype=np.uint8)).save(root / "b" / "06.jpg", exif=exif)
    Image.new("RGB", (30, 40)).save(root / "b" / "07.png")
    content = bytearray((root / "b" / "08.png").read_bytes())
    content[60:90] = bytes(30)
    (root / "b" / "08.png").write_bytes(content)
    return root


@pytest.fixture
def source(folder, monkeypatch):
    monkeypatch.setattr(early, "FEW", 0)
    monkeypatch.setattr(early, "CHUNK", 3)
    monkeypatch.setattr(early, "LOOKED_AT", 3)
    return open_source(str(folder))


def preprocessing(channels: int, size: tuple[int, int] = (10, 12), crop_pct: float = 1.0) -> Preprocessing:
    return Preprocessing(size, channels, 8, (0.5,) * channels, (0.25,) * channels, "bicubic", crop_pct, "center", 10**8)


@pytest.mark.parametrize("channels", [0, 1, 3])
def test_pixels_are_those_of_the_files(source, channels):
    found = decode_early(source, channels, 10**8)
    assert found is not None
    found.finish()
    absent = {source.names[i] for i in np.flatnonzero(~found.done).tolist()}
    assert absent == {"b/07.png", "b/08.png"}
    for index in np.flatnonzero(found.done).tolist():
        assert np.array_equal(found.pixels[index], decode(source.open(index), channels=channels or 3))
    found.close()


def test_processes_rest_while_somebody_measures(source, monkeypatch):
    def decode_slowly(self, index):
        time.sleep(0.02)
        self.done[index] = True

    monkeypatch.setattr(early.EarlyPixels, "_decode", decode_slowly)
    found = decode_early(source, 3, 10**8)
    assert found is not None
    with found.rest():
        time.sleep(0.05)  # for the pictures that are being decoded, however busy the machine is
        before = found.done.sum()
        time.sleep(0.1)
        assert found.done.sum() == before < len(source)
    found.finish()
    assert found.done.all()
    found.close()


@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_kept_is_the_same_with_it(source, channels):
    how = preprocessing(channels)
    bad, large = list(source.names).index("b/08.png"), list(source.names).index("b/07.png")
    train, val = np.array([0, 3, 4, 5, 8, bad - 3, large, bad, bad + 2]), np.array([bad + 3, 2, bad, bad + 1])
    augmentation = KeptAugmentation(AugmentConfig(crop="random", pad=1, policy=""), how)
    found = decode_early(source, channels, 10**8)
    assert found is not None
    found.finish()
    pairs = []
    for given in (None, found):
        kept = keep_pictures(source, train, augmentation.decode, CPU, one=360, workers=0, early=given)
        seen = keep_validation(source, val, how, CPU, workers=0, early=given)
        memory = in_memory(source, train, channels, 10**8, one=360, workers=0, early=given)
        pairs.append((kept, seen, memory))
    (kept, seen, memory), (kept_early, seen_early, memory_early) = pairs
    found.close()
    assert kept.bad == kept_early.bad != []
    assert np.array_equal(kept.stand_ins, kept_early.stand_ins)
    assert np.array_equal(kept.shapes, kept_early.shapes)
    for index in set(train.tolist()) - {index for index, _ in kept.bad}:
        height, width = kept.shapes[index]
        pictures = [k.pixels[k.starts[index] :][: channels * height * width] for k in (kept, kept_early)]
        assert torch.equal(*pictures)
        both = memory.open(index), memory_early.open(index)
        assert np.array_equal(*both)
    assert torch.equal(seen.pictures, seen_early.pictures)
    assert torch.equal(seen.index, seen_early.index)
    assert torch.equal(seen.labels, seen_early.labels)
    assert seen.bad == seen_early.bad != []


@pytest.mark.parametrize(
    ("how", "leaves"),
    [
        (preprocessing(3), True),
        (preprocessing(3, crop_pct=0.9), False),
        (preprocessing(3, (12, 12)), False),
        (preprocessing(3, (10, 10)), False),
    ],
)
def test_a_preprocessing_knows_what_it_leaves_as_it_is(source, how, leaves):
    assert how.leaves([10, 12]) == leaves
    picture = torch.tensor(decode(source.open(0), channels=3)).permute(2, 0, 1)
    assert torch.equal(how.picture(source.open(0)), picture) == leaves


@pytest.mark.parametrize("end", ["killed", "hangs"])
def test_a_process_that_ends_early_leaves_pictures_undone(source, monkeypatch, end):
    monkeypatch.setattr(early, "PATIENCE", 0.5)
    plain = early.EarlyPixels._decode

    def deadly(self, index):
        if index == 4 and os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else time.sleep(600)
        plain(self, index)

    monkeypatch.setattr(early.EarlyPixels, "_decode", deadly)
    found = decode_early(source, 3, 10**8)
    assert found is not None
    found.finish()
    assert not found.done[4]
    assert found.done[3]
    assert not found.processes


@pytest.mark.parametrize("end", ["finish", "close"])
def test_processes_may_be_nobodys_business(source, end):
    """Where SIGCHLD is ignored, which a process inherits, nothing is left of a child that has ended."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        found = decode_early(source, 3, 10**8)
        assert found is not None
        time.sleep(0.5 if end == "close" else 0)
        getattr(found, end)()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not found.processes
    assert found.done[3] == (end == "finish")


def test_what_nobody_wants_is_given_up(source, monkeypatch):
    monkeypatch.setattr(early.EarlyPixels, "_decode", lambda self, index: time.sleep(600))
    found = decode_early(source, 3, 10**8)
    assert found is not None
    processes = {*found.processes}
    assert processes
    found.close()
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not found.done.any()


def test_memory_that_may_not_be_shared_is_done_without(source, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    assert decode_early(source, 3, 10**8) is None


def test_no_more_is_taken_than_may_be_kept(source, monkeypatch):
    """A container may have little of a large machine's memory, and a run that takes more is killed."""
    taken = 12 * 10 * 3 * len(source)
    texts = {"/proc/meminfo": ["MemAvailable: 100000000 kB"], "/sys/fs/cgroup/memory.current": ["7000"]}
    monkeypatch.setattr(memory, "_lines", lambda path: texts.get(path, []))
    for free, fits in ((4 * taken, True), (4 * taken - 4, False)):
        texts["/sys/fs/cgroup/memory.max"] = [f"{7000 + free}"]
        found = decode_early(source, 3, 10**8)
        assert (found is not None) == fits
        if found is not None:
            found.close()


def test_memory_is_given_back(source):
    """By whoever closes it, although the run that it was made for goes on and holds it."""

    def shared() -> int:
        return int(re.findall(r"^Pss_Shmem: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0])

    before = shared()
    found = early.EarlyPixels(source, (128, 128, 3), 10**8)
    found.finish()
    found.pixels[:] = 1
    assert shared() - before > found.pixels.nbytes // 2048
    found.close()
    assert shared() - before < 100


def test_only_small_pictures_of_one_size_are_begun_with(source, folder, monkeypatch):
    for name, value in (("LARGEST", 119), ("MOST_BYTES", 1000), ("FEW", 1000)):
        with monkeypatch.context() as patch:
            patch.setattr(early, name, value)
            assert decode_early(source, 3, 10**8) is None
    assert decode_early(source, 4, 10**8) is None
    monkeypatch.setattr(early, "LOOKED_AT", len(source))
    assert decode_early(source, 3, 10**8) is None  # one is larger
    assert decode_early(open_source("demo:fashion"), 1, 10**8) is None  # arrays, and nothing to decode
