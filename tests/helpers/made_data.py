"""Data sets of a few tiny pictures, for tests."""

import io
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from weft.data.sources.open import open_source
from weft.errors import WeftError


def picture(path: Path, colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (colour % 256, 10, 20)).save(path, "PNG")
    return path


def tree(root: Path, *paths: str) -> Path:
    """Files under `root`; a path that ends with / is an empty folder."""
    for i, path in enumerate(paths):
        if path.endswith("/"):
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            picture(root / path, i)
    return root


def table(root: Path, text: str, name: str = "labels.csv", encoding: str = "utf-8") -> str:
    tree(root, *(f"{i}.png" for i in range(4)))
    (root / name).write_bytes(text.encode(encoding))
    return str(root / name)


def pairs(source) -> dict[str, str]:
    return {name: source.classes[label] for name, label in zip(source.names, source.labels, strict=True)}


def refused(source, *words: str, **options) -> str:
    """Opening fails with one line that has all `words`."""
    with pytest.raises(WeftError) as error:
        open_source(str(source), **options)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def write_shard(path: Path, members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def png(colour: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def sharded(root: Path, shards_: int = 4, each: int = 5, prefix: str = "train") -> Path:
    for s in range(shards_):
        keys = range(s * each, (s + 1) * each)
        members = {f"{k:03}.{end}": value for k in keys for end, value in (("png", png(k)), ("cls", b"%d" % (k % 2)))}
        write_shard(root / f"{prefix}-{s:04}.tar", members)
    return root
