"""Each switch does what it says: looked at in the network, or computed again by hand."""

import inspect

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import nn

from tests.conftest import randomise
from tests.helpers.variants import CEIT, CVT, SMALL
from weft.models import cvt
from weft.models.ceit import LeFF
from weft.models.layers import ConvNorm, StochasticDepth

# CvT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "stages"), [("none", []), ("first", [0]), ("last", [2]), ("every", [0, 1, 2])])
def test_cvt_position_embeddings(where, stages):
    model = randomise(timm.create_model("cvt_nano", pos_embed=where, **CVT))
    assert [i for i, stage in enumerate(model.stages) if stage.pos_embed is not None] == stages
    picture = torch.randn(1, 3, 64, 64)
    before = model.forward_intermediates(picture, intermediates_only=True)
    with torch.no_grad():
        for i in stages:
            model.stages[i].pos_embed.grid.add_(1 + torch.rand_like(model.stages[i].pos_embed.grid))
    after = model.forward_intermediates(picture, intermediates_only=True)
    changed = [i for i in range(3) if not torch.allclose(before[i], after[i])]
    assert changed == (list(range(stages[0], 3)) if stages else [])


@pytest.mark.parametrize(("kind", "kernels"), [("conv", [7, 3, 3]), ("patch", [4, 2, 2])])
def test_cvt_embeddings(kind, kernels):
    convs = [stage.embed.proj for stage in timm.create_model("cvt_13", embed=kind, device="meta").stages]
    assert [c.kernel_size[0] for c in convs] == kernels
    assert [c.stride[0] for c in convs] == [4, 2, 2]
    assert [c.padding[0] for c in convs] == ([2, 1, 1] if kind == "conv" else [0, 0, 0])


def test_cvt_nas_is_candidate_a():
    """Stage 1 narrow; stage 2 and seven blocks of stage 3 wide with full keys; the last three narrow."""
    blocks = [block for stage in timm.create_model("cvt_13_nas", device="meta").stages for block in stage.blocks]
    strides = [block.attn.conv_proj_k.conv.stride[0] for block in blocks]
    assert strides == [block.attn.conv_proj_v.conv.stride[0] for block in blocks]
    assert strides == [2] + [1, 1] + [1] * 7 + [2] * 3
    assert [b.mlp.fc1.out_features // b.mlp.fc1.in_features for b in blocks] == [2] + [4, 4] + [4] * 7 + [2] * 3
    assert {block.attn.conv_proj_q.conv.stride[0] for block in blocks} == {1}


def test_cvt_projection_per_stage():
    model = timm.create_model("cvt_nano", projection=("conv", "avg", "linear"), **CVT)
    kinds = [[type(m) for m in (s.blocks[0].attn.conv_proj_q, s.blocks[0].attn.conv_proj_k)] for s in model.stages]
    assert kinds == [[ConvNorm, ConvNorm], [nn.Identity, cvt.AvgProjection], [nn.Identity, nn.Identity]]


# CeiT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("layers", "convs", "pools"),
    [
        ("none", [], 0),
        ("k7s4", [(7, 4)], 0),
        ("k5s4", [(5, 4)], 0),
        ("k3s2+k3s2", [(3, 2), (3, 2)], 0),
        ("k7s2+maxpool", [(7, 2)], 1),
    ],
)
def test_i2t_rows_of_table_5(layers, convs, pools, norm):
    """The stem computed again from its weights, layer by layer."""
    model = randomise(timm.create_model("ceit_tiny", i2t_layers=layers, i2t_norm=norm, i2t_channels=32))
    picture = torch.randn(2, 3, 64, 48)
    if not convs:
        assert model.stem is None
        assert model.proj.kernel_size == (16, 16)
        assert model.pretrained_cfg["first_conv"] == "proj"
        return
    x = picture
    assert [(c.conv.kernel_size[0], c.conv.stride[0]) for c in model.stem.convs] == convs
    for layer, (kernel, stride) in zip(model.stem.convs, convs, strict=True):
        x = F.conv2d(x, layer.conv.weight, None, stride, kernel // 2)
        assert isinstance(layer.bn, nn.BatchNorm2d) == norm
        if norm:
            bn = layer.bn
            x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)
    for _ in range(pools):
        x = F.max_pool2d(x, 3, 2, 1)
    assert x.shape == (2, 32, 16, 12)
    stem = model.forward_intermediates(picture, indices=[0], intermediates_only=True)[0]
    torch.testing.assert_close(stem, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("final_act", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kernel", [0, 1, 3, 5])
def test_leff_rows_of_table_7(kernel, norm, final_act):
    """Equations 6 to 11 on an NCHW map; the class token passes by, unless nothing is local any more."""
    leff = randomise(LeFF(6, 24, kernel, norm, final_act))
    x, cls = torch.randn(2, 5, 4, 6), torch.randn(2, 1, 6)

    def batch_norm(bn, y):
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias) if norm else y

    def linear(m, y):
        return batch_norm(m.bn, F.conv2d(y, m.linear.weight[:, :, None, None], m.linear.bias))

    def equations(y):
        y = F.gelu(linear(leff.linear1, y))
        if kernel:
            conv = leff.dwconv.conv
            y = F.conv2d(y, conv.weight, conv.bias, padding=kernel // 2, groups=24)
            y = F.gelu(batch_norm(leff.dwconv.bn, y))
        y = linear(leff.linear2, y)
        return F.gelu(y) if final_act else y

    got_map, got_cls = leff(x, cls)
    torch.testing.assert_close(got_map.permute(0, 3, 1, 2), equations(x.permute(0, 3, 1, 2)), rtol=1e-4, atol=1e-5)
    expected_cls = cls if kernel else equations(cls.transpose(1, 2).unsqueeze(-1)).squeeze(-1).transpose(1, 2)
    torch.testing.assert_close(got_cls, expected_cls, rtol=1e-4, atol=1e-5)


def test_without_lca_the_last_class_token_is_read():
    model = randomise(timm.create_model("ceit_nano", lca=False, num_classes=0, **CEIT))
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output[1]))
    pooled = model(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(pooled, model.norm(seen[0])[:, 0])


def test_plain_feed_forward_is_initialised_as_deit():
    args = dict(i2t_layers="none", leff_kernel=0, leff_norm=False, lca=False)
    linear = timm.create_model("ceit_tiny", **args).blocks[0].leff.linear1.linear
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not linear.bias.any()


# Training -------------------------------------------------------------------------------------------------------

FAMILIES = [*SMALL.items()]


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


@pytest.mark.parametrize(("name", "args"), FAMILIES)
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


def test_dropout_rates_arrive():
    rates = dict(drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    model = timm.create_model("cvt_nano", **CVT, **rates)
    block = model.stages[1].blocks[0]
    assert model.head_drop.p == 0.1
    assert {model.stages[0].drop.p, block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p} == {0.2}
    assert block.attn.attn_drop == 0.3
    model = timm.create_model("ceit_nano", **CEIT, **rates, pos_drop_rate=0.4)
    block = model.blocks[0]
    assert (model.head_drop.p, model.pos_drop.p) == (0.1, 0.4)
    assert (block.attn.proj_drop.p, block.attn.attn_drop.p) == (0.2, 0.3)


@pytest.mark.parametrize(("name", "args"), FAMILIES)
@pytest.mark.parametrize("indices", [None, (0,), (0, 1)])
def test_features_only_keeps_no_idle_parameters(name, args, indices):
    """Distributed training refuses parameters without a gradient."""
    extra = {} if indices is None else dict(out_indices=indices)
    model = timm.create_model(name, features_only=True, **args, **extra)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 32, 32))).backward()
    idle = [n for n, p in model.named_parameters() if p.grad is None]
    assert idle == []
