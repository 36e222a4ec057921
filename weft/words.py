"""Names, counts and commands as messages write them: `1 picture`, `a, b and c`, `weft eval 'my run'`."""

import shlex
from collections.abc import Sequence

LONGEST = 300  # characters of a name; file systems have no more than 255 in one


def many(n: int, what: str) -> str:
    """`1 picture`, `3 pictures`, `2 classes`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}{'es' if what.endswith('s') else 's'}"


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else "".join(words)


def some(names: Sequence[str], most: int = 5) -> str:
    """`'a', 'b' and 7 more`; of very long names the ends."""
    ends = (
        name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}...{name[-LONGEST // 2 :]}" for name in names[:most]
    )
    shown = ", ".join(map(repr, ends))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def shell(*words: object) -> str:
    """Words of a command as a shell takes them: `weft train --resume 'my run'`."""
    return shlex.join(map(str, words))


def clean(text: str) -> str:
    """`text` without characters that end the line, move the cursor or turn the direction of writing."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
