"""Models whose default arguments were others before: what was trained then opens and resumes as it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors


@dataclass(frozen=True)
class Former:
    key: str  # of a tensor, as it ends
    shape: tuple[int, ...]  # that it has in the former model alone
    args: dict[str, Any]


FORMER = {
    "cvt_13_nas": Former(
        "stages.1.blocks.0.mlp.fc1.weight",
        (768, 192),
        dict(stride_kv=[2, 1, [1] * 7 + [2] * 3], mlp_ratio=[2.0, 4.0, [4.0] * 7 + [2.0] * 3]),
    ),
}


def former_args(name: str, args: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Arguments beside `args` that make a model what it was when the weights in a safetensors file were made."""
    former = FORMER.get(name.split(".")[0])
    if former is None or former.args.keys() & args.keys():
        return {}
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            key = next((key for key in tensors.keys() if key.endswith(former.key)), None)  # noqa: SIM118  no dictionary
            is_former = key is not None and tuple(tensors.get_slice(key).get_shape()) == former.shape
    except (OSError, safetensors.SafetensorError):  # whoever loads the weights will say so
        return {}
    return former.args if is_former else {}
