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
    from weft.analysis.maps import default_layer
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
    from weft.analysis.receptive import Field, receptive_fields
    from weft.analysis.saliency import grad_cam
    from weft.analysis.similarity import CKA, Similarity, feature_similarity
    from weft.analysis.tokens import TokenMaps, token_maps

__all__ = [
    "CKA",
    "AttentionNumbers",
    "Field",
    "Grid",
    "LayerAttention",
    "Measure",
    "Robustness",
    "Similarity",
    "TokenMaps",
    "Tokens",
    "attention_distance",
    "attention_entropy",
    "attention_layers",
    "attention_numbers",
    "attention_of",
    "default_layer",
    "feature_similarity",
    "foreground_attention",
    "grad_cam",
    "left_out",
    "local_ratio",
    "mean_numbers",
    "receptive_fields",
    "record_attention",
    "robustness",
    "rollout",
    "token_maps",
]

_HOME = {
    "AttentionNumbers": "measures",
    "CKA": "similarity",
    "Field": "receptive",
    "Grid": "attention",
    "LayerAttention": "attention",
    "Measure": "measures",
    "Robustness": "invariance",
    "Similarity": "similarity",
    "TokenMaps": "tokens",
    "Tokens": "attention",
    "attention_distance": "measures",
    "attention_entropy": "measures",
    "attention_layers": "attention",
    "attention_numbers": "measures",
    "attention_of": "attention",
    "default_layer": "maps",
    "feature_similarity": "similarity",
    "foreground_attention": "measures",
    "grad_cam": "saliency",
    "left_out": "attention",
    "local_ratio": "measures",
    "mean_numbers": "measures",
    "receptive_fields": "receptive",
    "record_attention": "attention",
    "robustness": "invariance",
    "rollout": "attention_flow",
    "token_maps": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.analysis' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.analysis.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
