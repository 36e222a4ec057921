"""The contract, for every family and every switch: sizes, features, heads, precision, layout, compile, export."""

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.conftest import randomise
from tests.helpers.variants import NANO, PLAIN, SMALL, SWITCHES
from weft.catalog.catalog import catalog
from weft.models.base import HybridModel
from weft.models.ceit import LeFF
from weft.models.cvt import CvT
from weft.models.layers import PatchConv, StochasticDepth, add_branch, pad_to_multiple, resize_grid
from weft.models.performer import PerformerAttention, SoftSplit
from weft.models.registry import FAMILIES
from weft.models.vitae import PRM

every_switch = pytest.mark.parametrize(("name", "args"), SWITCHES.values(), ids=SWITCHES)
# Compilers take seconds each: one model of each of the papers' families, and all switches in `make test-all`.
QUICK = {key for key in PLAIN if SWITCHES[key][0] in NANO}
every_switch_compiled = pytest.mark.parametrize(
    ("name", "args"),
    [pytest.param(*s, id=key, marks=() if key in QUICK else pytest.mark.slow) for key, s in SWITCHES.items()],
)
every_family = pytest.mark.parametrize("name", SMALL)


def test_every_family_is_in_the_lists():
    """What is tested here is what the registry has, but for `resnet_v1`, which is timm's class."""
    families = {family for family, file in FAMILIES.items() if any(is_hybrid(entry) for entry in vars(file).values())}
    assert {*FAMILIES} - families == {"resnet_v1"}
    for models in (SMALL, {name for name, _ in SWITCHES.values()}):
        assert {family for family in FAMILIES if {*timm.list_models(module=family)} & {*models}} == families
    assert {SWITCHES[key][0] for key in PLAIN} == {*SMALL}
    assert len(PLAIN) == len(SMALL)


def is_hybrid(entry) -> bool:
    return isinstance(entry, type) and issubclass(entry, HybridModel)


def small(name: str, **args) -> nn.Module:
    return randomise(timm.create_model(name, **{**SMALL[name], **args}))


# Sizes ----------------------------------------------------------------------------------------------------------


@every_switch
def test_any_height_and_width(name, args):
    """Features have the promised width and stride at sizes that are neither square nor multiples of anything."""
    model = randomise(timm.create_model(name, num_classes=5, **args))
    for height, width in ((64, 64), (37, 90), (101, 16)):
        picture = torch.randn(2, 3, height, width)
        logits = model(picture)
        assert logits.shape == (2, 5)
        assert logits.isfinite().all()
        maps = model.forward_intermediates(picture, intermediates_only=True)
        assert len(maps) == len(model.feature_info)
        for feature, info in zip(maps, model.feature_info, strict=True):
            grid = [-(-side // info["reduction"]) for side in (height, width)]
            assert feature.shape[:2] == (2, info["num_chs"])
            # The 7x7 stride-4 embedding of CvT rounds down where a patch would be less than half full.
            assert all(0 <= g - f <= 1 for g, f in zip(grid, feature.shape[2:], strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(9, 120), st.integers(9, 120), st.sampled_from([*SMALL]))
def test_batch_does_not_matter(height, width, name):
    """A picture gets the same logits alone and in a batch, at any size."""
    model = small(name)
    pictures = torch.randn(3, 3, height, width)
    with torch.no_grad():
        torch.testing.assert_close(model(pictures)[1:2], model(pictures[1:2]), rtol=1e-4, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 8))
def test_padding_loses_nothing(height, width, multiple):
    x = torch.randn(1, height, width, 2)
    padded = pad_to_multiple(x, multiple)
    assert padded.shape[1] % multiple == padded.shape[2] % multiple == 0
    assert padded.shape[1] - height < multiple
    assert torch.equal(padded[:, :height, :width], x)
    assert padded.sum().item() == pytest.approx(x.sum().item(), abs=1e-4)


@pytest.mark.parametrize("scripted", [False, True], ids=["eager", "scripted"])
@pytest.mark.parametrize(("height", "width", "size"), [(8, 12, 4), (9, 7, 4), (5, 3, 2), (16, 16, 16)])
def test_a_convolution_of_patches_is_a_product(height, width, size, scripted):
    """In float64 with all gradients, and odd sizes padded as CeiT does it."""
    layer = PatchConv(3, 5, size, dtype=torch.float64)
    function = torch.jit.script(layer) if scripted else layer
    x = torch.randn(2, height, width, 3, dtype=torch.float64, requires_grad=True)
    leaves = x, layer.weight, layer.bias
    padded = pad_to_multiple(x, size)
    ours = function(padded)
    theirs = F.conv2d(padded.permute(0, 3, 1, 2), layer.weight, layer.bias, stride=size).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours, theirs)
    up = torch.randn_like(ours)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, up), torch.autograd.grad(theirs, leaves, up))
    shapes = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
    assert shapes == {"weight": (5, 3, size, size), "bias": (5,)}


def test_positions_resize_as_in_deit():
    """Against torch's own bicubic on the published (1, 1 + N, C) layout, square and not."""
    grid = torch.randn(14, 14, 6, dtype=torch.float64)
    expected = nn.functional.interpolate(grid.permute(2, 0, 1)[None], size=(24, 9), mode="bicubic", align_corners=False)
    torch.testing.assert_close(resize_grid(grid, 24, 9), expected[0].permute(1, 2, 0))
    assert resize_grid(grid, 14, 14) is grid


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [("cvt_nano", dict(pos_embed="every"), [(24, 40), (12, 20), (6, 10)]), ("ceit_nano", {}, [(12, 20)])],
)
def test_img_size_sets_the_positions(name, args, expected):
    model = timm.create_model(name, img_size=(48, 80), **args)
    grids = [p.shape[:2] for n, p in model.named_parameters() if n.endswith("pos_embed.grid")]
    assert grids == expected
    tagged = timm.create_model("ceit_tiny.in1k_384", device="meta")
    assert tagged.pos_embed.grid.shape == (24, 24, 192)


@pytest.mark.parametrize("name", ["cvt_13", "ceit_tiny", "cetnet_tiny"])
@pytest.mark.parametrize("stride", [1, 2])
def test_stem_stride_keeps_the_weights(name, stride):
    usual = timm.create_model(name, device="meta", img_size=32)
    fine = timm.create_model(name, device="meta", img_size=32, stem_stride=stride)
    shapes = [{k: v.shape for k, v in m.state_dict().items() if "pos_embed" not in k} for m in (usual, fine)]
    assert shapes[0] == shapes[1]
    reductions = [[info["reduction"] for info in m.feature_info] for m in (usual, fine)]
    assert [r * stride // 4 for r in reductions[0]] == reductions[1]


# Features and heads ---------------------------------------------------------------------------------------------


@every_switch
def test_features_only_is_forward_intermediates(name, args):
    model = randomise(timm.create_model(name, **args))
    features = timm.create_model(name, features_only=True, **args).eval()
    features.model.load_state_dict(model.state_dict(), strict=False)
    picture = torch.randn(1, 3, 50, 70)
    indices = features.feature_info.out_indices
    expected = model.forward_intermediates(picture, indices=list(indices), intermediates_only=True)
    assert len(expected) >= 3
    for got, want in zip(features(picture), expected, strict=True):
        torch.testing.assert_close(got, want)


@every_family
def test_forward_is_head_of_features(name):
    model = small(name, **({"projector": "every"} if name == "vt_resnet_nano" else {}))  # else its head reads no map
    picture = torch.randn(2, 3, 40, 56)
    torch.testing.assert_close(model(picture), model.forward_head(model.forward_features(picture)))
    final, maps = model.forward_intermediates(picture, norm=True)
    torch.testing.assert_close(final, model.forward_features(picture))
    tokens = final if final.ndim == 3 else final.flatten(2).transpose(1, 2)
    last = maps[-1].flatten(2).transpose(1, 2)
    torch.testing.assert_close(last, tokens[:, model.num_prefix_tokens :])  # normalised, it is what the head sees
    _, nhwc = model.forward_intermediates(picture, norm=True, output_fmt="NHWC")
    torch.testing.assert_close(nhwc[-1].permute(0, 3, 1, 2), maps[-1])


@every_family
def test_stop_early_runs_less_and_changes_nothing(name):
    model = small(name)
    picture = torch.randn(1, 3, 48, 48)
    model.register_module("norm", None)  # would fail if the end of the network were run
    maps = model.forward_intermediates(picture, indices=[0, 1], intermediates_only=True)
    last, same = model.forward_intermediates(picture, indices=[0, 1], stop_early=True)
    torch.testing.assert_close(maps[1], same[1])
    torch.testing.assert_close(last, maps[1])


@every_family
def test_pruning_nothing_away_keeps_the_logits(name):
    model, picture = small(name), torch.randn(1, 3, 48, 48)
    before = model(picture)
    levels = len(model.feature_info)
    assert model.prune_intermediate_layers(levels, prune_head=False) == list(range(levels))
    torch.testing.assert_close(model(picture), before)


@every_family
def test_pooling(name):
    """Every pooling is what its name says, over the map without the class token."""
    model = small(name, num_classes=0, img_size=48)
    picture = torch.randn(2, 3, 48, 48)
    features = model.forward_features(picture)
    tokens = features if features.ndim == 3 else features.flatten(2).transpose(1, 2)
    prefix, spatial = tokens[:, : model.num_prefix_tokens], tokens[:, model.num_prefix_tokens :]
    expected = {
        "avg": spatial.mean(1),
        "max": spatial.amax(1),
        "avgmax": (spatial.mean(1) + spatial.amax(1)) / 2,
        "": features,
    }
    if model.num_prefix_tokens:
        expected["token"] = prefix[:, 0]
    for pool, want in expected.items():
        model.reset_classifier(0, pool)
        torch.testing.assert_close(model(picture), want)
    without = small("cvt_nano", class_token=False, global_pool="avg", num_classes=0)
    torch.testing.assert_close(without(picture), without.forward_features(picture).mean((2, 3)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SMALL else pytest.mark.slow) for n in weft.list_models()]
)
def test_in_chans_and_classes(name):
    model = timm.create_model(name, in_chans=5, num_classes=7, device="meta", dtype=torch.float64)
    assert model(torch.empty(2, 5, 64, 64, device="meta", dtype=torch.float64)).shape == (2, 7)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.reset_classifier(3)
    classifier = model.get_classifier()
    assert (classifier.out_features, classifier.weight.dtype) == (3, torch.float64)


@pytest.mark.parametrize(
    "name", [pytest.param(info.name, marks=pytest.mark.slow if info.macs > 5e9 else ()) for info in catalog()]
)
def test_configuration_of_every_tag(name):
    """What timm's own test of configurations checks, also at the 384 pixels which that one leaves out."""
    model = timm.create_model(name, device="meta")
    cfg, state = model.pretrained_cfg, model.state_dict()
    first = [cfg["first_conv"]] if isinstance(cfg["first_conv"], str) else cfg["first_conv"]
    assert {f"{layer}.weight" for layer in (*first, cfg["classifier"])} <= state.keys()
    picture = torch.empty(1, *cfg["input_size"], device="meta")
    _, (*_, last) = model.forward_intermediates(picture)
    assert last.shape[2:] == cfg["pool_size"]
    assert model(picture).shape == (1, cfg["num_classes"])


# Training -------------------------------------------------------------------------------------------------------


@every_switch
def test_gradient_checkpointing_changes_nothing(name, args):
    model = timm.create_model(name, **args, drop_path_rate=0.5)
    picture, gradients = torch.randn(4, 3, 32, 32), []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        assert model.grad_checkpointing == enabled
        model.zero_grad()
        torch.manual_seed(1)
        model(picture).square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_drop_path_takes_map_and_class_token_together():
    drop = StochasticDepth(0.5).train()
    keep = drop(torch.ones(64, 3, 3, 2))
    assert set(keep.tolist()) == {0.0, 2.0}
    for shape in ((64, 10, 2), (64, 3, 3, 2)):  # tokens, a map
        total = add_branch(torch.zeros(shape), torch.ones(shape), keep)
        assert torch.equal(total.flatten(1), keep.view(-1, 1).expand(64, total[0].numel()))
    assert drop.eval()(total) is None


@pytest.mark.parametrize(("name", "blocks"), [("cvt_13", 13), ("ceit_tiny", 12), ("cetnet_tiny", 24)])
def test_layer_decay(name, blocks):
    """Learning rates grow from the stem over the blocks to the head, one step per block."""
    model = timm.create_model(name, num_classes=3)
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {n: scale[id(p)] for n, p in model.named_parameters()}
    assert len(set(scales.values())) == blocks + 2
    stem = next(n for n in scales if n.startswith(model.pretrained_cfg["first_conv"]))
    assert min(scales.values()) == scales[stem] == 0.5 ** (blocks + 1)
    assert scales["head.weight"] == 1.0
    assert scales["norm.weight"] == max(s for n, s in scales.items() if "blocks" in n) == 0.5
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True))
    assert len(coarse) == (len(model.stages) + 2 if hasattr(model, "stages") else blocks + 2)


@every_switch
def test_init_weights_fills_an_empty_model(name, args):
    """After meta construction and to_empty, init_weights leaves nothing uninitialised."""
    model = timm.create_model(name, device="meta", **args).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    model.init_weights()
    for key, value in model.state_dict().items():
        assert value.isfinite().all(), key
        assert not (value == -1).all(), key


@pytest.mark.parametrize("name", [n if n in NANO else pytest.param(n, marks=pytest.mark.slow) for n in SMALL])
def test_learns(name):
    """A few steps on one batch drive the loss down: gradients reach what they should."""
    model = timm.create_model(name, num_classes=4, img_size=32, drop_path_rate=0.0)
    pictures, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(pictures), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# Precision, layout, compilers -----------------------------------------------------------------------------------


@every_family
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(name, dtype):
    model, picture = small(name), torch.randn(2, 3, 48, 40)
    with torch.no_grad():
        exact = model(picture)
        with torch.autocast("cpu", dtype):
            rough = model(picture)
    assert rough.dtype == dtype
    error = (rough.float() - exact).abs().max() / exact.abs().max()
    assert error < {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype]


@pytest.mark.parametrize("name", [name for name in SMALL if name != "vt_resnet_nano"])  # VT has no norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_is_computed_in_float32(name, dtype):
    """In a half-precision model, too: a LayerNorm's output is the float32 result, rounded once."""
    norm = next(m for m in small(name).modules() if isinstance(m, nn.LayerNorm)).to(dtype)
    x = (100 + torch.randn(5, norm.normalized_shape[0])).to(dtype)
    exact = nn.functional.layer_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps)
    # float32 leaves 1e-5 where 100 is taken off 100; arithmetic in half precision leaves 0.01 and more.
    torch.testing.assert_close(norm(x), exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-5)


class Copies(TorchDispatchMode):
    """Counts the operations that do nothing but move data."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.joins = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.joins += func.overloadpacket is torch.ops.aten.cat
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def glued(name: str, model: nn.Module, args: dict) -> int:
    """How often class token and map are put together: in every block, and in forward_features."""
    if name == "cvt_nano":
        return 4 * len(model.stages[-1].blocks) + 1
    if name == "ceit_nano":  # LCA glues the class tokens of all layers
        return (2 + (args.get("leff_kernel") == 0)) * len(model.blocks) + 1 + args.get("lca", True)
    if name == "pvt_small":
        return 2 * len(model.stages[-1].blocks) + 1
    return 2 * len(model.blocks) + 1


def parted(model: nn.Module) -> int:
    """How often the map is taken from beside the class token for a convolution: in every block that has both."""
    if not model.num_prefix_tokens:
        return 0
    if isinstance(model, CvT):
        return sum(block.attn.has_convs for block in model.stages[-1].blocks)
    return sum(isinstance(m, LeFF) and m.dwconv is not None for m in model.modules())


# Windows are copied out of the map, and tokens of VT for their transformer; these families say how often themselves.
COPYING = ("cetnet_nano", "ce_swin_tiny", "cswin_tiny", "vt_resnet_nano")


@pytest.mark.parametrize(
    ("name", "args"), [pytest.param(*s, id=key) for key, s in SWITCHES.items() if s[0] not in COPYING]
)
def test_no_copy_between_attention_and_convolution(name, args):
    """On a channels-last picture the forward pass moves no data; on another one it moves the picture once.

    The exceptions are what the methods ask for: gluing the class token to the map, at most once for a block and each of
    q, k and v or LeFF, and parting them again for a convolution; gluing the branches of a PRM, and the
    features of a Performer to its epsilon; a soft split, which copies each pixel into its windows; and CeiT's patches,
    which are laid side by side for one product, as is its weight.
    """
    model = randomise(timm.create_model(name, img_size=64, **args))
    picture = torch.randn(2, 3, 64, 64)
    kinds = SoftSplit, PRM | PerformerAttention, PatchConv
    splits, glues, patches = (sum(isinstance(m, kind) for m in model.modules()) for kind in kinds)
    for layout, allowed in ((picture.to(memory_format=torch.channels_last), 0), (picture, 1)):
        with torch.no_grad(), Copies() as copies:
            model(layout)
        assert len(copies.seen) == allowed + splits + 2 * patches + parted(model)
        assert copies.joins == glues + (glued(name, model, args) if model.num_prefix_tokens else 0)
    for feature in model.forward_intermediates(picture, output_fmt="NHWC", intermediates_only=True):
        assert feature.is_contiguous()


@pytest.mark.parametrize("name", ["ceit_nano", "vt_resnet_nano", "cswin_tiny"])  # others: test_timm.py, test_vitae.py
@torch.no_grad()
def test_scripts(name):
    model, picture = small(name), torch.randn(1, 3, 40, 33)
    torch.testing.assert_close(torch.jit.script(model)(picture), model(picture), rtol=1e-4, atol=1e-5)


@every_switch_compiled
def test_compiles_without_graph_breaks(name, args):
    torch.compiler.reset()
    model = randomise(timm.create_model(name, **args))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        picture = torch.randn(2, 3, 40, 56)
        torch.testing.assert_close(compiled(picture), model(picture))


@pytest.mark.slow
@every_family
def test_compiles_with_inductor(name):
    model, picture = small(name), torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(picture), model(picture), rtol=1e-4, atol=1e-5)


@every_switch_compiled
def test_exports_with_dynamic_batch_height_and_width(name, args):
    """One exported graph serves every batch and size, the default size and odd ones alike."""
    model = randomise(timm.create_model(name, **args))
    batch, height, width = (torch.export.Dim(n, min=m) for n, m in (("batch", 1), ("height", 48), ("width", 48)))
    pooled = name == "cetnet_nano" and (args.get("embed") == "patch" or args.get("ce_unit") == "dense")
    fixed = pooled or "avg" in args.get("projection", "")  # these three export with one height and width
    dynamic = {0: batch} if fixed else {0: batch, 2: height, 3: width}
    exported = torch.export.export(model, (torch.randn(2, 3, 80, 72),), dynamic_shapes=(dynamic,)).module()
    with torch.no_grad():
        for shape in ((1, 3, 80, 72), (3, 3, 80, 72)) if fixed else ((1, 3, 64, 64), (3, 3, 57, 101), (2, 3, 80, 72)):
            picture = torch.randn(shape)
            torch.testing.assert_close(exported(picture), model(picture), rtol=1e-4, atol=1e-5)


# Wrong arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("cvt_13", dict(pos_embed="all"), "'none', 'first', 'last', 'every'"),
        ("cvt_13", dict(embed="overlap"), "'conv', 'patch'"),
        ("cvt_13", dict(projection=("conv", "max", "conv")), "'conv', 'avg', 'linear'"),
        ("cvt_13", dict(projection=("conv", "avg")), "2 entries"),
        ("cvt_13", dict(stride_kv=3), "1, 2"),
        ("cvt_13", dict(stride_kv=(2, 2, (1, 2))), "2 entries"),
        ("cvt_13", dict(mlp_ratio=(2.0, 4.0)), "2 entries"),
        ("cvt_13", dict(depths=(1, 2)), "3 stages"),
        ("cvt_13", dict(num_heads=(1, 3, 7)), "does not divide"),
        ("cvt_13", dict(mlp_ratio="4"), "positive"),
        ("cvt_13", dict(img_size="big", pos_embed="every"), "positive"),
        ("cvt_13", dict(num_classes=-1), "number of classes"),
        ("cvt_13", dict(class_token="yes"), "True, False"),
        ("ceit_tiny", dict(lca="no"), "True, False"),
        ("ceit_tiny", dict(leff_norm="False"), "True, False"),
        ("ceit_tiny", dict(drop_path_rate=1.5), "0 up to"),
        ("ceit_tiny", dict(i2t_channels=0), "positive"),
        ("cvt_13", dict(act_layer="relu"), "'quick_gelu', 'gelu'"),
        ("cvt_13", dict(stem_stride=3), "1, 2, 4"),
        ("cvt_13", dict(class_token=False), "'avg', 'max', 'avgmax', ''"),
        ("cvt_13", dict(global_pool="mean"), "'token', 'avg', 'max', 'avgmax', ''"),
        ("ceit_tiny", dict(i2t_layers="k7s2"), "'k3s2+k3s2', 'k7s2+maxpool'"),
        ("ceit_tiny", dict(leff_kernel=2), "0, 1, 3, 5"),
        ("ceit_tiny", dict(leff_kernel=True), "0, 1, 3, 5"),
        ("ceit_tiny", dict(stem_stride=8), "1, 2, 4"),
        ("ceit_tiny", dict(depth=1.5), "whole number"),
        ("ceit_tiny", dict(depth=True), "whole number"),
        ("ceit_tiny", dict(img_size=(224,)), "height and a width"),
        ("vitae_tiny", dict(groups=2.0), "whole number"),
        ("vitae_tiny", dict(token_dims=(64, 64, 256.0)), "whole number"),
        ("vt_resnet18", dict(num_modules=1.5), "whole number"),
        ("vt_resnet18", dict(carried_tokens=8, later_tokenizer="filter"), "'recurrent'"),
        ("t2t_vit_7", dict(depth=1.5), "whole number"),
        ("pvt_small", dict(sr_ratios=(8, 4, 2.5, 1)), "whole number"),
        ("cswin_tiny", dict(depths=(1, 2, 2.5, 1)), "whole number"),
        ("cvt_13", dict(depths=(1, 2, 0)), "whole number"),
        ("cvt_13", dict(num_classes=2.5), "number of classes"),
        ("cetnet_tiny", dict(depths=(1, -1, 1, 1)), "whole number"),
        ("cetnet_tiny", dict(num_heads=(2, 4, "8", 16)), "whole number"),
        ("cetnet_tiny", dict(window_size=3.5), "whole number"),
        ("cetnet_tiny", dict(ce_unit="resnet", embed_dim=36, num_heads=(1, 2, 4, 8)), "multiples of 4"),
        ("cetnet_tiny", dict(le="conv"), "'qkv', 'pre', 'none'"),
        ("cetnet_tiny", dict(embed="ghost"), "'ce', 'conv', 'patch'"),
        ("cetnet_tiny", dict(ce_unit="mb"), "'fused', 'mbconv', 'ghost', 'dense', 'shuffle', 'resnet', 'seresnet'"),
        ("cetnet_tiny", dict(ce_layers=2), "1, 3, 5, 7"),
        ("cetnet_tiny", dict(ce_layers=1, ce_unit="ghost"), "'fused' or 'mbconv'"),
        ("cetnet_tiny", dict(ce_expand=2), "(2, 1)"),
        ("cetnet_tiny", dict(ce_expand=(2, 3)), "1, 2"),
        ("cetnet_tiny", dict(pattern="C-T-C-T"), "'C-T-C-T-C-T-C-T'"),
        ("cetnet_tiny", dict(pattern="C-T-C-T-C-T-C-X"), "'C-T-C-T-C-T-C-T'"),
        ("cetnet_tiny", dict(window_size=0), "positive"),
        ("cetnet_tiny", dict(depths=(2, 2, 6)), "4 stages"),
        ("cetnet_tiny", dict(num_heads=(3, 6, 12, 24)), "does not divide"),
        ("cetnet_tiny", dict(global_pool="token"), "class token"),
    ],
)
def test_wrong_values_say_which_exist(name, args, message):
    with pytest.raises(weft.WeftError) as error:
        timm.create_model(name, device="meta", **args)
    assert message in str(error.value)
    assert next(iter(args)) in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(weft.WeftError, match="cvt_13"):
        weft.create_model("cvt13")
    assert weft.list_models("ceit*") == ["ceit_base", "ceit_nano", "ceit_small", "ceit_tiny"]
    assert weft.list_models("nano") == NANO
    assert weft.create_model("cvt_nano", num_classes=2).num_classes == 2
