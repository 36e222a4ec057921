"""CeiT: against the released network written plainly, every switch computed again by hand, and its traits."""

import argparse
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import weft
from tests.conftest import randomise
from tests.helpers.by_hand import Weights, attend, batch_norm, enlarge, layer_norm, linear, under
from tests.helpers.published import OfficialCeiT
from tests.helpers.variants import CEIT, SWITCHES
from weft.models import ceit
from weft.models.layers import StochasticDepth
from weft.models.weights.layouts import filter_published

CEIT_SWITCHES = {key: args for key, (name, args) in SWITCHES.items() if name == "ceit_nano"}
STEMS = {  # table 5: kernels and strides of the convolutions, and of the pooling behind them
    "none": ([], None),
    "k7s4": ([(7, 4)], None),
    "k5s4": ([(5, 4)], None),
    "k3s2+k3s2": ([(3, 2), (3, 2)], None),
    "k7s2+maxpool": ([(7, 2)], 2),
}


@pytest.fixture(scope="module")
def official():
    torch.manual_seed(0)
    return randomise(OfficialCeiT(192, 3, img_size=96, classes=10))


# The released network ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dim", "heads", "size"), [("ceit_tiny", 192, 3, 224), ("ceit_small", 384, 6, 96)])
def test_equals_the_released_network(name, dim, heads, size):
    theirs = randomise(OfficialCeiT(dim, heads, img_size=size, classes=10))
    ours = weft.convert(theirs.state_dict(), model=name)
    picture = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=2e-5)


def test_gradients_equal_the_released_network():
    """In training mode and float64: batch statistics and every parameter."""
    theirs = OfficialCeiT(32, 2, depth=3, img_size=48, classes=5).double().train()
    args = dict(embed_dim=32, num_heads=2, depth=3, img_size=48, num_classes=5, drop_path_rate=0.0)
    ours = timm.create_model("ceit_tiny", dtype=torch.float64, **args).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(3, 3, 48, 48, dtype=torch.float64)
    for model in (theirs, ours):
        model(picture).square().sum().backward()
    expected = filter_published({name: p.grad for name, p in theirs.named_parameters()}, ours)
    assert expected.keys() == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("wrapper", ["model", "model_ema", "module", "flat"])
def test_official_files(official, wrapper, tmp_path):
    """DeiT's trainer writes them: the averaged weights win, prefixes go, the size is read off the positions."""
    state = official.state_dict()
    wrong = {key: torch.zeros_like(value) for key, value in state.items()}
    content = {
        "model": {"model": state, "epoch": 3, "args": argparse.Namespace(lr=1e-3)},
        "model_ema": {"model": wrong, "model_ema": state, "optimizer": {"state": {}}},
        "module": {"model": {f"module.{key}": value for key, value in state.items()}},
        "flat": state,
    }[wrapper]
    torch.save(content, tmp_path / "ceit.pth")
    model = weft.convert(tmp_path / "ceit.pth", model="ceit_tiny")
    picture = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(model(picture), official(picture), rtol=0, atol=2e-5)
    assert model.pos_embed.grid.shape == (6, 6, 192)


def test_positions_are_resized_on_the_way_in(official, tmp_path):
    """Fine-tuning at another size: timm's file overlay, our filter, bicubic positions, the class token's as it was."""
    torch.save({"model": official.state_dict()}, tmp_path / "ceit.pth")
    overlay = dict(file=str(tmp_path / "ceit.pth"), num_classes=10)
    model = timm.create_model("ceit_tiny", pretrained=True, pretrained_cfg_overlay=overlay, img_size=(160, 128))
    grid = official.pos_embed[:, 1:].reshape(1, 6, 6, 192).permute(0, 3, 1, 2)
    expected = F.interpolate(grid, size=(10, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(model.pos_embed.grid, expected[0].permute(1, 2, 0))
    assert torch.equal(model.pos_embed.cls, official.pos_embed[:, :1])


def test_without_its_convolutions_it_is_deit():
    """I2T, LeFF's convolution and LCA switched off: timm's DeiT-T, weight for weight."""
    deit = randomise(timm.create_model("deit_tiny_patch16_224", num_classes=10))
    ours = timm.create_model(
        "ceit_tiny", num_classes=10, i2t_layers="none", leff_kernel=0, leff_norm=False, lca=False
    ).eval()
    state = {}
    for key, value in deit.state_dict().items():
        key = key.replace("patch_embed.proj", "proj").replace("mlp.fc", "leff.linear")
        key = key.replace("leff.linear1.", "leff.linear1.linear.").replace("leff.linear2.", "leff.linear2.linear.")
        state[key] = value
    positions = state.pop("pos_embed")
    state["pos_embed.cls"], state["pos_embed.grid"] = positions[:, :1], positions[0, 1:].view(14, 14, -1)
    ours.load_state_dict(state)
    picture = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), deit(picture), rtol=0, atol=1e-5)


# Switches, by hand ------------------------------------------------------------------------------------------------


normed = partial(layer_norm, eps=1e-6)


def stem_by_hand(x: Tensor, w: Weights, layers: str, norm: bool, stride: int) -> Tensor:
    """Eq. 4. A smaller stride is taken from the first layers first; nothing is activated."""
    convs, pool = STEMS[layers]
    strides = [s for _, s in convs] + ([pool] if pool else [])
    for i, own in enumerate(strides):
        while strides[i] > 1 and torch.tensor(strides).prod() > stride:
            strides[i] //= 2
        assert strides[i] <= own
    for i, (kernel, _) in enumerate(convs):
        x = F.conv2d(x, w[f"stem.convs.{i}.conv.weight"], None, strides[i], kernel // 2)
        x = batch_norm(x, w, f"stem.convs.{i}.bn", norm)
    return F.max_pool2d(x, 3, strides[-1], 1) if pool else x


def leff_by_hand(x: Tensor, w: Weights, name: str, kernel: int, norm: bool, final_act: bool) -> Tensor:
    """Eqs. 6 to 10 on a (B, C, H, W) map."""

    def pointwise(x: Tensor, which: str) -> Tensor:
        weight, bias = w[f"{name}.{which}.linear.weight"], w[f"{name}.{which}.linear.bias"]
        return batch_norm(F.conv2d(x, weight[:, :, None, None], bias), w, f"{name}.{which}.bn", norm)

    x = F.gelu(pointwise(x, "linear1"))
    if kernel:
        weight, bias = w[f"{name}.dwconv.conv.weight"], w[f"{name}.dwconv.conv.bias"]
        assert weight.shape[2:] == (kernel, kernel)
        x = F.conv2d(x, weight, bias, padding=kernel // 2, groups=x.shape[1])
        x = F.gelu(batch_norm(x, w, f"{name}.dwconv.bn", norm))
    x = pointwise(x, "linear2")
    return F.gelu(x) if final_act else x


def lca_by_hand(class_tokens: Tensor, w: Weights, heads: int) -> Tensor:
    """Section 3.4: the last of the (B, L, C) class tokens asks all of them, itself included. (B, C)."""
    x = class_tokens + w["lca.pos_layer_embed"]
    y = normed(x, w, "lca.norm1")
    q, (k, v), head_width = linear(y[:, -1:], w, "lca.q"), linear(y, w, "lca.kv").chunk(2, -1), x.shape[2] // heads
    last = x[:, -1:] + linear(attend(q, k, v, heads, scale=head_width**-0.5), w, "lca.proj")
    hidden = F.gelu(linear(normed(last, w, "lca.norm2"), w, "lca.feedforward.fc1"))
    return (last + linear(hidden, w, "lca.feedforward.fc2"))[:, 0]


def run_by_hand(
    model: nn.Module,
    x: Tensor,
    *,
    embed_dim: int,
    depth: int,
    num_heads: int,
    i2t_channels: int,
    stem_stride: int = 1,  # of ceit_nano
    i2t_layers: str = "k7s2+maxpool",
    i2t_norm: bool = True,
    leff_kernel: int = 3,
    leff_norm: bool = True,
    leff_final_act: bool = False,
    lca: bool = True,
    global_pool: str = "token",
) -> Tensor:
    """Logits of a CeiT from nothing but its weights and the switches it was made with, in evaluation mode."""
    w = model.state_dict()
    patch = 4
    if i2t_layers == "none":
        patch = 4 * stem_stride
    else:
        x = stem_by_hand(x, w, i2t_layers, i2t_norm, stem_stride)
        assert x.shape[1] == i2t_channels
    x = F.conv2d(F.pad(x, (0, -x.shape[3] % patch, 0, -x.shape[2] % patch)), w["proj.weight"], w["proj.bias"], patch)
    batch, _, height, width = x.shape
    tokens = torch.cat([w["cls_token"].expand(batch, -1, -1), x.flatten(2).transpose(1, 2)], dim=1)
    tokens = tokens + torch.cat([w["pos_embed.cls"], w["pos_embed.grid"].flatten(0, 1)[None]], dim=1)
    class_tokens = []
    for i in range(depth):
        block = f"blocks.{i}"
        y = normed(tokens, w, f"{block}.norm1")
        q, k, v = linear(y, w, f"{block}.attn.qkv").chunk(3, dim=-1)
        tokens = tokens + linear(
            attend(q, k, v, num_heads, scale=(embed_dim // num_heads) ** -0.5), w, f"{block}.attn.proj"
        )
        y = normed(tokens, w, f"{block}.norm2")
        settings = (w, f"{block}.leff", leff_kernel, leff_norm, leff_final_act)
        if leff_kernel:  # the class token passes by, but as the norm left it
            local = leff_by_hand(y[:, 1:].transpose(1, 2).reshape(batch, embed_dim, height, width), *settings)
            y = torch.cat([y[:, :1], local.flatten(2).transpose(1, 2)], dim=1)
        else:
            y = leff_by_hand(y.transpose(1, 2)[..., None], *settings)[..., 0].transpose(1, 2)
        tokens = tokens + y
        class_tokens.append(tokens[:, 0])
    if lca:
        tokens = torch.cat([lca_by_hand(torch.stack(class_tokens, 1), w, num_heads)[:, None], tokens[:, 1:]], dim=1)
    tokens = normed(tokens, w, "norm")
    return linear(tokens[:, 0] if global_pool == "token" else tokens[:, 1:].mean(1), w, "head")


@pytest.mark.parametrize("args", CEIT_SWITCHES.values(), ids=CEIT_SWITCHES)
def test_every_switch(args):
    """At a size that is not square and that a patch does not divide."""
    model = enlarge(timm.create_model("ceit_nano", num_classes=5, img_size=(36, 58), **args))
    picture = torch.randn(2, 3, 36, 58)
    with torch.no_grad():
        torch.testing.assert_close(model(picture), run_by_hand(model, picture, **args), rtol=1e-4, atol=1e-4)


def test_every_switch_has_a_variant():
    """What `test_every_switch` runs over changes each argument but sizes and rates, which have tests below."""
    arguments = {name for args in CEIT_SWITCHES.values() for name in args}
    rates = {f"{kind}drop_rate" for kind in ("", "pos_", "proj_", "attn_")} | {"drop_path_rate"}
    known = set(ceit.CeiT.__init__.__annotations__) - {"device", "dtype", "return"}
    assert known - arguments == {"img_size", "in_chans", "num_classes", "mlp_ratio", *rates}


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("layers", STEMS)
def test_i2t_rows_of_table_5(layers, stride, norm):
    """The stem computed again from its weights, layer by layer, at every stride."""
    args = dict(i2t_layers=layers, i2t_norm=norm, i2t_channels=32, stem_stride=stride)
    model = randomise(timm.create_model("ceit_tiny", img_size=64, depth=1, **args))
    if layers == "none":
        assert model.stem is None
        assert model.proj.kernel_size == model.proj.stride == (4 * stride,) * 2
        assert model.pretrained_cfg["first_conv"] == "proj"
        return
    picture = torch.randn(2, 3, 64, 48)
    expected = stem_by_hand(picture, model.state_dict(), layers, norm, stride)
    assert expected.shape == (2, 32, 64 // stride, 48 // stride)
    stem = model.forward_intermediates(picture, indices=[0], intermediates_only=True)[0]
    torch.testing.assert_close(stem, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "stride", "strides"),
    [
        ("k7s4", 2, [2]),
        ("k3s2+k3s2", 4, [2, 2]),
        ("k3s2+k3s2", 2, [1, 2]),
        ("k3s2+k3s2", 1, [1, 1]),
        ("k7s2+maxpool", 4, [2, 2]),
        ("k7s2+maxpool", 2, [1, 2]),
        ("k7s2+maxpool", 1, [1, 1]),
    ],
)
def test_smaller_strides_are_taken_from_the_first_layers(layers, stride, strides):
    stem = timm.create_model("ceit_nano", device="meta", i2t_layers=layers, stem_stride=stride).stem
    found = [layer.conv.stride[0] for layer in stem.convs]
    assert found + ([stem.pool.stride] if layers.endswith("maxpool") else []) == strides


@pytest.mark.parametrize("final_act", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kernel", [0, 1, 3, 5])
def test_leff_rows_of_table_7(kernel, norm, final_act):
    """The class token passes by, unless nothing is local any more."""
    leff = enlarge(ceit.LeFF(6, 24, kernel, norm, final_act))
    x, cls = torch.randn(2, 5, 4, 6), torch.randn(2, 1, 6)
    settings = (under("leff", leff), "leff", kernel, norm, final_act)
    got_map, got_cls = leff(x, cls)
    expected = leff_by_hand(x.permute(0, 3, 1, 2), *settings)
    torch.testing.assert_close(got_map.permute(0, 3, 1, 2), expected, rtol=1e-4, atol=1e-5)
    if kernel:
        assert torch.equal(got_cls, cls)
    else:
        expected_cls = leff_by_hand(cls.transpose(1, 2).unsqueeze(-1), *settings).squeeze(-1).transpose(1, 2)
        torch.testing.assert_close(got_cls, expected_cls, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_lca(heads):
    layer, class_tokens = enlarge(ceit.LCA(8, 5, heads, 32)), torch.randn(3, 5, 8)
    expected = lca_by_hand(class_tokens, under("lca", layer), heads)
    torch.testing.assert_close(layer(class_tokens)[:, 0], expected, rtol=1e-4, atol=1e-5)


def test_without_lca_the_last_class_token_is_read():
    model = randomise(timm.create_model("ceit_nano", lca=False, num_classes=0, **CEIT))
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(output[1]))
    pooled = model(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(pooled, model.norm(seen[0])[:, 0])


@pytest.mark.parametrize("ratio", [2.0, 3.5])
def test_mlp_ratio_is_that_of_leff_and_of_lca(ratio):
    model = timm.create_model("ceit_nano", mlp_ratio=ratio, **CEIT)
    assert {block.leff.dwconv.conv.out_channels for block in model.blocks} == {int(32 * ratio)}
    assert model.lca.feedforward.fc1.out_features == int(32 * ratio)


def test_dropout_rates_arrive():
    rates = dict(drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, pos_drop_rate=0.4)
    model = timm.create_model("ceit_nano", **CEIT, **rates)
    assert (model.head_drop.p, model.pos_drop.p) == (0.1, 0.4)
    for block in model.blocks:
        assert (block.attn.proj_drop.p, block.attn.attn_drop.p) == (0.2, 0.3)


# The released code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dim", "heads"), [("ceit_tiny", 192, 3), ("ceit_small", 384, 6), ("ceit_base", 768, 12)]
)
def test_variants_of_table_1(name, dim, heads):
    model = timm.create_model(name, device="meta")
    assert (model.num_features, len(model.blocks)) == (dim, 12)
    assert {block.attn.num_heads for block in model.blocks} == {model.lca.num_heads} == {heads}
    assert {block.leff.dwconv.conv.out_channels for block in model.blocks} == {4 * dim}
    assert {block.leff.dwconv.conv.kernel_size for block in model.blocks} == {(3, 3)}
    drops = [block.drop_path.drop_prob for block in model.blocks]
    assert drops == pytest.approx([0.1 * i / 11 for i in range(12)])


@pytest.mark.parametrize(("name", "buffers"), [("ceit_tiny", 41_637), ("ceit_small", 83_109), ("ceit_base", 166_053)])
def test_buffers_of_the_batch_norms(name, buffers):
    assert sum(b.numel() for b in timm.create_model(name, device="meta").buffers()) == buffers


def test_stem_has_64_channels_no_bias_and_no_activation():
    """The paper says 32; the counts and the checkpoints say 64."""
    stem = timm.create_model("ceit_tiny", device="meta").stem
    conv, pool = stem.convs[0], stem.pool
    assert (conv.conv.out_channels, conv.conv.kernel_size, conv.conv.stride) == (64, (7, 7), (2, 2))
    assert conv.conv.bias is None
    assert conv.act == "none"
    assert pool.stride == 2


def test_class_token_is_updated_by_its_own_norm():
    """LeFF returns it as it came, but what came is LN2(x): the update is x + LN2(x), not x."""
    block = randomise(timm.create_model("ceit_nano", **CEIT)).blocks[0]
    nn.init.zeros_(block.attn.proj.weight)
    nn.init.zeros_(block.attn.proj.bias)
    x, cls = torch.randn(2, 3, 4, 32), torch.randn(2, 1, 32)
    torch.testing.assert_close(block(x, cls)[1], cls + block.norm2(cls))


def test_lca_never_drops_its_path():
    rates = dict(drop_path_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5)
    model = timm.create_model("ceit_nano", **CEIT, **rates).train()
    assert not any(isinstance(m, StochasticDepth | DropPath) for m in model.lca.modules())
    class_tokens = torch.randn(8, 3, 32)
    assert torch.equal(model.lca(class_tokens), model.lca(class_tokens))


def test_layer_embedding_starts_from_zeros_and_decays():
    """Positions and class token are spared by weight decay; the layer embedding of LCA, a matrix, is not."""
    model = timm.create_model("ceit_nano", **CEIT)
    assert not model.lca.pos_layer_embed.any()
    nn.init.normal_(model.lca.pos_layer_embed)
    model.init_weights()
    assert not model.lca.pos_layer_embed.any()
    spared, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    spared, decayed = ({id(p) for p in group["params"]} for group in (spared, decayed))
    assert {id(model.cls_token), id(model.pos_embed.grid), id(model.pos_embed.cls)} <= spared
    assert {id(model.lca.pos_layer_embed), id(model.head.weight)} <= decayed


def test_norms_add_1e_6():
    norms = [m for m in timm.create_model("ceit_nano", **CEIT).modules() if isinstance(m, nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-6}


def test_initialisation_is_that_of_the_released_code():
    """Truncated-normal linear layers with zero bias; convolutions, LeFF's 1x1 ones among them, as torch has them."""
    model = timm.create_model("ceit_tiny")
    block = model.blocks[0]
    for layer in (block.attn.qkv, block.attn.proj, model.lca.kv, model.lca.feedforward.fc1, model.head):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not layer.bias.any()
    for layer in (model.stem.convs[0].conv, model.proj, block.leff.linear1.linear, block.leff.dwconv.conv):
        bound = layer.weight[0].numel() ** -0.5  # kaiming-uniform with a = sqrt(5)
        assert bound * 0.95 < layer.weight.abs().max().item() <= bound
        assert layer.bias is None or layer.bias.any()
    for parameter in (model.cls_token, model.pos_embed.grid, model.pos_embed.cls):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.2)


def test_plain_feed_forward_is_initialised_as_deit():
    args = dict(i2t_layers="none", leff_kernel=0, leff_norm=False, lca=False)
    layer = timm.create_model("ceit_tiny", **args).blocks[0].leff.linear1.linear
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not layer.bias.any()


def test_positions_follow_the_picture():
    """Another size than that of the model: the grid resized bicubically, the class token's position as it is."""
    model = randomise(timm.create_model("ceit_nano", img_size=32, num_classes=5, **CEIT))
    other = timm.create_model("ceit_nano", img_size=(48, 40), num_classes=5, **CEIT).eval()
    state = model.state_dict()
    grid = F.interpolate(state["pos_embed.grid"].permute(2, 0, 1)[None], size=(12, 10), mode="bicubic")
    other.load_state_dict({**state, "pos_embed.grid": grid[0].permute(1, 2, 0)})
    picture = torch.randn(2, 3, 48, 40)
    with torch.no_grad():
        torch.testing.assert_close(model(picture), other(picture), rtol=1e-5, atol=1e-5)


def test_default_features():
    """The stem at stride 4, the ends of the thirds of the encoder at stride 16."""
    features = timm.create_model("ceit_tiny", features_only=True, device="meta")
    assert features.feature_info.reduction() == [4, 16, 16, 16]
    assert features.feature_info.channels() == [64, 192, 192, 192]
    assert features.feature_info.module_name() == ["stem", "blocks.3", "blocks.7", "blocks.11"]
