"""The one exception that means "the input is wrong, and here is what to do about it", and the checks that raise it."""

import difflib
import math
from collections.abc import Collection
from pathlib import Path


class WeftError(ValueError):
    """Bad input, told in one line: what is wrong, where, and what would be right."""


def did_you_mean(word: str, words: Collection[str]) -> str:
    """` Did you mean 'cvt_13'?`, or nothing when no known word is near."""
    best = nearest(word, words)
    return f" Did you mean {best!r}?" if best else ""


def nearest(word: str, words: Collection[str]) -> str:
    """The known word that was probably meant: one that differs in case alone, else a similar one, else nothing."""
    alike = [other for other in words if other.casefold() == word.casefold()]
    near = alike or difflib.get_close_matches(word, words)  # the nearest first
    return max(near, key=lambda other: _common_letters(word, other), default="")


def _common_letters(a: str, b: str) -> int:
    """How many letters two words share at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_switch(**switches: object) -> None:
    """Raises for a switch that is neither True nor False: a string such as "no" would count as true."""
    for name, value in switches.items():
        check_choice(name, value, (True, False))


def check_positive(**numbers: object) -> None:
    """Raises for anything but a positive whole number."""
    for name, value in numbers.items():
        if type(value) is not int or value <= 0:
            raise WeftError(f"{name}={value!r} is not a positive whole number.")


def check_ratio(**numbers: object) -> None:
    """Raises for anything but a positive number, whole or not."""
    for name, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:  # pyright: ignore[reportOperatorIssue]
            raise WeftError(f"{name}={value!r} is not a positive number.")


def check_widths(dim: int, num_heads: int) -> None:
    check_positive(width=dim, num_heads=num_heads)
    if dim % num_heads:
        raise WeftError(f"num_heads={num_heads!r} does not divide the width {dim!r}.")


def check_rates(**rates: float) -> None:
    """Raises for a rate that is not a probability below 1."""
    for name, value in rates.items():
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise WeftError(f"{name}={value!r} is not a rate; choose a number from 0 up to, but not including, 1.")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises unless `value` is one of `choices`, and then says which values exist.

    The type counts as well: `True` is not the `1` of a list of numbers.
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise WeftError(f"{name}={value!r} does not exist; choose from {', '.join(map(repr, choices))}.")


def check_model_folder(folder: Path) -> None:
    """Raises unless `folder` holds a run or a model."""
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise WeftError(f"{folder} {why}; give a run or model folder.")
    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise WeftError(f"{folder} holds no trained model: {' and '.join(missing)} missing.")


def check_writable(folder: Path) -> None:
    """Raises unless `folder` can be made or is an empty folder: nothing is ever overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeftError(f"{folder} already exists and is not an empty folder; choose another place.")
