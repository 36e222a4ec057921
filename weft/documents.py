"""YAML and JSON: read from files that nobody has vouched for, written so that every program can read them."""

import json
import math
from pathlib import Path
from typing import Any

from weft.errors import WeftError

DEEPEST = 100  # levels; files of Weft's have fewer than ten
MOST_VALUES = 1_000_000  # that a YAML file may stand for: its aliases make a short file very large


class NestedTooDeeply(WeftError):
    """A document that would exhaust the stack of whoever looks into it."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; WeftError where it is none, OSError where it cannot be read."""
    return parse_yaml(read_text(path), path)


def read_json(path: Path) -> Any:
    """The content of a JSON file; WeftError where it is none, OSError where it cannot be read."""
    return parse_json(read_text(path), path)


def parse_yaml(text: str, where: object) -> Any:
    import yaml

    try:
        content = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep(where) from None
    except (yaml.YAMLError, ValueError) as error:  # the latter for a date that no calendar has
        mark = getattr(error, "problem_mark", None)
        raise WeftError(f"{where} is not a valid YAML file{f' (line {mark.line + 1})' if mark else ''}.") from None
    _check_shape(content, where, MOST_VALUES)
    return content


def parse_json(text: str | bytes, where: object) -> Any:
    try:
        content = json.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        line = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise WeftError(f"{where} is not a valid JSON file{line}.") from None
    _check_shape(content, where, None)
    return content


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON as its standard has it: what is no number becomes null."""
    try:
        return json.dumps(content, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(content), indent=indent, allow_nan=False)


def read_text(path: Path) -> str:
    """The text of a file; WeftError where it is none, OSError where it cannot be read."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise WeftError(f"{path} is no file.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise WeftError(f"{path} is not a text file.") from None


def _check_shape(content: Any, where: object, most: int | None) -> None:
    """Raises where lists and mappings lie too deeply within each other or, by aliases, stand for too many values."""
    level, count = [content], 0
    for _ in range(DEEPEST):
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        if not parts:
            return
        count += sum(map(len, parts))
        if most is not None and count > most:
            raise WeftError(f"{where} stands for more than {most:,} values.")
        level = [value for part in parts for value in part if isinstance(value, dict | list)]
    raise _too_deep(where)


def _too_deep(where: object) -> NestedTooDeeply:
    return NestedTooDeeply(f"{where} is nested more than {DEEPEST} levels deep, which nothing that Weft reads is.")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
