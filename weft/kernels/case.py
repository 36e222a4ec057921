"""What a kernel's file says for its measurement: shapes that the models have, and launch parameters worth trying."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = dict[str, int | str | bool]


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    `inputs(device)` makes random arguments; `kernel(*inputs)` and `plain(*inputs)` compute the same from them.
    """

    operation: str  # the name under which `choose` looks up launch parameters
    shape: Shape  # exactly the keys that the launcher gives to `choose`
    inputs: Callable[[torch.device], tuple[Any, ...]]
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    bytes: int  # the fewest that must move: every input read once, every output written once
    flops: int = 0  # multiplications and additions; where matrix units do them
    candidates: Sequence[dict[str, Any]] = field(default_factory=lambda: [{}])  # launch parameters to try
