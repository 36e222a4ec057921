"""Looks inside a model: attention, layers as maps, receptive fields, similarity, robustness.

Nothing is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.explain.attention.capture import (
        Grid,
        LayerAttention,
        Tokens,
        attention_layers,
        attention_of,
        left_out,
        record_attention,
    )
    from weft.explain.attention.measures import (
        AttentionNumbers,
        Measure,
        attention_distance,
        attention_entropy,
        attention_numbers,
        foreground_attention,
        local_ratio,
        mean_numbers,
    )
    from weft.explain.attention.rollout import rollout
    from weft.explain.invariance import Robustness, robustness
    from weft.explain.maps import default_layer
    from weft.explain.receptive import Field, receptive_fields
    from weft.explain.saliency import grad_cam
    from weft.explain.similarity import CKA, Similarity, feature_similarity
    from weft.explain.tokens import TokenMaps, token_maps

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
    "AttentionNumbers": "attention.measures",
    "CKA": "similarity",
    "Field": "receptive",
    "Grid": "attention.capture",
    "LayerAttention": "attention.capture",
    "Measure": "attention.measures",
    "Robustness": "invariance",
    "Similarity": "similarity",
    "TokenMaps": "tokens",
    "Tokens": "attention.capture",
    "attention_distance": "attention.measures",
    "attention_entropy": "attention.measures",
    "attention_layers": "attention.capture",
    "attention_numbers": "attention.measures",
    "attention_of": "attention.capture",
    "default_layer": "maps",
    "feature_similarity": "similarity",
    "foreground_attention": "attention.measures",
    "grad_cam": "saliency",
    "left_out": "attention.capture",
    "local_ratio": "attention.measures",
    "mean_numbers": "attention.measures",
    "receptive_fields": "receptive",
    "record_attention": "attention.capture",
    "robustness": "invariance",
    "rollout": "attention.rollout",
    "token_maps": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.explain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"weft.explain.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
