"""Registers an operation with torch, so that compilers, autocast, checkpointing and DDP know it."""

from collections.abc import Callable
from typing import Any

import torch

from weft.kernels.switch import has_triton, interpreted

LIBRARY = torch.library.Library("weft", "DEF")


def define(
    schema: str,
    plain: Callable[..., Any],
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Makes the operator `weft::<name>` of a `schema` such as "act(Tensor x, str kind) -> Tensor"; returns it.

    Args:
        plain: the twin, used where no GPU is.
        launch: runs the Triton kernels; it imports them itself.
        fake: the outputs' shapes and types, as empty tensors.
        setup, backward: `torch.library.register_autograd`'s; without them there is no gradient.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)

    def run(*args: Any) -> Any:
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in args)
        return launch(*args) if has_triton() and (on_gpu or interpreted()) else plain(*args)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup, lib=LIBRARY)
    return getattr(torch.ops.weft, name).default
