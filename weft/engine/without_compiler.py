"""Training without the import of torch.compile: `torch._dynamo` takes a quarter of the time of all imports.

Timm and torchvision import it for decorators alone, torch's optimisers to tell it that they are not to be compiled.
What stands in for it meanwhile has those decorators, and is exchanged for the real one by whoever asks for more.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

COMPILER = "torch._dynamo"
DISABLED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")  # methods that torch keeps from compilers


@contextlib.contextmanager
def importing_without_compiler() -> Iterator[None]:
    """Imports inside find a stand-in for the compiler, unless it has been imported already."""
    importlib.import_module("torch")  # which sees nothing of this
    if COMPILER in sys.modules:
        yield
        return
    utils = _StandIn(f"{COMPILER}.utils", is_compile_supported=is_compile_supported)
    compiler = _StandIn(COMPILER, disable=disable, assume_constant_result=assume_constant_result, utils=utils)
    sys.modules |= {module.__name__: module for module in (compiler, utils)}
    try:
        yield
    finally:
        _take_away()


class _StandIn(ModuleType):
    """A module of the compiler, of which only decorators have been used so far."""

    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        vars(self).update(contents)

    def __getattr__(self, name: str) -> Any:
        in_package = name == "__path__" and self.__name__ == COMPILER  # somebody imports another module of it
        if name.startswith("__") and not in_package:  # asked of any module, by who looks through all
            raise AttributeError(name)
        _take_away()
        return getattr(importlib.import_module(self.__name__), name)


def _take_away() -> None:
    for name in (COMPILER, f"{COMPILER}.utils"):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


# What the stand-ins have ------------------------------------------------------------------------------------------


def disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """Keeps the compiler from a function as torch does with its own, which imports it at the first call."""
    import torch

    return torch._disable_dynamo(fn, recursive)


def assume_constant_result(fn: Any) -> Any:
    """Marks a function for the compiler, as its own decorator does."""
    fn._dynamo_marked_constant = True
    return fn


def is_compile_supported(device_type: Any) -> bool:
    """The compiler's answer; torchvision asks for it where a sum has to be deterministic."""
    _take_away()
    return importlib.import_module(f"{COMPILER}.utils").is_compile_supported(device_type)


# Optimisers ---------------------------------------------------------------------------------------------------------


@cache
def uncompiled(kind: "type[Optimizer]") -> "type[Optimizer]":
    """The same optimiser, to be used outside of compiled functions: its methods as they are, without their wrappers."""
    import torch

    plain = {name: inspect.unwrap(getattr(kind, name)) for name in DISABLED}
    return type(kind.__name__, (kind,), {**plain, "step": torch.no_grad()(inspect.unwrap(kind.step))})
