"""Weft: convolutions woven into vision transformers.

`import weft` makes the models known to timm: `timm.create_model("cvt_13")`. It takes milliseconds, because nothing
heavy is imported before it is used; the models are registered at the moment timm itself is imported.
"""

import importlib
import importlib.util
import sys
import threading
from typing import TYPE_CHECKING, Any

from weft.version import __version__ as __version__

if TYPE_CHECKING:
    from weft.errors import WeftError
    from weft.export.export import export
    from weft.fast.fuse import fuse
    from weft.fast.replay import replay
    from weft.fast.swap import fast, plain
    from weft.heads.smp import smp
    from weft.models.registry import create_model, list_models
    from weft.models.weights.convert import convert
    from weft.models.weights.folder import save_model
    from weft.models.weights.host import load_host
    from weft.run.predictor import load
    from weft.run.result import Run
    from weft.run.train import train

__all__ = [
    "Run",
    "WeftError",
    "convert",
    "create_model",
    "export",
    "fast",
    "fuse",
    "list_models",
    "load",
    "load_host",
    "plain",
    "replay",
    "save_model",
    "smp",
    "train",
]

_HOME = {
    "Run": "weft.run.result",
    "WeftError": "weft.errors",
    "convert": "weft.models.weights.convert",
    "create_model": "weft.models.registry",
    "fuse": "weft.fast.fuse",
    "list_models": "weft.models.registry",
    "load": "weft.run.predictor",
    "load_host": "weft.models.weights.host",
    "plain": "weft.fast.swap",
    "replay": "weft.fast.replay",
    "save_model": "weft.models.weights.folder",
    "smp": "weft.heads.smp",
    "train": "weft.run.train",
}


def __getattr__(name: str) -> Any:
    if name in ("models", "fast", "export"):  # packages; the last two are also the functions of their names
        return importlib.import_module(f"weft.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "models"])


class _RegisterBehindTimm(threading.local):
    """Import hook: as soon as timm has been imported, by anybody, our models are registered with it.

    It stays in place until then, because many libraries merely look whether timm exists.
    """

    looking = False  # the search below asks all hooks again, this one included

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "timm" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec("timm")
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            load_timm = spec.loader.exec_module

            def load_timm_then_weft(module: Any) -> None:
                load_timm(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                importlib.import_module("weft.models")

            spec.loader.exec_module = load_timm_then_weft
        return spec


if "timm" in sys.modules:
    importlib.import_module("weft.models")
elif not any(type(hook).__name__ == _RegisterBehindTimm.__name__ for hook in sys.meta_path):
    sys.meta_path.insert(0, _RegisterBehindTimm())
