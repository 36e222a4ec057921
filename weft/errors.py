"""The one exception that means "the input is wrong, and here is what to do about it"."""

import difflib
from collections.abc import Collection


class WeftError(ValueError):
    """Bad input, told in one line: what is wrong, where, and what would be right."""


def did_you_mean(word: str, words: Collection[str]) -> str:
    """` Did you mean 'cvt_13'?`, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, words, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises unless `value` is one of `choices`, and then says which values exist.

    The type counts, too: `True` is not the `1` of a list of numbers.
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise WeftError(f"{name}={value!r} does not exist; choose from {', '.join(map(repr, choices))}.")
