"""Points timm's own tests/test_models.py, untouched, at Weft's models: `pytest -p tests.helpers.timm_plugin FILE`.

timm's file asks `timm.list_models` for names when it is imported. This plug-in answers with ours, the ones in
WEFT_TIMM_MODELS (space-separated) or all of them.
"""

import os

import timm
import torch
from timm.models._registry import _model_pretrained_cfgs

import weft
from weft.models.registry import FAMILIES

MODELS = os.environ.get("WEFT_TIMM_MODELS", "").split() or weft.list_models()
MODULES = [*FAMILIES]
PICTURE = torch.empty(1, 3, 64, 64, device="meta")
TOKEN_STYLE = {n for n in MODELS if timm.create_model(n, device="meta").forward_features(PICTURE).ndim == 3}
_list_models = timm.list_models


def list_models(
    filter="", module="", pretrained=False, exclude_filters="", name_matches_cfg=False, include_tags=None
) -> list[str]:
    if pretrained:  # would download
        return []
    if isinstance(module, list):  # the two tests of forward_intermediates, for a list of timm's own files
        module = MODULES
    # Models whose forward_features returns (B, N, C) tokens take the test of non-standard configurations instead of the
    # standard one. timm tells the two by lists of name patterns.
    names = {*MODELS}
    if "vit_*" in filter:
        filter, names = "", TOKEN_STYLE
    elif "vit_*" in exclude_filters and include_tags:
        exclude_filters, names = "", names - TOKEN_STYLE
    listed = _list_models(filter, module, False, exclude_filters, name_matches_cfg, include_tags)
    return [name for name in listed if name.split(".")[0] in names]


# timm's file skips the test of a configuration above 320 pixels. Ours hold at any size, so they are tested at 224;
# tests/models/test_models.py has them at their own size.
for cfg in [_model_pretrained_cfgs[name] for name in _list_models(module=MODULES, include_tags=True)]:
    if max(cfg.input_size) > 320:
        cfg.pool_size = tuple(side * 224 // cfg.input_size[1] for side in cfg.pool_size)
        cfg.input_size = (3, 224, 224)


timm.list_models = list_models
timm.list_pretrained = lambda *args, **kwargs: []
