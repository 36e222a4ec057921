"""torch.compile: what older versions of torch need."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.torch_version import TorchVersion

from weft.engine import compiling


def test_torch_is_mended_where_it_has_the_fault(monkeypatch):
    class CantSplit(Exception):
        def __init__(self, expr: Any, remaining: Any) -> None:
            super().__init__()

    compiling.add_defaults(SimpleNamespace())  # a torch that has no such thing
    compiling.add_defaults(SimpleNamespace(CantSplit=ValueError))
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(
        compiling.importlib, "import_module", lambda name: seen.append(name) or SimpleNamespace(CantSplit=CantSplit)
    )
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0"))
    compiling.compile_model(torch.nn.Identity())
    assert not seen
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu128"))
    compiling.compile_model(torch.nn.Identity())
    assert seen
    CantSplit()  # pyright: ignore[reportCallIssue]
