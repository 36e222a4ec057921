"""The name that `weft.explain` had before 0.1.0, for code that still asks for it."""

from typing import Any

from weft import explain


def __getattr__(name: str) -> Any:
    return getattr(explain, name)
