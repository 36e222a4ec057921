"""CETNet: windows against their definition, blocks against Swin's, the embedding layer by layer, the macro patterns."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock
from torch import nn

from tests.conftest import randomise
from tests.helpers.variants import CETNET
from weft.catalog.cost import count_parameters
from weft.models import cetnet
from weft.models.ce import CE_UNITS, conv_embedding
from weft.models.cetnet import LEWinBlock
from weft.models.layers import ConvEmbed
from weft.models.weights.layouts import filter_published
from weft.models.windows import cut_windows, join_windows


def lewin(dim: int, heads: int, window: int, shifted: bool, le: str) -> LEWinBlock:
    attn = cetnet.LEWinAttention(dim, heads, window, shifted, le, 0.0, 0.0)
    return randomise(LEWinBlock(dim, attn, le, 4 * dim, 0.0, 0.0).double())


# Attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(14, 14), (7, 7), (21, 14), (28, 7)])
def test_without_local_enhancement_it_is_swin(size, shifted):
    """timm's block with the same weights, where windows fit: it pads in sight of the attention, we do not."""
    ours = lewin(16, 4, 7, shifted, "none")
    theirs = SwinTransformerBlock(16, size, 4, window_size=7, shift_size=3 * shifted).double().eval()
    state = {key.replace("attn.rel_pos.", "attn."): value for key, value in ours.state_dict().items()}
    for kind in ("weight", "bias"):
        state[f"attn.qkv.{kind}"] = torch.cat([state.pop(f"attn.{name}.{kind}") for name in "qkv"])
    theirs.load_state_dict(state)
    x = torch.randn(2, *size, 16, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


def by_definition(attn: cetnet.LEWinAttention, x: torch.Tensor, shift: tuple[int, int]) -> torch.Tensor:
    """Attention of every pixel with every other, written out: they see each other if their window is the same."""
    batch, height, width, dim = x.shape
    heads, window = attn.num_heads, attn.window

    def project(conv, linear):
        y = x
        if isinstance(conv, nn.Module) and not isinstance(conv, nn.Identity):
            bn = conv.bn
            y = F.conv2d(x.permute(0, 3, 1, 2), conv.conv.weight, None, 1, 1, 1, dim)
            y = F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias).permute(0, 2, 3, 1)
        y = F.linear(y, linear.weight, linear.bias).reshape(batch, height * width, heads, dim // heads)
        return y.transpose(1, 2)

    q, k, v = (project(*m) for m in ((attn.conv_q, attn.q), (attn.conv_k, attn.k), (attn.conv_v, attn.v)))
    logits = q @ k.transpose(-2, -1) * (dim // heads) ** -0.5
    table = attn.rel_pos.relative_position_bias_table.view(2 * window - 1, 2 * window - 1, heads)
    pixels = [(y, z) for y in range(height) for z in range(width)]
    for i, (y1, x1) in enumerate(pixels):
        for j, (y2, x2) in enumerate(pixels):
            cells = [((y - shift[0]) // window, (z - shift[1]) // window) for y, z in ((y1, x1), (y2, x2))]
            if cells[0] == cells[1]:
                logits[:, :, i, j] += table[y1 - y2 + window - 1, x1 - x2 + window - 1]
            else:
                logits[:, :, i, j] = -math.inf
    y = (logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, height, width, dim)
    return F.linear(y, attn.proj.weight, attn.proj.bias)


@pytest.mark.parametrize("le", ["qkv", "pre", "none"])
@pytest.mark.parametrize(
    ("size", "shifted", "shift"),
    [
        ((8, 8), False, (0, 0)),
        ((8, 8), True, (2, 2)),
        ((5, 9), False, (0, 0)),
        ((5, 9), True, (2, 2)),
        ((3, 10), True, (0, 2)),  # one window covers the height: no shift there
        ((4, 2), True, (0, 0)),
    ],
)
def test_block_by_definition(le, size, shifted, shift):
    """Windows, shift, padding and positions, against a loop over pairs of pixels; then the equations of the block."""
    block = lewin(8, 2, 4, shifted, le)
    x = torch.randn(2, *size, 8, dtype=torch.float64)
    z = x
    if le == "pre":  # equations 1 and 4: the residual starts behind the convolution
        bn = block.conv.bn
        z = F.conv2d(x.permute(0, 3, 1, 2), block.conv.conv.weight, None, 1, 1, 1, 8)
        z = F.batch_norm(z, bn.running_mean, bn.running_var, bn.weight, bn.bias).permute(0, 2, 3, 1)
    with torch.no_grad():
        z = z + by_definition(block.attn, F.layer_norm(z, (8,), block.norm1.weight, block.norm1.bias), shift)
        hidden = F.linear(F.layer_norm(z, (8,), block.norm2.weight, block.norm2.bias), *block.mlp.fc1.parameters())
        z = z + F.linear(F.gelu(hidden), *block.mlp.fc2.parameters())
        torch.testing.assert_close(block(x), z)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 17), st.integers(1, 17), st.integers(1, 7), st.booleans())
def test_windows_come_back(height, width, window, shifted):
    x = torch.randn(2, height, width, 6)
    windows = cut_windows(x, window, shifted, 3)
    count = math.ceil(height / window) * math.ceil(width / window)
    assert windows.shape == (2, 3 * count, window * window, 2)
    assert torch.equal(join_windows(windows, window, shifted, height, width), x)


def test_nothing_sees_padding():
    """Gradients in float64 are finite and those of padded windows come from real pixels alone."""
    block = lewin(8, 2, 7, True, "qkv")
    x = torch.randn(1, 9, 2, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: block(x).sum((1, 2)), (x,))


def test_position_tables_follow_the_window():
    """Weights of another window size load: the tables are interpolated, as timm does for Swin."""
    small, large = (randomise(timm.create_model("cetnet_nano", **CETNET, window_size=w)) for w in (4, 7))
    state = filter_published(small.state_dict(), large)
    large.load_state_dict(state)
    key = "stages.0.blocks.0.attn.rel_pos.relative_position_bias_table"
    assert state[key].shape == (13 * 13, 1)
    before = small.state_dict()[key].view(7, 7)
    torch.testing.assert_close(state[key].view(13, 13)[6, 6], before[3, 3])  # no distance is no distance
    assert filter_published(small.state_dict(), small)[key] is not None
    assert torch.equal(filter_published(small.state_dict(), small)[key], small.state_dict()[key])


# The embedding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "parameters"), [(64, 1_654_944), (96, 3_682_800), (128, 6_510_912)])
def test_embeddings_have_the_size_that_the_counts_demand(dim, parameters):
    widths = [3, dim, 2 * dim, 4 * dim, 8 * dim]
    embeddings = [conv_embedding(i, widths[i], widths[i + 1], device="meta") for i in range(4)]
    assert sum(count_parameters(e) for e in embeddings) == parameters


def conv_bn(x, conv, bn, act: bool):
    groups = conv.groups
    x = F.conv2d(x, conv.weight, None, conv.stride, conv.kernel_size[0] // 2, 1, groups)
    x = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)
    return F.gelu(x) if act else x


def test_stem_is_four_fused_mbconvs():
    """S0: 3x3 convolutions at stride 2 and 1; S1: expansion 2 at stride 2 and 1; 1x1; LayerNorm."""
    stem = randomise(conv_embedding(0, 3, 16))
    x = torch.randn(2, 3, 20, 28)
    first, second, third, fourth = stem.units
    assert [first.conv.stride[0], second.conv.stride[0], third.conv_exp.stride[0], fourth.conv_exp.stride[0]] == [
        2,
        1,
        2,
        1,
    ]
    y = conv_bn(x, first.conv, first.bn1, True)
    y = y + conv_bn(y, second.conv, second.bn1, True)
    for unit in (third, fourth):
        z = conv_bn(conv_bn(y, unit.conv_exp, unit.bn1, True), unit.conv_pwl, unit.bn2, False)
        y = y + z if unit is fourth else z
    assert third.conv_exp.out_channels == 16  # twice the 8 that come in
    y = F.layer_norm(F.linear(y.permute(0, 2, 3, 1), *stem.proj.parameters()), (16,), *stem.norm.parameters())
    torch.testing.assert_close(stem(x.permute(0, 2, 3, 1)), y, rtol=1e-4, atol=1e-5)


def test_embedding_is_four_mbconvs_at_the_incoming_width():
    embed = randomise(conv_embedding(1, 8, 16))
    x = torch.randn(2, 8, 11, 14)
    y = x
    for i, unit in enumerate(embed.units):
        assert unit.conv_pw.out_channels == 16
        z = conv_bn(y, unit.conv_pw, unit.bn1, True)
        z = conv_bn(z, unit.conv_dw, unit.bn2, True)
        z = conv_bn(z, unit.conv_pwl, unit.bn3, False)
        y = z if i == 0 else y + z
    assert y.shape == (2, 8, 6, 7)
    y = F.layer_norm(F.linear(y.permute(0, 2, 3, 1), *embed.proj.parameters()), (16,), *embed.norm.parameters())
    torch.testing.assert_close(embed(x.permute(0, 2, 3, 1)), y, rtol=1e-4, atol=1e-5)


UNIT_TYPES = {
    "fused": ("EdgeResidual", "InvertedResidual"),
    "mbconv": ("InvertedResidual", "InvertedResidual"),
    "ghost": ("GhostBottleneck", "GhostBottleneck"),
    "dense": ("DenseUnit", "DenseUnit"),
    "shuffle": ("ShuffleUnit", "ShuffleUnit"),
    "resnet": ("Bottleneck", "Bottleneck"),
    "seresnet": ("Bottleneck", "Bottleneck"),
}


@pytest.mark.parametrize("unit", CE_UNITS)
def test_units_of_table_6(unit):
    """Five layers each; every one halves the map in its first unit and has the activation GELU."""
    stem, later = conv_embedding(0, 3, 32, unit=unit), conv_embedding(1, 32, 64, unit=unit)
    assert (type(stem.units[-1]).__name__, type(later.units[-1]).__name__) == UNIT_TYPES[unit]
    assert len(stem.units) == len(later.units) == 4
    assert later.units[:1](torch.randn(1, 32, 13, 8)).shape[2:] == (7, 4)
    assert later(torch.randn(1, 13, 8, 32)).shape == (1, 7, 4, 64)
    assert stem(torch.randn(1, 20, 36, 3)).shape == (1, 5, 9, 32)
    squeezed = [m for m in later.modules() if type(m).__name__ == "SEModule"]
    assert len(squeezed) == (4 if unit == "seresnet" else 0)
    activations = {type(m).__name__ for m in (*stem.modules(), *later.modules()) if "LU" in type(m).__name__}
    assert activations - {"ReLU"} == {"GELU"}
    assert ("ReLU" in activations) == (unit == "seresnet")  # inside squeeze-and-excitation alone


@pytest.mark.parametrize("unit", CE_UNITS)
def test_units_train_at_the_width_of_the_nano(unit):
    """Gradients of channels-last convolutions with few channels and a stride have crashed torch."""
    model = timm.create_model("cetnet_nano", ce_unit=unit, num_classes=3).train()
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_shuffle_unit_by_hand():
    unit = randomise(conv_embedding(1, 8, 16, unit="shuffle").units[1])
    conv1, bn1, _, _, conv2, bn2, conv3, bn3 = unit.layers
    x = torch.randn(2, 8, 5, 6)
    y = conv_bn(x, conv1, bn1, True)
    y = y.reshape(2, 2, 16, 5, 6).transpose(1, 2).reshape(2, 32, 5, 6)  # channels of both groups alternate
    y = conv_bn(conv_bn(y, conv2, bn2, False), conv3, bn3, False)
    torch.testing.assert_close(unit(x), x + y, rtol=1e-4, atol=1e-5)


def test_dense_units_grow():
    embed = conv_embedding(1, 32, 64, unit="dense")
    assert [unit.layer.conv1.in_channels for unit in embed.units] == [32, 36, 40, 44]
    assert embed.proj.in_features == 48
    x = torch.randn(1, 36, 6, 6)
    torch.testing.assert_close(embed.units[1].eval()(x)[:, :36], x)


@pytest.mark.parametrize(("layers", "stem", "later"), [(1, 1, 1), (3, 2, 2), (5, 4, 4), (7, 6, 6)])
def test_layers_of_table_5(layers, stem, later):
    """Expansions alternate, the stem halves the map at its first unit and in its middle, the last layer is the 1x1."""
    first = conv_embedding(0, 3, 32, unit="mbconv", layers=layers)
    embed = conv_embedding(1, 32, 64, unit="mbconv", layers=layers, expand=(2, 1))
    assert (len(first.units), len(embed.units)) == (stem, later)
    expansions = [2 if hasattr(unit, "conv_pwl") else 1 for unit in embed.units]
    assert expansions == [2, 1] * (later // 2) if layers > 1 else [2]
    strides = [max(m.stride[0] for m in unit.modules() if isinstance(m, nn.Conv2d)) for unit in first.units]
    assert strides == {1: [4], 3: [2, 2], 5: [2, 1, 2, 1], 7: [2, 1, 1, 2, 1, 1]}[layers]
    assert isinstance(embed.proj, nn.Identity if layers == 1 else nn.Linear)
    assert first(torch.randn(1, 24, 40, 3)).shape == (1, 6, 10, 32)
    assert embed(torch.randn(1, 9, 8, 32)).shape == (1, 5, 4, 64)


# The network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stride", "strides"), [(4, [2, 1, 2, 1]), (2, [1, 1, 2, 1]), (1, [1, 1, 1, 1])])
def test_stem_stride(stride, strides):
    stem = conv_embedding(0, 3, 32, stem_stride=stride)
    assert [max(m.stride[0] for m in u.modules() if isinstance(m, nn.Conv2d)) for u in stem.units] == strides


def test_embeddings_of_table_4():
    swin = timm.create_model("cetnet_tiny", embed="patch", device="meta")
    assert isinstance(swin.stages[0].embed, ConvEmbed)
    assert swin.stages[0].embed.proj.kernel_size == (4, 4)
    assert all(isinstance(stage.embed, PatchMerging) for stage in swin.stages[1:])
    cvt = timm.create_model("cetnet_tiny", embed="conv", device="meta")
    assert [stage.embed.proj.kernel_size[0] for stage in cvt.stages] == [7, 3, 3, 3]
    assert [stage.embed.proj.stride[0] for stage in cvt.stages] == [4, 2, 2, 2]


@pytest.mark.parametrize(
    "pattern", ["C-T-C-T-C-T-C-T", "C-T-C-T-C-T-T-T", "T-T-T-T-C-C-C-C", "T-C-T-C-T-C-T-C", "C-C-C-T-T-T-T-T"]
)
def test_patterns_of_table_8(pattern):
    model = timm.create_model("cetnet_tiny", pattern=pattern, device="meta")
    letters = []
    for i, stage in enumerate(model.stages):
        letters.append("T" if isinstance(stage.embed, cetnet.TransformerEmbed) else "C")
        if letters[-1] == "T":  # two blocks at the width that comes in, one of them shifted
            assert [b.attn.shifted for b in stage.embed.blocks] == [False, True]
            assert stage.embed.blocks[0].norm1.normalized_shape == (64 * 2 ** max(i - 1, 0),)
        kinds = {type(block) for block in stage.blocks}
        assert len(kinds) == 1
        letters.append("T" if kinds == {LEWinBlock} else "C")
        if letters[-1] == "C":
            units = {tuple(type(u).__name__ for u in block.units) for block in stage.blocks}
            assert units == {("EdgeResidual",) if i == 0 else ("InvertedResidual",) * 3}
        assert len(stage.blocks) == (2, 2, 18, 2)[i]
    assert "-".join(letters) == pattern
    first = model.pretrained_cfg["first_conv"]
    assert model.get_submodule(first).in_channels == 3


def test_transformer_embedding_by_hand():
    """Means of 2x2 pixels, blocks, 1x1, norm."""
    model = randomise(timm.create_model("cetnet_nano", **CETNET, pattern="C-T-T-T-C-T-C-T"))
    embed = model.stages[1].embed
    x = torch.randn(2, 7, 10, 16)
    means = F.avg_pool2d(F.pad(x, (0, 0, 0, 0, 0, 1)).permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
    y = embed.blocks[1](embed.blocks[0](means))
    y = F.layer_norm(F.linear(y, *embed.proj.parameters()), (32,), *embed.norm.parameters())
    torch.testing.assert_close(embed(x), y)


def test_blocks_alternate_and_drop_more_and_more():
    model = timm.create_model("cetnet_tiny")
    shifts = [[block.attn.shifted for block in stage.blocks] for stage in model.stages]
    assert shifts == [[False, True], [False, True], [False, True] * 9, [False, True]]
    rates = [block.drop_path.drop_prob for stage in model.stages for block in stage.blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.2, 24))
    assert {stage.blocks[0].attn.window for stage in model.stages} == {7}
