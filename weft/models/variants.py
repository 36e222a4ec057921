"""From the tables of a family's file to timm's registry: configurations, entry points, and the models these return."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from timm.models import build_model_with_cfg, register_model, resolve_pretrained_cfg
from torch import nn

from weft.errors import WeftError
from weft.models.base import HybridModel
from weft.models.weights.layouts import filter_published
from weft.models.weights.release import add_released, released, released_args
from weft.words import shell


def weights_cfg(
    size: int = 224, stride: int = 32, *, paper_ids: str, paper_name: str, first_conv: Any, **others: Any
) -> dict[str, Any]:
    """timm's configuration of one published training, at `size` pixels, of a model whose last map is at `stride`.

    `others` are further entries, or others than those that most families have.
    """
    common: dict[str, Any] = dict(
        input_size=(3, size, size),
        pool_size=(size // stride, size // stride),
        crop_pct=0.875,
        interpolation="bicubic",
        first_conv=first_conv,
        classifier="head",
        license="apache-2.0",
        paper_ids=paper_ids,
        paper_name=paper_name,
    )
    return {**common, **others}


def register_variants(create: Callable[[str, bool, dict[str, Any]], nn.Module], variants: dict[str, str]) -> None:
    """Makes and registers a function `name(pretrained=False, **kwargs)` for each variant, with its docstring.

    They belong to the file of `create`, whose `default_cfgs` timm looks up; what comes with the package is added there.
    """
    add_released(sys.modules[create.__module__].default_cfgs)
    for name, docstring in variants.items():
        entry_point = _entry_point(create, name)
        entry_point.__name__ = entry_point.__qualname__ = name
        entry_point.__module__, entry_point.__doc__ = create.__module__, docstring
        setattr(sys.modules[create.__module__], name, register_model(entry_point))


def _entry_point(create: Callable[[str, bool, dict[str, Any]], nn.Module], name: str) -> Callable[..., nn.Module]:
    def entry_point(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(name, pretrained, kwargs)

    return entry_point


def with_first_conv(kwargs: dict[str, Any], name: str | tuple[str, ...]) -> dict[str, Any]:
    """The arguments of an entry point whose switches put another convolution than the default at the picture."""
    if isinstance(kwargs.get("pretrained_cfg"), dict):  # of a saved model, which knows
        return kwargs
    return dict(kwargs, pretrained_cfg_overlay=dict(kwargs.get("pretrained_cfg_overlay") or {}, first_conv=name))


def build(
    model_cls: type[HybridModel],
    variant: str,
    pretrained: bool,
    defaults: dict[str, Any],
    kwargs: dict[str, Any],
    out_indices: tuple[int, ...],
) -> nn.Module:
    """Makes the model of an entry point: timm's builder, fed with the variant's defaults and the caller's wishes.

    The picture size is that of the pretrained configuration: "ceit_tiny.in1k_384" has the positions of 384 pixels.
    """
    cfg = resolve_pretrained_cfg(
        variant, kwargs.get("pretrained_cfg"), dict(kwargs.get("pretrained_cfg_overlay") or {})
    )
    if pretrained and cfg.origin_url and not (cfg.has_weights or cfg.state_dict):
        raise WeftError(
            f"{variant} has no weights on a hub; the authors' files are at {cfg.origin_url}, and"
            f" `{shell('weft', 'convert', 'FILE', '--model', variant, '--out', 'DIR')}` turns them into a model."
        )
    own = [name for name in released() if name.partition(".")[0] == variant]
    if pretrained and own and not (cfg.has_weights or cfg.state_dict):
        raise WeftError(
            f"{variant} has no weights for pictures of all kinds; those of {' and '.join(own)} come with Weft."
        )
    defaults = dict(img_size=cfg.input_size[1:], **defaults)
    kwargs = {**released_args(f"{variant}.{cfg.tag}"), **kwargs}  # which a saved copy then has, too
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_published,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **{**defaults, **kwargs},
    )
    signature = set(inspect.signature(model_cls).parameters) - {"num_classes", "device", "dtype"}
    given = {key: value for key, value in kwargs.items() if key in signature}
    (model if isinstance(model, HybridModel) else model.model).model_args = given
    return model
