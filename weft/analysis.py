"""The former name of `weft.explain`, for code that still asks for it."""

from typing import Any

from weft import explain
from weft.explain import __all__ as __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:  # __path__ among them: this is no package, else its modules would be loaded twice
        raise AttributeError(f"module 'weft.analysis' has no attribute {name!r}; it is weft.explain now")
    return getattr(explain, name)


def __dir__() -> list[str]:
    return sorted(__all__)
