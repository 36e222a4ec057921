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
    from weft.analysis.attention_flow import rollout
    from weft.analysis.invariance import Robustness, robustness
    from weft.analysis.measures import (
        AttentionNumbers,
        Measure,
        attention_distance,
        attention_entropy,
        attention_numbers,
        foreground_attention,
        local_ratio,
        mean_numbers,
    )
    from weft.analysis.similarity import CKA, Similarity, feature_similarity

__all__ = [
    "CKA",
    "AttentionNumbers",
    "Grid",
    "LayerAttention",
    "Measure",
    "Robustness",
    "Similarity",
    "Tokens",
    "attention_distance",
    "attention_entropy",
    "attention_layers",
    "attention_numbers",
    "attention_of",
    "feature_similarity",
    "foreground_attention",
    "left_out",
    "local_ratio",
    "mean_numbers",
    "record_attention",
    "robustness",
    "rollout",
]

_HOME = {
    "AttentionNumbers": "measures",
    "CKA": "similarity",
    "Grid": "attention",
    "LayerAttention": "attention",
    "Measure": "measures",
    "Robustness": "invariance",
    "Similarity": "similarity",
    "Tokens": "attention",
    "attention_distance": "measures",
    "attention_entropy": "measures",
    "attention_layers": "attention",
    "attention_numbers": "measures",
    "attention_of": "attention",
    "feature_similarity": "similarity",
    "foreground_attention": "measures",
    "left_out": "attention",
    "local_ratio": "measures",
    "mean_numbers": "measures",
    "record_attention": "attention",
    "robustness": "invariance",
    "rollout": "attention_flow",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.analysis.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
