"""What a kernel's file says for its measurement: shapes that the models have, and launch parameters worth trying."""

import importlib
import pkgutil
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


def all_cases() -> tuple[list[Case], list[str]]:
    """The `cases()` of every file in this folder, in a fixed order; and what went wrong in files that are left out."""
    importlib.import_module("weft.models")  # models and kernels import each other, in this order
    package = importlib.import_module("weft.kernels")
    cases: list[Case] = []
    problems: list[str] = []
    for name in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        try:
            module = importlib.import_module(f"weft.kernels.{name}")
            cases += module.cases() if hasattr(module, "cases") else []
        except Exception as error:  # one broken file must not keep the others from being measured
            problems.append(f"{name}.py is left out: {in_a_line(error)}")
    return cases, problems


def in_a_line(error: BaseException) -> str:
    """What an error says and where it was raised, short enough for a table."""
    where, trace = "", error.__traceback__
    while trace is not None:
        where, trace = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}", trace.tb_next
    text = " ".join(str(error).split())
    return f"{type(error).__name__} at {where}: {text if len(text) < 240 else '… ' + text[-240:]}"
