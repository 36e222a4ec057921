"""Copies in a run's data: Weft's own hold-out never parts them, and an error names only what the data itself leaks."""

import hashlib
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from tests.data.test_check import photo, save
from weft.config import Config, override
from weft.data.check import headers
from weft.data.sources.open import open_source
from weft.engine.device import World
from weft.errors import WeftError
from weft.run.data import open_data, split_and_check


def make_pictures(root: Path, n: int = 20) -> Path:
    """Two classes; of the first pictures of each there are a copy, one saved smaller, and a mirrored, brighter one."""
    for number, name in enumerate(("cat", "dog")):
        for i in range(n):
            save(root / name / f"{i}.png", photo(100 * number + i))
        for i in range(4):
            first = root / name / f"{i}.png"
            shutil.copy(first, root / name / f"{i} copy.png")
            save(root / name / f"{i} small.jpg", Image.open(first).resize((60, 50)), quality=75)
            mirrored = Image.open(first).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            save(root / name / f"{i} bright.png", ImageEnhance.Brightness(mirrored).enhance(1.1))
    return root


def sides_of(root: Path, config: Config) -> tuple[dict[str, str], list[str]]:
    """Name to side, and what was found."""
    source = open_source(str(root))
    split, report = split_and_check(source, config)
    sides = {source.names[i]: side for side in ("train", "val") for i in getattr(split, side)}
    return sides, [problem.kind for problem in report.problems]


@pytest.mark.parametrize("settings", [{}, {"data.folds": 3, "data.fold": 1}, {"run.seed": 5, "data.val_fraction": 0.4}])
def test_no_picture_that_validates_has_a_copy_that_trains(tmp_path, settings):
    root = make_pictures(tmp_path / "data")
    config = override(Config(), settings)
    sides, found = sides_of(root, config)
    assert len(sides) == 64
    assert {"duplicate", "near-duplicate"} <= {*found}
    assert not {"leak", "near-leak"} & {*found}
    by_bytes = {hashlib.md5((root / name).read_bytes()).hexdigest() + sides[name] for name in sides}
    assert len(by_bytes) == 56  # eight files are equal to others, all of them on the same side
    by_name = {(re.sub(r" .*|\.\w+$", "", name), side) for name, side in sides.items()}
    assert len(by_name) == 40
    share = 1 / 3 if "data.folds" in settings else config.data.val_fraction or 0.2
    assert abs(sum(side == "val" for side in sides.values()) / 64 - share) < 0.1
    assert sides_of(root, config)[0] == sides


def test_of_many_pictures_only_equal_files_are_found(tmp_path, monkeypatch):
    """As docs/data.md says: thumbnails are made where there are at most 5,000 pictures."""
    monkeypatch.setattr(headers, "THUMBED", 60)
    sides, found = sides_of(make_pictures(tmp_path), Config())
    assert "duplicate" in found
    assert "near-duplicate" not in found
    assert all(sides[f"{name}/{i}.png"] == sides[f"{name}/{i} copy.png"] for name in ("cat", "dog") for i in range(4))


def test_the_error_names_what_the_data_itself_leaks(tmp_path):
    """A copy in the data's own test part is an error; copies within what Weft splits are none."""
    root = tmp_path / "my pictures"
    make_pictures(root / "train")
    shutil.copytree(
        root / "train" / "cat", root / "test" / "cat", ignore=lambda _, names: {*names} - {"7.png", "8.png"}
    )
    save(root / "test" / "dog" / "0.png", photo(999))
    config = override(Config(), {"data.source": str(root)})
    with pytest.raises(WeftError) as error:
        open_data(config, World(torch.device("cpu")), lambda line: None)
    text = str(error.value)
    assert text.startswith("2 pictures on more than one side of the split (same bytes)")
    assert "--data.leaks warn" in text
    (command,) = re.findall("`([^`]*)`", text)
    assert shlex.split(command) == ["weft", "check", str(root)]
    said = []
    data = open_data(override(config, {"data.leaks": "warn"}), World(torch.device("cpu")), said.append)
    assert "warning: 2 pictures on more than one side of the split (same bytes): keep one of each." in said
    assert not np.intersect1d(data.split.train, data.split.val).size


def test_the_command_that_shows_a_leak_has_both_sources(tmp_path):
    root, other = make_pictures(tmp_path / "pictures"), tmp_path / "others"
    shutil.copytree(root, other)
    config = override(Config(), {"data.source": str(root), "data.val": str(other)})
    with pytest.raises(WeftError) as error:
        open_data(config, World(torch.device("cpu")), lambda line: None)
    (command,) = re.findall("`([^`]*)`", str(error.value))
    assert shlex.split(command) == ["weft", "check", str(root), "--data.val", str(other)]
