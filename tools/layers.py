"""The layers of the package, and every statement in it that names another room.

    python -m tools.layers      # lists the statements that point the wrong way

A room is a folder of `weft` or a module beside them. It may use the rooms of lower layers and itself, never a neighbour
in its own layer or a room above: not in a function either, not for a type alone, and not by a name in a string.
`tests/test_layers.py` keeps this, `tools/rooms.py` draws it, CONTRIBUTING shows both.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "weft"
FACADE = "weft"  # weft/__init__.py: the names for users, which nothing inside imports

# Lowest first; each room with the words that pictures and tables have for it.
LAYERS: tuple[dict[str, str], ...] = (
    {
        "errors": "bad input, told in one line",
        "files": "files that are whole or not there",
        "processes": "forked ones: their start and their end",
        "threads": "how many threads torch computes with",
        "version": "which Weft this is",
        "words": "names and counts in messages",
    },
    {"documents": "YAML and JSON, from anybody"},
    {"config": "every setting, typed and checked"},
    {"kernels": "operations in Triton, each with a plain reference"},  # for data; models import none
    {
        "data": "pictures, labels, masks, boxes: read, check, split, augment",
        "models": "the papers' networks in plain PyTorch, and their weights",
    },
    {
        "heads": "features into classes of pixels, or objects",
        "fast": "fused forms of the models' blocks; recorded launches",
        "catalog": "costs of models, and what the papers report",
    },
    {"report": "pages, charts, overlays, numbers as text"},
    {"tasks": "classify, segment, detect: loss, metrics, prediction, report"},
    # Below run, since `Predictor.explain` is a method of run's Predictor.
    {
        "explain": "attention, saliency, tokens, receptive fields",
        "engine": "the training loop, optimisers, exact resume",
    },
    {"run": "one training from data to report; folders that predict"},
    {
        "study": "many short trainings that are compared; speed",
        "serve": "models on an address, with limits, and the page to try them",
        "export": "files that leave the training machine, each compared with its run",
    },
    {"cli": "the command line"},
    {
        FACADE: "`import weft`: the names for users",
        "__main__": "`python -m weft`",
        "analysis": "the former name of explain",
    },
)

# Calls whose first argument is a module, so that even a bare "weft" or ".name" in them is one.
_BY_NAME = {"import_module", "__import__", "find_spec", "files", "PackageLoader"}


class Reference(NamedTuple):
    """A statement of one room that names another: by an import, or by the name of a module in a string."""

    file: str
    line: int
    origin: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.origin} -> {self.target}"


def find_rooms(package: Path = PACKAGE) -> set[str]:
    """The rooms that are there: folders with Python files, and modules of their own."""
    folders = {path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    modules = {path.stem for path in package.glob("*.py")}
    return folders | (modules - {"__init__"}) | {FACADE}


def find_references(package: Path = PACKAGE) -> list[Reference]:
    """Every reference from one room to another, in the order of files and lines."""
    rooms, found = find_rooms(package), []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        own = FACADE if inside == Path("__init__.py") else inside.parts[0].removesuffix(".py")
        where = ("weft", *inside.parent.parts)
        named = [
            (node.lineno, room)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.stmt | ast.expr)
            for room in _rooms_named(node, where, rooms)
            if room != own
        ]
        file = (Path(package.name) / inside).as_posix()
        found += [Reference(file, line, own, room) for line, room in sorted({*named})]
    return found


def wrong_way(references: list[Reference]) -> list[Reference]:
    """Those that point to a neighbour or upwards."""
    height = {room: k for k, layer in enumerate(LAYERS) for room in layer}
    return [one for one in references if height[one.target] >= height[one.origin]]


def _rooms_named(node: ast.stmt | ast.expr, where: tuple[str, ...], rooms: set[str]) -> Iterator[str]:
    """The rooms of `weft` that one node of a syntax tree names; `where` is the package in which it stands."""
    match node:
        case ast.Import(names=names):
            for name in names:
                yield from _room_of(name.name, rooms)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = _absolute("." * level + (module or ""), where)
            if base == "weft":  # rooms, or names of the façade
                for name in names:
                    yield name.name if name.name in rooms else FACADE
            else:
                yield from _room_of(base, rooms)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *_]) if called in _BY_NAME:
            yield from _room_of(_absolute(_beginning(first), where), rooms)
        case ast.Constant() | ast.JoinedStr():
            text = _beginning(node)
            if re.fullmatch(r"weft\.\w+(\.\w+)*\.?", text) and text.split(".")[1] in rooms:
                yield text.split(".")[1]


def _beginning(node: ast.expr) -> str:
    """The literal text with which a string begins: "weft.data." of f"weft.data.{name}" or "weft.data." + name."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
        case ast.BinOp(left=left):
            return _beginning(left)
    return ""


def _absolute(module: str, where: tuple[str, ...]) -> str:
    """The full name of a module that is given with leading dots, seen from the package `where`."""
    name = module.lstrip(".")
    up = len(module) - len(name)
    return ".".join([*where[: len(where) - up + 1], *filter(None, [name])]) if up else module


def _room_of(module: str, rooms: set[str]) -> Iterator[str]:
    top, *below = module.split(".")
    if top == "weft":
        yield below[0] if below and below[0] in rooms else FACADE


def main() -> None:
    wrong = wrong_way(find_references())
    print("\n".join(map(str, wrong)) or "All references point downwards.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
