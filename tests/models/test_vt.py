"""VT's module: every part against its equation, the module alone, and wrong values."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.helpers.variants import SWITCHES
from weft.catalog.cost import count_parameters
from weft.models import vt

VT_SWITCHES = {key: value for key, value in SWITCHES.items() if value[0] == "vt_resnet_nano"}
every_switch = pytest.mark.parametrize("args", [args for _, args in VT_SWITCHES.values()], ids=VT_SWITCHES)


# The parts, computed again from their weights on (C, H, W) maps, one picture at a time ---------------------------


def conv(layer: nn.Module, x: Tensor) -> Tensor:
    """A 1x1 convolution, group by group. (C_in, N) -> (C_out, N)."""
    groups = getattr(layer, "groups", 1)
    weight = layer.weight.flatten(1)  # (C_out, C_in / groups)
    parts = [w @ part for w, part in zip(weight.chunk(groups), x.chunk(groups), strict=True)]
    return torch.cat(parts) + layer.bias[:, None]


def softmax(x: Tensor, dim: int) -> Tensor:
    e = (x - x.amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Columns of q ask columns of k for those of v, head by head. (C, N), (C, M), (D, M) -> (D, N)."""
    out = []
    for head_q, head_k, head_v in zip(q.chunk(heads), k.chunk(heads), v.chunk(heads), strict=True):
        weights = softmax(head_q.T @ head_k / head_q.shape[0] ** 0.5, dim=1)  # (N, M)
        out.append(head_v @ weights.T)
    return torch.cat(out)


def plain_filter(m: vt.FilterTokenizer, x: Tensor, tokens: Tensor | None) -> Tensor:
    weights = softmax(conv(m.coefficients, x) / x.shape[0] ** 0.5, dim=1)  # (L, N): over the pixels
    value = x if isinstance(m.value, nn.Identity) else conv(m.value, x)
    return conv(m.token, value @ weights.T)


def plain_recurrent(m: vt.RecurrentTokenizer, x: Tensor, tokens: Tensor) -> Tensor:
    asking = tokens.shape[1] - m.carried
    new = attend(conv(m.query, tokens[:, :asking]), conv(m.key, x), conv(m.value, x), m.heads)
    return torch.cat([conv(m.token, new), tokens[:, asking:]], dim=1)


def plain_transformer(m: vt.Transformer, t: Tensor) -> Tensor:
    t = t + attend(conv(m.query, t), conv(m.key, t), conv(m.value, t), m.num_heads)  # eq. 3
    return t + conv(m.f2, conv(m.f1, t).clamp(min=0))  # eq. 4


def plain_projector(m: vt.Projector, x: Tensor, t: Tensor) -> Tensor:
    shortcut = x if isinstance(m.shortcut, nn.Identity) else conv(m.shortcut, x)
    return shortcut + attend(conv(m.query, x), conv(m.key, t), conv(m.value, t), m.heads)  # eq. 5


def each_picture(plain, m: nn.Module, *tensors: Tensor) -> Tensor:
    """Applies a plain part to (B, H, W, C) or (B, N, C) tensors, picture by picture; (B, N, C) comes back."""
    columns = [t.flatten(1, -2).transpose(1, 2) for t in tensors]  # (B, C, N)
    return torch.stack([plain(m, *one) for one in zip(*columns, strict=True)]).transpose(1, 2)


def part(kind: type[nn.Module], *args, **kwargs) -> nn.Module:
    """In float64 and with a bias that shows."""
    m = kind(*args, **kwargs, dtype=torch.float64)
    for name, parameter in m.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return m


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("value", [True, False])
def test_filter_tokenizer(value):
    """Equation 1, with the value map of VT-ResNet and, as feature pyramids have it, without."""
    m, x = part(vt.FilterTokenizer, 16, 5, 24, group_width=8, value=value), numbers(2, 6, 7, 16)
    assert (m(x).shape, isinstance(m.value, nn.Conv2d)) == ((2, 5, 24), value)
    torch.testing.assert_close(m(x), each_picture(lambda m, x: plain_filter(m, x, None), m, x))
    if value:
        assert (m.value.groups, m.value.weight.shape) == (2, (16, 8, 1, 1))


@pytest.mark.parametrize("carried", [0, 2])
def test_recurrent_tokenizer(carried):
    m = part(vt.RecurrentTokenizer, 16, 24, group_width=8, carried=carried)
    x, tokens = numbers(2, 6, 7, 16), numbers(2, 5, 24)
    torch.testing.assert_close(m(x, tokens), each_picture(plain_recurrent, m, x, tokens))
    assert torch.equal(m(x, tokens)[:, 5 - carried :], tokens[:, 5 - carried :])
    assert (m.heads, m.key.groups, m.value.groups) == (2, 2, 2)
    with pytest.raises(AssertionError, match="tokens of the module before"):
        m(x)


@pytest.mark.parametrize(
    ("tokens", "grid"), [(16, (4, 4)), (32, (4, 8)), (64, (8, 8)), (8, (2, 4)), (7, (1, 7)), (1, (1, 1))]
)
def test_pooling_tokenizer(tokens, grid):
    m, x = part(vt.PoolingTokenizer, 6, tokens, 24), numbers(2, 9, 14, 6)
    pooled = F.interpolate(x.permute(0, 3, 1, 2), grid, mode="bilinear", align_corners=False)
    expected = F.conv2d(pooled, m.token.weight[:, :, None, None], m.token.bias)
    torch.testing.assert_close(m(x), expected.flatten(2).transpose(1, 2))


def slow_k_means(pixels: Tensor, centroids: list[Tensor], rounds: int) -> Tensor:
    for _ in range(rounds):
        clusters: list[list[Tensor]] = [[] for _ in centroids]
        for pixel in pixels:
            distances = [(pixel - centroid).square().sum().item() for centroid in centroids]
            clusters[distances.index(min(distances))].append(pixel)
        centroids = [torch.stack(c).mean(0) if c else old for c, old in zip(clusters, centroids, strict=True)]
    return torch.stack(centroids)


def test_k_means():
    """Against loops; a pixel may be a cluster of its own; a centroid far from all pixels stays where it is."""
    pixels = numbers(2, 40, 3)
    pixels[:, 0] = -100
    start = torch.cat([pixels[:, :4], torch.full((2, 1, 3), 1e3, dtype=torch.float64)], dim=1)
    for rounds in (1, 4):
        expected = torch.stack([slow_k_means(p, list(c), rounds) for p, c in zip(pixels, start, strict=True)])
        torch.testing.assert_close(vt.k_means(pixels, start, rounds), expected)
    assert torch.equal(expected[:, 4], start[:, 4])


def test_clustering_tokenizer():
    m, x = part(vt.ClusteringTokenizer, 16, 6, 24, group_width=8), numbers(2, 8, 9, 16)
    start = F.interpolate(x.permute(0, 3, 1, 2), (2, 3), mode="bilinear", align_corners=False).flatten(2).mT

    def plain(m, x, start):
        centroids = slow_k_means(x.T, list(start.T), 4)
        weights = softmax(centroids @ x / 4, dim=1)  # (L, N), scaled by sqrt(16)
        return conv(m.token, conv(m.value, x) @ weights.T)

    torch.testing.assert_close(m(x), each_picture(plain, m, x, start))
    assert torch.equal(m(x), m.train()(x))  # nothing random
    filters = vt.FilterTokenizer(16, 6, 24, group_width=8)
    assert count_parameters(filters) - count_parameters(m) == count_parameters(filters.coefficients)


def test_clustering_has_a_gradient_through_the_centroids():
    m, x = part(vt.ClusteringTokenizer, 16, 6, 24, group_width=8), numbers(1, 4, 4, 16).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: m(x).sum(), x, eps=1e-7)


def test_transformer():
    """Equations 3 and 4: no norm, ReLU, q and k half as wide as v, 4 groups."""
    m, tokens = part(vt.Transformer, 32, num_heads=4), numbers(2, 5, 32)
    torch.testing.assert_close(m(tokens), each_picture(plain_transformer, m, tokens))
    assert [tuple(c.weight.shape) for c in (m.query, m.key, m.value)] == [(16, 8, 1, 1), (16, 8, 1, 1), (32, 8, 1, 1)]
    assert (vt.Transformer(1024, device="meta").num_heads, m.query.groups) == (16, 4)


def test_graph_convolution():
    m, tokens = part(vt.GraphConvolution, 24, 5), numbers(2, 5, 24)
    related = [[t[i] + sum(m.adjacency[i, j] * t[j] for j in range(5)) for i in range(5)] for t in tokens]
    expected = torch.stack([torch.stack(rows) for rows in related]) @ m.weight.weight.T + m.weight.bias
    torch.testing.assert_close(m(tokens), expected)


@pytest.mark.parametrize("channels", [16, 32])
def test_projector(channels):
    """Equation 5; a convolution in the shortcut only where the width changes."""
    m = part(vt.Projector, 16, 24, channels, group_width=8)
    x, tokens = numbers(2, 6, 7, 16), numbers(2, 5, 24)
    assert m(x, tokens).shape == (2, 6, 7, channels)
    torch.testing.assert_close(m(x, tokens).flatten(1, 2), each_picture(plain_projector, m, x, tokens))
    assert isinstance(m.shortcut, nn.Identity) == (channels == 16)
    assert m.query.groups == m.heads == channels // 8


def test_feature_pyramid_can_be_built_of_the_parts():
    """Tokens of several levels in one transformer, each level's own tokens back to its map; groups of 16 channels."""
    levels = [torch.randn(2, side, side, 32) for side in (16, 8, 4)]
    tokenizers = [vt.FilterTokenizer(32, 8, 64, value=False) for _ in levels]
    projectors = [vt.Projector(32, 64, 32, group_width=16) for _ in levels]
    tokens = torch.cat([tokenize(x) for tokenize, x in zip(tokenizers, levels, strict=True)], dim=1)
    related = vt.Transformer(64, num_heads=4)(tokens).chunk(3, dim=1)
    for project, x, own in zip(projectors, levels, related, strict=True):
        assert project(x, own).shape == x.shape


# The module -----------------------------------------------------------------------------------------------------


def test_visual_transformer_alone():
    """(B, C, H, W) in and out, tokens from module to module, and a map lies in memory as it came."""
    small = dict(num_tokens=5, token_dim=64, group_width=8, num_heads=4)
    first, last = (
        vt.VisualTransformer(16, 32, **small),
        vt.VisualTransformer(32, 32, tokenizer="recurrent", projector=False, **small),
    )
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x, tokens = first(torch.randn(2, 16, 9, 6).contiguous(memory_format=memory_format))
        assert (x.shape, tokens.shape) == ((2, 32, 9, 6), (2, 5, 64))
        assert x.is_contiguous(memory_format=torch.channels_last)
        nothing, newer = last(x, tokens)
        assert nothing is None
        assert newer.shape == (2, 5, 64)
    keep = vt.VisualTransformer(32, 32, tokenizer="none", relation="identity", projector=False, **small)
    assert keep(x, tokens)[1] is tokens
    with pytest.raises(AssertionError, match="tokens of the module before"):
        keep(x)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(tokenizer="cluster"), "'filter', 'recurrent', 'pooling', 'clustering', 'none'"),
        (dict(relation="gcn"), "'transformer', 'graph', 'none', 'identity'"),
        (dict(projector="no"), "True, False"),
        (dict(group_width=24), "equal groups"),
        (dict(num_heads=7), "multiple of 2 * 7 (heads)"),
        (dict(carried_tokens=16), "carried_tokens=16 does not exist"),
        (dict(num_tokens=0), "positive"),
        (dict(drop_path=1.0), "0 up to"),
    ],
)
def test_wrong_values_of_a_module(args, message):
    with pytest.raises(weft.WeftError) as error:
        vt.VisualTransformer(64, 64, device="meta", **args)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("vt_resnet18", dict(block="wide"), "'basic', 'bottleneck'"),
        ("vt_resnet18", dict(bottleneck_stride="1x1"), "'3x3'"),
        ("vt_resnet50", dict(bottleneck_stride="2x2"), "'1x1', '3x3'"),
        ("vt_resnet18", dict(tokenizer="recurrent"), "'filter', 'pooling', 'clustering'"),
        ("vt_resnet18", dict(later_tokenizer="none"), "'recurrent', 'filter', 'pooling', 'clustering'"),
        ("vt_resnet18", dict(relation=True), "'transformer', 'graph', 'none', 'identity'"),
        ("vt_resnet18", dict(num_relations=3), "0, 1, 2"),
        ("vt_resnet18", dict(projector=False), "'every', 'inner', 'none'"),
        ("vt_resnet18", dict(stem_stride=8), "1, 2, 4"),
        ("vt_resnet18", dict(depths=(1, 2)), "three stages"),
        ("vt_resnet18", dict(widths=(1, 2, 0)), "positive"),
        ("vt_resnet18", dict(num_modules=0), "positive"),
        ("vt_resnet18", dict(img_size=-1), "positive"),
        ("vt_resnet18", dict(global_pool="token"), "'avg', 'max', 'avgmax', ''"),
        ("vt_resnet18", dict(proj_drop_rate=-0.1), "0 up to"),
    ],
)
def test_wrong_values_of_a_network(name, args, message):
    with pytest.raises(weft.WeftError) as error:
        timm.create_model(name, device="meta", **args)
    assert message in str(error.value)
    assert next(iter(args)) in str(error.value)
    assert "\n" not in str(error.value)
