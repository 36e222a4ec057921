"""House rules that can be read off the syntax trees; CONTRIBUTING says them in words. `test_layers.py` has one more."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.helpers.places import ROOT

LINES_OF_A_FILE = 550
LINES_OF_A_FUNCTION = 60
TASKS = {"classify", "segment", "detect"}
MAY_ASK_FOR_A_TASK = {"weft/data/sources/open.py", "weft/data/demo.py"}  # where somebody's choice of a task is obeyed
PAPERS_NAMES = {  # what several papers call by one name, in the files of their families
    "Block": "weft/models",
    "Stage": "weft/models",
}

Rule = Callable[[str, str], Iterator[tuple[int, str]]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def long_file(file: str, text: str) -> Iterator[tuple[int, str]]:
    """A file has at most 550 lines."""
    if (lines := text.count("\n")) > LINES_OF_A_FILE:
        yield 1, f"{lines} lines"


def long_function(file: str, text: str) -> Iterator[tuple[int, str]]:
    """A function has at most 60 lines, its docstring aside.

    The signature counts, but for commands, whose arguments are the options of the command line, and for the
    constructors of models, whose arguments are the ablations of the papers. Triton kernels are not looked at.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, Function) or any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            continue
        docstring = ast.get_docstring(node)
        body = node.body[1:] if docstring is not None else node.body
        aside = node.body[0].end_lineno - node.body[0].lineno + 1 if docstring is not None else 0
        command = file.startswith("weft/cli/") and "Parameters\n---" in (docstring or "")
        model = file.startswith("weft/models/") and node.name == "__init__"
        if command or model:
            aside += node.body[0].lineno - node.lineno
        if body and (lines := node.end_lineno - node.lineno + 1 - aside) > LINES_OF_A_FUNCTION:
            yield node.lineno, f"{node.name} has {lines} lines"


def docstring_that_asks(file: str, text: str) -> Iterator[tuple[int, str]]:
    """A docstring begins with a verb or a noun, not with "What ..."."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            docstring = ast.get_docstring(node) or ""
            if docstring.startswith(("What ", "What's ")):
                yield node.body[0].lineno, docstring.split("\n")[0]


def comparison_with_a_task(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Nobody asks which task this is: the task is asked what it can do (`task.can_replay`), or its registry."""
    if file in MAY_ASK_FOR_A_TASK:
        return
    for node in ast.walk(ast.parse(text)):
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            sides = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            sides = node.args
        named = {n.value for side in sides for n in _parts(side) if isinstance(n, ast.Constant)} & TASKS
        if named:
            yield node.lineno, ast.unparse(node)


def test_those_who_may_ask_for_a_task_do(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "MAY_ASK_FOR_A_TASK", set())
    asking = {file for file, text in modules().items() if any(comparison_with_a_task(file, text))}
    assert asking == {"weft/data/sources/open.py", "weft/data/demo.py"}


def print_past_the_door(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Commands print by `say`, `complain`, `say_json` or `OutputFile.write`, which let no escape sequence through."""
    if file.startswith("weft/cli/") and file not in ("weft/cli/options.py", "weft/cli/outputs.py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                yield node.lineno, ast.unparse(node)


def command_without_quotes(file: str, text: str) -> Iterator[tuple[int, str]]:
    """Commands that messages recommend are put together by `shell`, for paths with blanks in them."""
    for node in ast.walk(ast.parse(text)):
        for part, value in pairwise(node.values) if isinstance(node, ast.JoinedStr) else ():
            begun = isinstance(part, ast.Constant) and re.search(r"\bweft [a-z]+ ([\w.-]+ )*$", part.value)
            if begun and isinstance(value, ast.FormattedValue):
                yield node.lineno, begun[0]


def _parts(side: ast.expr) -> list[ast.expr]:
    return side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]


def modules() -> dict[str, str]:
    paths = sorted((ROOT / "weft").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


RULES: dict[str, Rule] = {
    "file": long_file,
    "function": long_function,
    "docstring": docstring_that_asks,
    "task": comparison_with_a_task,
    "print": print_past_the_door,
    "command": command_without_quotes,
}


@pytest.mark.parametrize("name", RULES)
def test_rule_is_kept(name):
    assert [
        f"{file}:{line}: {what}" for file, text in modules().items() for line, what in RULES[name](file, text)
    ] == []


def test_classes_have_names_of_their_own():
    homes = classes(modules())
    shared = {name: places for name, places in homes.items() if len(places) > 1 and not is_paper_name(name, places)}
    assert shared == {}
    assert {*PAPERS_NAMES} <= {name for name, places in homes.items() if len(places) > 1}


def classes(texts: dict[str, str]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(f"{file}:{node.lineno}")
    return homes


def is_paper_name(name: str, places: list[str]) -> bool:
    return name in PAPERS_NAMES and all(Path(place).parent.as_posix() == PAPERS_NAMES[name] for place in places)


def function(lines: int, before: str = "", docstring: str = "") -> str:
    return f'{before}def name(\n    a,\n    b,\n):\n    """{docstring or "Text."}"""\n' + "    a\n" * (lines - 4)


@pytest.mark.parametrize(
    ("name", "file", "text", "line"),
    [
        ("file", "weft/a.py", "a\n" * 551, 1),
        ("function", "weft/a.py", function(61), 1),
        ("function", "weft/a.py", function(61, "@cache\n"), 2),
        ("function", "weft/cli/a.py", function(61), 1),  # no help text: not a command
        ("function", "weft/cli/a.py", function(65, docstring="Run.\n\n    Parameters\n    ----------\n"), 1),
        ("function", "weft/models/a.py", function(65).replace("name", "__init__"), 1),
        ("function", "weft/tasks/a.py", function(61).replace("name", "__init__"), 1),
        ("function", "weft/a.py", "class A:\n    def f(self):\n        def g():\n" + "            a\n" * 60, 3),
        ("docstring", "weft/a.py", '"""What is there."""', 1),
        ("docstring", "weft/a.py", 'def f():\n    """What f does.\n\n    More."""', 2),
        ("docstring", "weft/a.py", 'class A:\n    """What A is."""', 2),
        ("task", "weft/a.py", "a = task == 'detect'", 1),
        ("task", "weft/a.py", "\nif 'segment' != source.task:\n    pass", 2),
        ("task", "weft/a.py", "a = task.name in ('auto', 'classify')", 1),
        ("task", "weft/a.py", "a = task not in {'segment', 'detect'}", 1),
        ("task", "weft/a.py", "match task:\n    case 'segment':\n        pass", 2),
        ("task", "weft/a.py", "match task:\n    case 'x' | 'segment':\n        pass", 2),
        ("task", "weft/a.py", "a = task.startswith('detect')", 1),
        ("print", "weft/cli/a.py", "\nprint(name)", 2),
        ("command", "weft/a.py", "a = f'go on with: weft train --resume {folder}'", 1),
        ("command", "weft/a.py", "a = f'{a}: `weft eval {folder}`'", 1),
    ],
)
def test_rule_finds_what_breaks_it(name, file, text, line):
    faults = [fault for fault, _ in RULES[name](file, text)]
    assert line in faults
    assert len(faults) == 1 + ("class A:\n    def f" in text)  # the function around a long one is as long


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("file", "weft/a.py", "a\n" * 550),
        ("function", "weft/a.py", function(60)),
        ("function", "weft/a.py", function(60, docstring="a\n" * 70)),
        ("function", "weft/cli/a.py", function(64, docstring="Run.\n\n    Parameters\n    ----------\n")),
        ("function", "weft/models/a.py", function(64).replace("name", "__init__")),
        ("function", "weft/kernels/triton/a.py", function(99, "@triton.jit(do_not_specialize=SIZES)\n")),
        ("docstring", "weft/a.py", '"""Whatever there is."""\ntext = "What?"'),
        ("task", "weft/a.py", "a = {'segment': 1}[task]; b = name == 'auto'; c('detect'); d = 'detect'"),
        ("task", "weft/data/demo.py", "a = name == 'detect'"),
        ("print", "weft/cli/a.py", "say(name); console.print(text)"),
        ("command", "weft/a.py", "a = f'{shell(folder)} weft train DATA: {folder}, with weft {version}'"),
    ],
)
def test_rule_leaves_the_rest_alone(name, file, text):
    assert list(RULES[name](file, text)) == []


def test_shared_names_are_found():
    homes = classes({"weft/a.py": "class A:\n    class B: ...", "weft/c.py": "def f():\n    class B: ..."})
    assert homes == {"A": ["weft/a.py:1"], "B": ["weft/a.py:2", "weft/c.py:2"]}
    assert is_paper_name("Block", ["weft/models/cvt.py:1", "weft/models/ceit.py:1"])
    assert not is_paper_name("Block", ["weft/models/cvt.py:1", "weft/data/a.py:1"])
    assert not is_paper_name("B", ["weft/models/cvt.py:1", "weft/models/ceit.py:1"])


def test_scripts_have_short_lines():
    """Lines of the page's scripts are as long as ruff allows Python's."""
    lines = [(file.name, line) for file in ROOT.glob("weft/**/*.js") for line in file.read_text().splitlines()]
    assert lines
    assert [(name, line) for name, line in lines if len(line) > 120] == []
