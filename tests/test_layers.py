"""Imports point one way: from a room to the layers below it, as `tools/layers.py` lists them."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tools import layers
from tools.layers import FACADE, LAYERS, find_references, find_rooms, wrong_way


def test_every_room_has_one_layer():
    listed = Counter(room for layer in LAYERS for room in layer)
    assert {*listed} == find_rooms()
    assert max(listed.values()) == 1


def test_references_point_downwards():
    assert [str(one) for one in wrong_way(find_references())] == []


def test_models_import_no_kernels():
    """Though these lie below them: a family's file is plain PyTorch."""
    assert [str(one) for one in find_references() if (one.origin, one.target) == ("models", "kernels")] == []


def test_models_hardly_ask_for_torchscript():
    """A family's file reads like its paper: what TorchScript alone needs is said in a few places, fewer than 15."""
    files = sorted((Path(layers.__file__).parents[1] / "weft" / "models").rglob("*.py"))
    asked = {file.name: file.read_text().count("is_scripting()") for file in files}
    assert len(files) > 20
    assert sum(asked.values()) < 15, asked


def test_what_the_package_is_known_to_use_is_found():
    """An empty list of wrong references would be no news from a reader that finds nothing."""
    found = {(one.file, one.target) for one in find_references()}
    assert ("weft/__init__.py", "run") in found  # for types, and by name
    assert ("weft/__main__.py", "cli") in found
    assert ("weft/analysis.py", "explain") in found
    pairs = {(one.origin, one.target) for one in find_references()}
    assert {
        ("fast", "kernels"),
        ("data", "kernels"),
        ("heads", "models"),
        ("run", "engine"),
        ("study", "run"),
        ("cli", "study"),
    } <= pairs


def package(folder: Path, files: dict[str, str]) -> Path:
    """A made-up package: the given files, in rooms of which every one has an `__init__.py`."""
    root = folder / "weft"
    for room in ("data", "models/weights", "tasks", "study/cells"):
        (root / room).mkdir(parents=True)
        (root / room / "__init__.py").touch()
    for name in ("__init__", "errors", "config"):
        (root / f"{name}.py").touch()
    for name, text in files.items():
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("import weft.study", "study"),
        ("import os, weft.study.cells as cells", "study"),
        ("from weft.study.cells import run", "study"),
        ("from weft import study", "study"),
        ("from weft import errors, study", "study"),
        ("from ... import study", "study"),
        ("from ...study import cells", "study"),
        ("from ...study.cells import run", "study"),
        ("from weft.data import read", "data"),  # a neighbour in the same layer
        ("def f():\n    from weft.study import cells", "study"),
        ("class A:\n    def f(self):\n        if self:\n            import weft.study.cells", "study"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from weft.study import cells", "study"),
        ("try:\n    import weft.study\nexcept ImportError:\n    pass", "study"),
        ("import importlib\nimportlib.import_module('weft.study.cells')", "study"),
        ("from importlib import import_module\nf = lambda: import_module('weft.study')", "study"),
        ("import_module(f'weft.study.{name}')", "study"),
        ("import_module('weft.study.' + name)", "study"),
        ("import_module('...study.cells', __package__)", "study"),
        ("__import__('weft.study')", "study"),
        ("HOME = {'cells': 'weft.study.cells'}", "study"),
        ("command = [sys.executable, '-m', 'weft.study.cells']", "study"),
        ("jinja2.PackageLoader('weft.study', 'templates')", "study"),
        ("files('weft.study') / 'tables'", "study"),
        ("import weft", FACADE),
        ("from weft import fuse", FACADE),
        ("from weft import *", FACADE),
        ("import_module('weft')", FACADE),
        ("import_module(f'weft.{name}')", FACADE),
        ("files('weft') / 'study'", FACADE),
    ],
)
def test_wrong_references_are_found(statement, target, tmp_path):
    """Each way to name another room, with the line on which it is done."""
    root = package(tmp_path, {"models/weights/file.py": f'"""Docstring."""\n\n{statement}\n'})
    (wrong,) = wrong_way(find_references(root))
    lines = f"\n\n{statement}".splitlines()
    at = max(k for k, line in enumerate(lines, 1) if re.search("weft|study", line))
    assert wrong == ("weft/models/weights/file.py", at, "models", target)
    assert str(wrong) == f"weft/models/weights/file.py:{at}: models -> {target}"


@pytest.mark.parametrize(
    "statement",
    [
        "from weft.errors import WeftError",
        "from weft import config, errors",
        "from weft.models import weights",
        "from . import other",
        "from .other import name",
        "from .. import base",
        "import weft.models.base",
        "import weftstudy, study, torch.study",
        "from study import cells",
        "raise ValueError('weft.study takes a model.')",
        "raise ValueError(f'weft.study({name}) takes a model.')",
        "print('weft')",
        "import_module('torch.' + name)",
        "files('study')",
    ],
)
def test_right_references_are_left_alone(statement, tmp_path):
    root = package(tmp_path, {"models/weights/file.py": f'"""From weft.study."""\n{statement}\n'})
    assert wrong_way(find_references(root)) == []


def test_all_wrong_references_of_a_package_are_listed(tmp_path):
    files = {
        "errors.py": "import weft.config",
        "data/__init__.py": "from weft.models import base\nfrom weft.models import base, weights",
        "tasks/task.py": "from weft.data import read",
        "study/cells/run.py": "from weft.tasks import task",
        "__init__.py": "import weft.study\nimport weft.errors",
    }
    assert [str(one) for one in wrong_way(find_references(package(tmp_path, files)))] == [
        "weft/data/__init__.py:1: data -> models",
        "weft/data/__init__.py:2: data -> models",
        "weft/errors.py:1: errors -> config",
    ]


def test_the_command_lists_them(tmp_path, monkeypatch, capsys):
    root = package(tmp_path, {"errors.py": "import weft.config"})
    monkeypatch.setattr(layers, "find_references", lambda: find_references(root))
    with pytest.raises(SystemExit) as ended:
        layers.main()
    assert ended.value.code == 1
    assert capsys.readouterr().out == "weft/errors.py:1: errors -> config\n"
    (root / "errors.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        layers.main()
    assert ended.value.code == 0
