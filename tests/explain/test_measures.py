"""Numbers of attention, rollout, CKA and robustness against arithmetic and brute force."""

import itertools
import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import weft
from tests.helpers.variants import SMALL, SWITCHES
from weft.errors import WeftError
from weft.explain import (
    CKA,
    Grid,
    LayerAttention,
    Tokens,
    attention_distance,
    attention_entropy,
    attention_numbers,
    attention_of,
    feature_similarity,
    foreground_attention,
    local_ratio,
    mean_numbers,
    robustness,
    rollout,
)
from weft.explain.attention.readers import Scores
from weft.explain.attention.rollout import nearest, spread
from weft.explain.invariance import scaled, shifted
from weft.explain.similarity import gram, hsic

sides = st.integers(1, 7)


def grid(height: int, width: int, step: int = 4, cells: int = 1) -> Grid:
    """Tokens `step` pixels wide, or every `cells`-th one of them."""
    return Grid(height, width, (step * cells, step * cells), (step / 2, step / 2))


def layer_of(scores: Scores, queries: Tokens, keys: Tokens) -> LayerAttention:
    batch, heads, *_ = scores.q.shape
    return LayerAttention("planted", "map", heads, queries, keys, batch, [scores])


def planted(weights: Tensor, queries: Tokens, keys: Tokens) -> LayerAttention:
    """A layer whose attention is `weights`, (B, heads, queries, keys)."""
    eye = torch.eye(weights.shape[3], dtype=torch.float64).expand(*weights.shape[:2], -1, -1)
    return layer_of(Scores(weights.double().clamp(min=1e-300).log(), eye, 1.0), queries, keys)


def near_pairs(queries: Grid, keys: Grid) -> Tensor:
    """(queries, keys): 1 in the 3 x 3 keys around that at the smallest distance, of several the last."""
    near = torch.zeros(queries.height * queries.width, keys.height * keys.width, dtype=torch.float64)
    for i, place in enumerate(queries.centers().tolist()):
        distances = [math.dist(place, key) for key in keys.centers().tolist()]
        middle = divmod(max(j for j, far in enumerate(distances) if far == min(distances)), keys.width)
        for j in range(len(distances)):
            near[i, j] = max(abs(a - b) for a, b in zip(divmod(j, keys.width), middle, strict=True)) <= 1
    return near


def uniform(queries: Tokens, keys: Tokens, heads: int = 2) -> LayerAttention:
    q, k = (torch.zeros(1, heads, len(tokens), 1, dtype=torch.float64) for tokens in (queries, keys))
    return layer_of(Scores(q, k, 1.0), queries, keys)


@given(sides, sides, sides, sides, st.integers(0, 2))
def test_uniform_attention_has_the_numbers_that_arithmetic_says(height, width, key_height, key_width, extra):
    asking, asked = grid(height, width), grid(key_height, key_width, cells=2)
    layer = uniform(Tokens(extra, asking), Tokens(extra, asked))
    (numbers,) = attention_numbers([layer])
    pairs = list(itertools.product(asking.centers().tolist(), asked.centers().tolist()))
    wanted = sum(math.dist(a, b) for a, b in pairs) / len(pairs)
    assert numbers.entropy.heads == pytest.approx([math.log(extra + key_height * key_width)] * 2)
    assert numbers.distance is not None
    assert numbers.local_ratio is not None
    assert numbers.distance.heads == pytest.approx([wanted] * 2)
    assert numbers.local_ratio.heads == pytest.approx([float(near_pairs(asking, asked).mean())] * 2)
    for measure in (numbers.entropy, numbers.distance, numbers.local_ratio):
        assert measure.heads == pytest.approx([measure.uniform] * 2)


def test_uniform_entropy_is_that_of_the_paper():
    """Visual Transformers, section 6: 12.318 for 473 x 473 pixels."""
    layer = uniform(Tokens(1, None), Tokens(0, grid(473, 473, 1)), heads=1)
    assert attention_entropy(layer).heads == pytest.approx([12.318], abs=5e-4)


def test_attention_on_oneself_is_local_and_sharp():
    tokens = Tokens(0, grid(5, 6))
    layer = planted(torch.eye(30).expand(1, 1, -1, -1), tokens, tokens)
    (numbers,) = attention_numbers([layer])
    assert numbers.distance is not None
    assert numbers.local_ratio is not None
    found = [*numbers.entropy.heads, *numbers.distance.heads, *numbers.local_ratio.heads]
    assert found == pytest.approx([0, 0, 1])


def test_a_planted_local_pattern_has_ratio_1():
    """One head looks at the 3x3 tokens around, one at all others, one at both and at the class token."""
    tokens = Tokens(1, grid(5, 6))
    near = torch.zeros(30, 30)
    for (i, a), (j, b) in itertools.product(enumerate(itertools.product(range(5), range(6))), repeat=2):
        near[i, j] = abs(a[0] - b[0]) <= 1 and abs(a[1] - b[1]) <= 1
    assert torch.equal(near.double(), near_pairs(grid(5, 6), grid(5, 6)))
    whole = torch.zeros(1, 3, 31, 31)
    whole[..., 0, 0] = 1
    parts = [part / part.sum(dim=1, keepdim=True) for part in (near, 1 - near)]
    whole[0, 0, 1:, 1:], whole[0, 1, 1:, 1:] = parts
    whole[0, 2, 1:, 1:], whole[0, 2, 1:, 0] = 0.3 * parts[0] + 0.1 * parts[1], 0.6
    found = local_ratio(planted(whole, tokens, tokens))
    assert found is not None
    assert found.heads == pytest.approx([1, 0, 0.75])
    assert found.uniform == pytest.approx(float(near.mean()))


@given(sides, sides, st.integers(1, 3), st.integers(0, 10))
def test_numbers_are_those_of_loops(height, width, cells, seed):
    """Random attention to strided keys, by definition."""
    generator = torch.Generator().manual_seed(seed)
    keys = grid(-(-height // cells), -(-width // cells), cells=cells)
    queries = grid(height, width)
    weights = torch.rand(2, 3, height * width, keys.height * keys.width, generator=generator, dtype=torch.float64)
    weights /= weights.sum(dim=3, keepdim=True)
    layer = planted(weights, Tokens(0, queries), Tokens(0, keys))
    at, of = queries.centers().tolist(), keys.centers().tolist()
    distance = torch.tensor([[math.dist(a, b) for b in of] for a in at], dtype=torch.float64)
    found = attention_distance(layer)
    assert found is not None
    assert found.heads == pytest.approx((weights * distance).sum(3).mean((0, 2)).tolist())
    local = local_ratio(layer)
    assert local is not None
    assert local.heads == pytest.approx((weights * near_pairs(queries, keys)).sum(3).mean((0, 2)).tolist())
    entropy = -(weights * weights.log()).sum(3).mean((0, 2))
    assert attention_entropy(layer).heads == pytest.approx(entropy.tolist())


@pytest.mark.parametrize("extra", [0, 1])
def test_attention_on_the_foreground(extra):
    """Masks cover tokens whole, or half of one; the class token looks, or where there is none, all do."""
    tokens = Tokens(extra, grid(2, 3))
    masks = torch.zeros(2, 8, 12, dtype=torch.bool)
    masks[0, :4, :4] = True  # the first token
    masks[1, 4:, 8:10] = True  # the left half of the last
    weights = torch.full((2, 2, 6 + extra, 6 + extra), 1 / (6 + extra))
    weights[:, 1] = 0
    weights[0, 1, :, extra] = weights[1, 1, :, -1] = 1
    found = foreground_attention(planted(weights, tokens, tokens), masks)
    assert found is not None
    assert found.uniform == pytest.approx((1 / 6 + 1 / 12) / 2)
    assert found.heads == pytest.approx([found.uniform, 0.75])
    with pytest.raises(WeftError, match="1 masks do not fit 2 pictures"):
        foreground_attention(planted(weights, tokens, tokens), masks[:1])


def test_a_pixel_in_the_middle_of_two_keys_has_the_later_one():
    """Every second token is a key, or every second pixel a token."""
    assert nearest(grid(1, 4, cells=2), grid(1, 8)).tolist() == [0, 1, 1, 2, 2, 3, 3, 3]
    assert [Grid(1, 4, (2, 2), (0, 0)).index(0, x) for x in range(7)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("share", "covered", "times"), [(0.5, 1, 3), (0.25, 1, 1), (0.1, 2, 1 / 9)])
def test_the_foreground_against_the_background(share, covered, times):
    """Of four tokens some are covered: half of the attention on one is three times what the others have each."""
    tokens, even = Tokens(0, grid(1, 4)), torch.full((1, 1, 4, 4), (1 - share) / (4 - covered))
    even[..., :covered] = share / covered
    masks = torch.zeros(1, 4, 16)
    masks[:, :, : 4 * covered] = 1
    (numbers,) = attention_numbers([planted(even, tokens, tokens)], masks)
    assert numbers.contrast is not None
    assert [*numbers.contrast.heads, numbers.contrast.uniform] == pytest.approx([times, 1])
    assert numbers.to_dict()["contrast"]["heads"] == numbers.contrast.heads


@pytest.mark.parametrize("foreground", [0.0, 1.0])
def test_without_foreground_or_background_nothing_is_compared(foreground):
    tokens = Tokens(0, grid(2, 2))
    (numbers,) = attention_numbers([uniform(tokens, tokens)], torch.full((1, 8, 8), foreground))
    assert numbers.foreground is not None
    assert numbers.contrast is None
    assert numbers.to_dict()["contrast"] is None


def test_only_the_class_token_looks_at_the_foreground():
    tokens = Tokens(1, grid(1, 2))
    weights = torch.tensor([[0.5, 0.5, 0], [0, 0, 1], [0, 0, 1]])[None, None]
    masks = torch.tensor([[True] * 4 + [False] * 4] * 4)[None]
    found = foreground_attention(planted(weights, tokens, tokens), masks)
    assert found is not None
    assert [*found.heads, found.uniform] == pytest.approx([1, 0.5])


def test_tokens_without_a_place_have_an_entropy_alone():
    (numbers,) = attention_numbers([uniform(Tokens(3, None), Tokens(5, None))], torch.ones(1, 4, 4))
    assert (numbers.distance, numbers.local_ratio, numbers.foreground) == (None, None, None)
    assert json.loads(json.dumps(asdict(numbers)))["entropy"]["uniform"] == pytest.approx(math.log(5))


def test_the_mean_over_batches_is_that_of_one_batch():
    model = timm.create_model("cvt_nano", **SMALL["cvt_nano"]).eval()
    pictures, masks = torch.randn(5, 3, 32, 32), torch.rand(5, 32, 32) > 0.5
    whole = attention_numbers(attention_of(model, pictures), masks)
    batches = zip(pictures.split(3), masks.split(3), strict=True)
    parts = [attention_numbers(attention_of(model, x), m) for x, m in batches]
    for wanted, found in zip(whole, mean_numbers(parts), strict=True):
        assert (found.name, found.n) == (wanted.name, 5)
        for name in ("entropy", "distance", "local_ratio", "foreground"):
            a, b = getattr(wanted, name), getattr(found, name)
            assert [*b.heads, b.uniform] == pytest.approx([*a.heads, a.uniform], rel=1e-5)


# Rollout --------------------------------------------------------------------------------------------------------


def mean_map(layer: LayerAttention) -> Tensor:
    return layer.rows().mean(dim=1)  # (B, queries, keys)


def test_rollout_of_a_flat_model_is_the_product_of_its_matrices():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3).eval().double()
    layers = attention_of(model, torch.randn(2, 3, 32, 32, dtype=torch.float64))
    product = torch.eye(17, dtype=torch.float64)
    for layer in layers:
        product = (torch.eye(17) + mean_map(layer)) / 2 @ product
    torch.testing.assert_close(rollout(layers).flatten(1), product[:, 0, 1:])
    torch.testing.assert_close(rollout(layers, query=(12, 20)).flatten(1), product[:, 1 + 4 + 2, 1:])


def test_rollout_of_ceit_starts_in_all_layers():
    model = timm.create_model("ceit_nano", **SMALL["ceit_nano"]).eval().double()
    *blocks, lca = attention_of(model, torch.randn(2, 3, 16, 16, dtype=torch.float64))
    behind, product = [], torch.eye(17, dtype=torch.float64)
    for layer in blocks:
        product = (torch.eye(17) + mean_map(layer)) / 2 @ product
        behind.append(product[:, 0, 1:])  # of the class token behind this layer
    parts = mean_map(lca)[:, 0] / 2 + torch.tensor([0, 0, 0.5])
    wanted = torch.einsum("bl,lbp->bp", parts, torch.stack(behind))
    torch.testing.assert_close(rollout([*blocks, lca]).flatten(1), wanted)
    assert torch.equal(rollout([*blocks, lca], query=(3, 3)), rollout(blocks, query=(3, 3)))
    with pytest.raises(WeftError, match="lca attends to 3 layers, but 2 were given"):
        rollout([*blocks[1:], lca])


def test_rollout_of_visual_transformers_goes_through_tokens():
    model = timm.create_model("vt_resnet_nano", **SWITCHES["vt"][1]).eval().double()
    layers = attention_of(model, torch.randn(2, 3, 64, 64, dtype=torch.float64))
    first, related, back, second, last = (mean_map(layer) for layer in layers)
    eye = torch.eye(8)
    tokens = (eye + related) / 2 @ first  # (B, L, pixels)
    pixels = (torch.eye(back.shape[1]) + back @ tokens) / 2
    wanted = ((eye + last) / 2 @ second @ pixels).mean(dim=1)
    torch.testing.assert_close(rollout(layers).flatten(1), wanted)


@pytest.mark.parametrize("name", SMALL)
def test_rollout_loses_nothing_but_the_class_token(name):
    model = timm.create_model(name, **SMALL[name]).eval()
    layers = attention_of(model, torch.randn(2, 3, 44, 36))
    found = rollout(layers)
    assert found.shape[1:] == next((g.height, g.width) for x in layers if (g := x.queries.grid or x.keys.grid))
    assert (found >= 0).all()
    total = found.sum(dim=(1, 2))
    if any(layer.queries.extra and layer.kind == "map" for layer in layers):
        assert ((total > 0.5) & (total < 1)).all()
    else:
        torch.testing.assert_close(total, torch.ones(2))


@given(sides, sides, sides, sides)
def test_spreading_loses_nothing(height, width, other_height, other_width):
    source, target = grid(height, width, 8), grid(other_height, other_width, 4)
    parts = torch.rand(2, height * width)
    moved = spread(parts, source, target)
    assert moved.shape == (2, other_height * other_width)
    torch.testing.assert_close(moved.sum(dim=1), parts.sum(dim=1))


def test_spreading_divides_equally():
    source = Grid(1, 2, (8, 8), (4, 4))
    target = Grid(2, 4, (4, 4), (2, 2))
    assert spread(torch.tensor([[4.0, 8.0]]), source, target).tolist() == [[1, 1, 2, 2, 1, 1, 2, 2]]


def test_spreading_favours_no_place():
    """Keys at every second token, as CvT has them, have their centres on the tokens 0, 2, 4, and so on."""
    source, target = Grid(3, 8, (5, 2), (0.5, 0.5)), Grid(5, 16, (3, 1), (0.5, 0.5))
    torch.testing.assert_close(spread(torch.ones(1, 24), source, target), torch.full((1, 80), 24 / 80))


# CKA ------------------------------------------------------------------------------------------------------------


def cka(x: Tensor, y: Tensor, batch: int = 10) -> float:
    meter = CKA()
    for a, b in zip(x.split(batch), y.split(batch), strict=True):
        meter.add(gram(a)[None], gram(b)[None])
    return float(meter.matrix())


def test_cka_of_equal_features_is_1_whatever_their_rotation_scale_and_shift():
    x = torch.randn(20, 6, 2, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0]
    assert cka(x, x) == pytest.approx(1)
    assert cka(x, x.flatten(1) @ rotation) == pytest.approx(1)
    assert cka(x, -3 * x) == pytest.approx(1)
    assert cka(x, x + 5) == pytest.approx(1)
    assert cka(x, x.flatten(1) * torch.arange(12)) < 0.95


def test_pictures_count_the_same_in_batches_of_any_size():
    """The sums of both batches, of which one has three times as many pictures."""
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 4, dtype=torch.float64)
    meter = CKA()
    for part in (slice(4), slice(4, 16)):
        meter.add(gram(x[part])[None], gram(y[part])[None])

    def total(a: Tensor, b: Tensor) -> Tensor:
        return hsic(gram(a[:4]), gram(b[:4])) + 3 * hsic(gram(a[4:]), gram(b[4:]))

    norm = (total(x, x) * total(y, y)).clamp(min=0).sqrt()
    assert float(meter.matrix()) == pytest.approx(float(total(x, y) / norm) if norm > 0 else 0)


def test_cka_of_unrelated_features_is_near_0():
    assert abs(cka(torch.randn(400, 3), torch.randn(400, 3), batch=100)) < 0.05
    assert cka(torch.randn(20, 3), torch.ones(20, 3)) == 0


def test_hsic_is_the_mean_over_all_quadruples():
    """Song et al. 2012: K_ij L_ij + K_ij L_qr - 2 K_ij L_iq, over all i, j, q, r that differ."""
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    k, m = gram(x), gram(y)
    terms = [k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q]) for i, j, q, r in itertools.permutations(range(6), 4)]
    torch.testing.assert_close(hsic(k, m), torch.stack(terms).mean())


def test_similarity_of_the_layers_of_models():
    model = timm.create_model("ceit_nano", **SMALL["ceit_nano"]).eval()
    other = timm.create_model("cvt_nano", **SMALL["cvt_nano"]).eval()
    batches = list(torch.randn(14, 3, 32, 32).split(6))  # the last one is too small to count
    found = feature_similarity(model, batches)
    assert (found.rows, found.columns, found.n) == (["stem", "blocks.0", "blocks.1", "blocks.2"], found.rows, 12)
    matrix = np.array(found.cka)
    np.testing.assert_allclose(matrix.diagonal(), 1)
    np.testing.assert_allclose(matrix, matrix.T)
    both = feature_similarity(model, batches, ["stem"], other)
    assert (both.rows, both.columns) == (["stem"], ["stages.0", "stages.1", "stages.2"])
    json.dumps(asdict(both))
    with pytest.raises(WeftError, match=r"Did you mean 'blocks.1'"):
        feature_similarity(model, batches, ["block.1"])
    with pytest.raises(WeftError, match="at least 4 pictures"):
        feature_similarity(model, [torch.randn(3, 3, 32, 32)])
    with pytest.raises(WeftError, match=r"stages.2 was not called; a fused model leaves layers out"):
        feature_similarity(weft.fuse(other), batches)


# Robustness -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-12, 12), st.integers(-12, 12))
def test_shifted_pictures_are_numpys(height, width, down, right):
    x = torch.arange(2.0 * height * width).view(1, 2, height, width)
    margin = ((0, 0), (0, 0), (12, 12), (12, 12))
    padded = np.pad(x.numpy(), margin, mode="reflect")
    wanted = padded[:, :, 12 - down : 12 - down + height, 12 - right : 12 - right + width]
    np.testing.assert_array_equal(shifted(x, down, right).numpy(), wanted)


def test_scaled_pictures_keep_their_size_and_middle():
    x = torch.randn(1, 3, 12, 10)
    assert torch.equal(scaled(x, 1), x)
    small = scaled(x, 0.5)
    wanted = nn.functional.interpolate(x, (6, 5), mode="bilinear", antialias=True)
    assert small.shape == x.shape
    assert torch.equal(small[:, :, 3:9, 3:8], wanted)
    large = nn.functional.interpolate(x, (24, 20), mode="bilinear", antialias=True)
    assert torch.equal(scaled(x, 2), large[:, :, 6:18, 5:15])


def test_robustness_counts_answers():
    """A classifier that reads one pixel: the right half of the first picture is 1, of the second all."""
    pictures = torch.zeros(2, 1, 8, 8)
    pictures[0, :, :, 4:], pictures[1] = 1, 1

    def answer(x: Tensor) -> Tensor:
        said = x[:, 0, 4, 4]
        return torch.stack([1 - said, said], dim=1)

    labels = torch.tensor([1, 0])
    found = robustness(answer, [(pictures[:1], labels[:1]), (pictures[1:], labels[1:])], scales=(2,), shifts=(1,))
    scale, shift = found
    assert (scale.kind, scale.change, scale.agreement, scale.accuracy) == ("scale", 2, 1, 0.5)
    assert (shift.kind, shift.change, shift.agreement, shift.accuracy) == ("shift", 1, 7 / 8, 3 / 8)
    assert (shift.n, shift.accuracy_before) == (2, 0.5)
    assert robustness(answer, [(pictures, None)], scales=(), shifts=(1,))[0].accuracy is None
    with pytest.raises(WeftError, match=r"scales=0 is not a positive number"):
        robustness(answer, [(pictures, None)], scales=(0,))
