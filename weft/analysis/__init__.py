"""What a model costs, what it gets right and wrong, and what goes on inside it.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.analysis.attention import (
        Grid,
        LayerAttention,
        Tokens,
        attention_layers,
        attention_of,
        left_out,
        record_attention,
    )

_HOME = {
    "Grid": "attention",
    "LayerAttention": "attention",
    "Tokens": "attention",
    "attention_layers": "attention",
    "attention_of": "attention",
    "left_out": "attention",
    "record_attention": "attention",
}
__all__ = [
    "Grid",
    "LayerAttention",
    "Tokens",
    "attention_layers",
    "attention_of",
    "left_out",
    "record_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.analysis.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
