"""Training, for every family: what drops, what is dropped, and that every parameter gets a gradient."""

import inspect

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from tests.helpers.variants import SMALL
from weft.models.layers import StochasticDepth

every_family = pytest.mark.parametrize(("name", "args"), SMALL.items())


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("vt_resnet_nano", "ce_swin_tiny")])
def test_drop_path_drops_both_branches(name):
    """With everything dropped a block is the identity, for the map and for the class token."""
    model = timm.create_model(name, drop_path_rate=0.1, **SMALL[name]).train()
    *_, block = (m for m in model.modules() if isinstance(getattr(m, "drop_path", None), StochasticDepth | DropPath))
    block.drop_path.drop_prob = 1 - 1e-9
    given = [torch.randn(4, 3, 3, model.num_features), torch.randn(4, 1, model.num_features)]
    if len(inspect.signature(block.forward).parameters) == 2:
        for got, want in zip(block(*given), given, strict=True):
            assert torch.equal(got, want)
    else:
        assert torch.equal(block(given[0]), given[0])


@every_family
def test_every_dropout_is_used(name, args):
    """Each dropout alone makes two passes in training mode differ; without any they agree."""
    model = timm.create_model(name, drop_path_rate=0.0, **args).train()
    picture = torch.randn(4, 3, 32, 32)

    def passes_differ() -> bool:
        outputs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append(model(picture))
        return not torch.equal(*outputs)

    never_dropped = {id(m) for n, m in model.named_modules() if n.startswith("lca.")}
    sites = [(m, "p") for m in model.modules() if isinstance(m, nn.Dropout)]
    sites += [(m, "attn_drop") for m in model.modules() if isinstance(getattr(m, "attn_drop", None), float)]
    for site, attribute in sites:
        setattr(site, attribute, 0.0)
    assert not passes_differ()
    assert len(sites) > 2
    for site, attribute in sites:
        if id(site) not in never_dropped:
            setattr(site, attribute, 0.5)
            assert passes_differ(), site
            setattr(site, attribute, 0.0)


@every_family
@pytest.mark.parametrize("indices", [None, (0,), (0, 1)])
def test_features_only_keeps_no_idle_parameters(name, args, indices):
    """Distributed training refuses parameters without a gradient."""
    extra = {} if indices is None else dict(out_indices=indices)
    model = timm.create_model(name, features_only=True, **args, **extra)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 32, 32))).backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None]
    assert idle == []
