"""Compiling kernels before they are needed, many at a time: a model has a hundred or so, and each takes a second."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from weft.kernels.switch import has_triton, interpreted, kernels_are_on


def compile_ahead(rehearse: Callable[[], Any], workers: int = os.cpu_count() or 1) -> None:
    """Compiles all kernels that `rehearse` would launch, on `workers` cores at once; Triton keeps them for next time.

    It launches none: what `rehearse` computes means nothing, and the caller has to undo what it changes. A kernel that
    cannot be compiled is left to the launch that needs it, which says why.
    """
    if not (torch.cuda.is_available() and kernels_are_on() and has_triton()) or interpreted():
        return
    import triton

    from weft.kernels.gpu import launch

    token = launch.rehearsing.set(True)
    try:
        with (
            ThreadPoolExecutor(workers) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),  # both are this thread's
        ):
            rehearse()
    finally:
        launch.rehearsing.reset(token)
