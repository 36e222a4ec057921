"""Pictures that are decoded once: what is kept is what would be read, and nothing is lost on the way."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.small_runs import make_pictures
from weft.data import keep as keeping
from weft.data import memory
from weft.data.augment.pairs import align
from weft.data.keep import in_memory, keep_pictures, keep_validation, room_on
from weft.data.loader import eval_batches
from weft.data.memory import free_host_memory
from weft.data.preprocessing import Preprocessing
from weft.data.read import decode, header
from weft.data.sources.open import open_source
from weft.errors import WeftError

CPU = torch.device("cpu")
PREPROCESSING = Preprocessing((12, 12), 3, 8, (0.5,) * 3, (0.25,) * 3, "bicubic", 0.9, "center", 10**8)


def read(file) -> torch.Tensor:
    return torch.tensor(decode(file, channels=3)).permute(2, 0, 1).contiguous()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Class folders whose pictures have several sizes; two files are no pictures."""
    folder = make_pictures(tmp_path_factory.mktemp("keep") / "pictures", classes=2, each=6)
    for number, size in enumerate([(9, 21), (30, 17)]):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)).save(
            folder / "class 0" / f"odd {number}.png"
        )
    for name in ("class 0/3.png", "class 1/5.png"):
        (folder / name).write_bytes(b"no picture")
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_every_picture_lies_where_the_columns_say(folder, monkeypatch, workers):
    monkeypatch.setattr(keeping, "FEW", 0)  # so that workers are started
    monkeypatch.setattr(keeping, "LARGEST_CHUNK", 3)
    source = open_source(str(folder))
    indices, seen = np.arange(len(source)), []
    kept = keep_pictures(
        source, indices, read, CPU, one=10, workers=workers, progress=lambda done, total: seen.append((done, total))
    )
    bad = {source.names[index] for index, _ in kept.bad}
    assert bad == {"class 0/3.png", "class 1/5.png"}
    assert seen[-1] == (len(source), len(source))
    for index in (i for i in indices.tolist() if source.names[i] not in bad):
        start, (height, width) = int(kept.starts[index]), kept.sizes[index].tolist()
        picture = kept.pixels[start : start + 3 * height * width].view(3, height, width)
        assert torch.equal(picture, read(source.open(index)))
        assert kept.stand_ins[index] == index
    good = [i for i in indices.tolist() if source.names[i] not in bad]
    for index, _ in kept.bad:
        later = [i for i in good if i > index]
        assert kept.stand_ins[index] == (later[0] if later else good[0])


def test_none_that_can_be_read_is_an_error(folder):
    source = open_source(str(folder))
    bad = np.array([i for i, name in enumerate(source.names) if name in ("class 0/3.png", "class 1/5.png")])
    with pytest.raises(WeftError, match="None of the training pictures"):
        keep_pictures(source, bad, read, CPU, one=10, workers=0)


def test_validation_is_what_readers_give(folder):
    source = open_source(str(folder))
    indices = np.array([7, 2, 3, 11, 0, 5, 9])
    kept = keep_validation(source, indices, PREPROCESSING, CPU, workers=0)
    found = list(kept.batches(3))
    expected = list(eval_batches(source, PREPROCESSING, indices, batch=3, workers=0, pin=False))
    for column in ("pictures", "labels", "index"):
        joined = [torch.cat([getattr(batch, column) for batch in batches]) for batches in (found, expected)]
        assert torch.equal(*joined)
    bad = [[why for batch in batches for why in batch.bad] for batches in (found, expected)]
    assert bad[0] == bad[1] != []


def test_source_in_memory_gives_what_its_files_give(folder):
    source = open_source(str(folder))
    kept = in_memory(source, np.arange(6), 3, 10**8, one=10, workers=0)
    opened = [kept.open(i) for i in range(len(source))]
    assert sum(isinstance(file, np.ndarray) for file in opened) == 5  # of six one cannot be read
    for index, file in enumerate(opened):
        if source.names[index] not in ("class 0/3.png", "class 1/5.png"):
            assert np.array_equal(decode(file, channels=3), decode(source.open(index), channels=3))
    assert kept.reader.sizes(range(3)) == source.reader.sizes(range(3))


def test_masks_in_memory_are_those_of_upright_pictures(tmp_path):
    """As readers align them: a mask may be made for the picture before its EXIF rotation."""
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for name in ("a", "b"):
        pixels = np.random.default_rng(ord(name)).integers(0, 256, (10, 14, 3), dtype=np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(pixels).save(tmp_path / "images" / f"{name}.jpg", exif=exif)
        mask = np.zeros((10, 14), np.uint8)
        mask[:3, :5] = 1
        Image.fromarray(mask).save(tmp_path / "masks" / f"{name}.png")
    source = open_source(str(tmp_path))
    kept = in_memory(source, np.arange(2), 3, 10**8, one=10, workers=0)
    assert isinstance(kept.open(0), np.ndarray)
    assert kept.open(0).shape == (14, 10, 3)
    assert np.array_equal(kept.target(0), align(source.target(0), header(source.open(0))))
    assert np.array_equal(align(kept.target(0), header(kept.open(0))), kept.target(0))  # and not once more
    assert np.array_equal(kept.open(0), decode(source.open(0), channels=3))


def test_room_is_a_part_of_what_is_free(monkeypatch):
    assert 0 < room_on(CPU) < free_host_memory()
    texts = {"/proc/meminfo": ["MemAvailable:  1000 kB"], "/sys/fs/cgroup/memory.max": ["700000"]}
    texts["/sys/fs/cgroup/memory.current"] = ["200000"]
    monkeypatch.setattr(memory, "_lines", lambda path: texts.get(path, []))
    assert free_host_memory() == 500_000  # the container's limit, less what is used
    texts["/sys/fs/cgroup/memory.stat"] = ["anon 5", "inactive_file 150000", "workingset_activate_inactive_file 9"]
    assert free_host_memory() == 650_000  # ... but for files that are only kept in case
    former = "/sys/fs/cgroup/memory"
    texts |= {f"{former}/memory.limit_in_bytes": ["400000"], f"{former}/memory.usage_in_bytes": ["300000"]}
    texts[f"{former}/memory.stat"] = ["inactive_file 7", "total_inactive_file 50000"]
    assert free_host_memory() == 150_000
    texts[f"{former}/memory.limit_in_bytes"] = [str(2**63 - 4096)]  # none
    texts["/sys/fs/cgroup/memory.max"] = ["max"]
    assert free_host_memory() == 1_024_000


def test_kept_source_is_replaced_and_not_changed(folder):
    source = open_source(str(folder))
    before = replace(source)
    in_memory(source, np.arange(3), 3, 10**8, one=10, workers=0)
    assert source.reader is before.reader
