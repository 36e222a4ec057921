"""VT-ResNet: the network against the equations, what its switches make of it, the ResNet against torchvision's."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.conftest import randomise
from tests.helpers.places import DATA
from tests.helpers.variants import SWITCHES, VT
from tests.models.test_vt import numbers, plain_filter, plain_projector, plain_recurrent, plain_transformer
from weft.models import vt
from weft.models.weights.host import load_host

VT_SWITCHES = {key: value for key, value in SWITCHES.items() if value[0] == "vt_resnet_nano"}
every_switch = pytest.mark.parametrize("args", [args for _, args in VT_SWITCHES.values()], ids=VT_SWITCHES)


# The network ----------------------------------------------------------------------------------------------------


def plain_module(m: vt.VisualTransformer, x: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """One picture, (C, N) pixels and (CT, L) tokens."""
    if isinstance(m.tokenizer, vt.FilterTokenizer):
        tokens = plain_filter(m.tokenizer, x, tokens)
    elif isinstance(m.tokenizer, vt.RecurrentTokenizer):
        tokens = plain_recurrent(m.tokenizer, x, tokens)
    tokens = plain_transformer(m.relation, tokens) if isinstance(m.relation, vt.Transformer) else tokens
    return (x if m.projector is None else plain_projector(m.projector, x, tokens)), tokens


@pytest.mark.parametrize(
    "args",
    [{}, dict(num_modules=3, num_relations=2, carried_tokens=4), dict(projector="every"), dict(projector="none")],
    ids=["default", "table-8-r34", "map-head", "no-projector"],
)
def test_network_equals_the_equations(args):
    """torchvision's ResNet-18 and the equations above: logits and every gradient, in training mode and float64."""
    ours = timm.create_model(
        "vt_resnet18", num_classes=7, dtype=torch.float64, **args, **{k: v for k, v in VT.items() if k in WIDTHS}
    ).train()
    theirs = torchvision.models.resnet18().double().train()
    theirs.load_state_dict(ours.resnet.state_dict(), strict=False)
    picture = numbers(3, 3, 66, 50)
    logits = ours(picture)
    x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(picture))))
    x = theirs.layer3(theirs.layer2(theirs.layer1(x)))
    pooled = []
    for pixels in x.flatten(2):
        tokens = None
        for module in ours.vt:
            pixels, tokens = plain_module(module, pixels, tokens)
        pooled.append((pixels if args.get("projector") == "every" else tokens).mean(1))
    expected = torch.stack(pooled) @ ours.head.weight.T + ours.head.bias
    torch.testing.assert_close(logits, expected)

    expected.square().sum().backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    gradients |= {f"resnet.{n}": p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    ours.zero_grad()
    logits.square().sum().backward()
    assert gradients.keys() == {n for n, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-7, atol=1e-9, msg=lambda m, n=name: n + m)


WIDTHS = ("token_dim", "channels", "num_tokens", "group_width", "num_heads")


def kinds(model: nn.Module) -> list[tuple[str, str, bool]]:
    names = ((type(m.tokenizer).__name__, type(m.relation).__name__, m.projector is not None) for m in model.vt)
    return [(t.removesuffix("Tokenizer"), r, p) for t, r, p in names]


def test_what_the_modules_are_made_of():
    def of(name="vt_resnet18", **args):
        return kinds(timm.create_model(name, device="meta", **args))

    assert of() == [("Filter", "Transformer", True), ("Recurrent", "Transformer", False)]
    assert of("vt_resnet34") == [of()[0], ("Recurrent", "Transformer", True), of()[1]]
    assert of("vt_resnet50") == of("vt_resnet101") == [of()[0], ("Recurrent", "Transformer", True)]
    assert of(tokenizer="clustering")[0] == ("Clustering", "Transformer", True)
    assert [t for t, _, _ in of(tokenizer="pooling", later_tokenizer="pooling")] == ["Pooling", "Pooling"]
    assert [t for t, _, _ in of(later_tokenizer="clustering")] == ["Filter", "Clustering"]
    assert of(projector="none") == [("Filter", "Transformer", False), ("NoneType", "Transformer", False)]
    assert [r for _, r, _ in of(relation="graph")] == ["GraphConvolution"] * 2
    assert [r for _, r, _ in of(relation="none")] == ["TokenConv"] * 2
    assert [r for _, r, _ in of("vt_resnet34", num_relations=2)] == ["Identity", "Transformer", "Transformer"]
    model = timm.create_model("vt_resnet34", device="meta", carried_tokens=8)
    assert [m.tokenizer.carried for m in list(model.vt)[1:]] == [8, 8]
    for name, modules in (("vt_resnet18_table8", 2), ("vt_resnet34_table8", 3)):
        carrying = timm.create_model(name, device="meta")
        assert [m.tokenizer.carried for m in list(carrying.vt)[1:]] == [8] * (modules - 1)
        assert [r for _, r, _ in of(name)] == ["Identity"] * (modules - 2) + ["Transformer"] * 2
    assert [m.projector.query.groups for m in list(model.vt)[:2]] == [8, 8]
    fine = timm.create_model("vt_resnet18", device="meta", group_width=32)
    assert (fine.vt[0].projector.query.groups, fine.vt[1].tokenizer.heads) == (16, 16)


@pytest.mark.parametrize(
    ("stride", "conv_stride", "reductions"), [(4, 2, [2, 4, 8, 16]), (2, 2, [2, 2, 4, 8]), (1, 1, [1, 1, 2, 4])]
)
def test_stem_stride(stride, conv_stride, reductions):
    """The max-pooling goes first, then the stride of conv1; weights keep their shapes."""
    model = randomise(timm.create_model("vt_resnet_nano", stem_stride=stride, **VT))
    assert [info["reduction"] for info in model.feature_info] == [*reductions, reductions[-1]]
    assert model.resnet.conv1.stride == (conv_stride, conv_stride)
    usual = timm.create_model("vt_resnet_nano", **VT).state_dict()
    assert {k: v.shape for k, v in usual.items()} == {k: v.shape for k, v in model.state_dict().items()}
    picture = torch.randn(1, 3, 32, 48)
    stem, layer1, *_ = model.forward_intermediates(picture, intermediates_only=True)
    pooled = F.max_pool2d(stem, 3, 2, 1) if stride == 4 else stem
    torch.testing.assert_close(model.resnet.layer1(pooled), layer1)


@pytest.mark.parametrize("projector", ["inner", "none", "every"])
def test_what_the_head_reads(projector):
    """The tokens of the last module, or its map where it has one; every pooling is what its name says."""
    model = randomise(timm.create_model("vt_resnet_nano", **VT, projector=projector, num_classes=0))
    picture = torch.randn(2, 3, 40, 56)
    features, maps = model.forward_intermediates(picture)
    torch.testing.assert_close(features, model.forward_features(picture))
    if projector == "every":
        assert features.shape == (2, 64, 10, 14)
        torch.testing.assert_close(features, maps[-1])
        features = features.flatten(2).transpose(1, 2)
    assert features.shape == (2, 140 if projector == "every" else 8, 64)
    pools = {"avg": features.mean(1), "max": features.amax(1), "avgmax": (features.mean(1) + features.amax(1)) / 2}
    for pool, want in pools.items():
        model.reset_classifier(0, pool)
        torch.testing.assert_close(model(picture), want)
    model.reset_classifier(0, "")
    torch.testing.assert_close(model(picture), model.forward_features(picture))


@every_switch
def test_every_parameter_has_a_gradient(args):
    """Distributed training refuses others, in the classifier and in whatever part of it gives features."""
    picture = torch.randn(2, 3, 40, 32)
    model = timm.create_model("vt_resnet_nano", **args)
    model(picture).mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    for indices in (None, (0,), (0, 2), (3,), (-1,)):
        extra = {} if indices is None else dict(out_indices=indices)
        features = timm.create_model("vt_resnet_nano", features_only=True, **args, **extra)
        sum(feature.square().mean() for feature in features(picture)).backward()
        assert [n for n, p in features.named_parameters() if p.grad is None] == []


def test_features_end_with_the_map_of_the_last_projector():
    features = timm.create_model("vt_resnet34", features_only=True, device="meta")
    assert features.feature_info.reduction() == [2, 4, 8, 16]
    assert features.feature_info.channels() == [64, 64, 128, 512]
    assert features.feature_info.module_name() == ["resnet.act1", "resnet.layer1", "resnet.layer2", "vt.1"]
    assert len(features.model.vt) == 2
    plain = timm.create_model("vt_resnet34", features_only=True, device="meta", projector="none")
    assert plain.feature_info.module_name()[-1] == "resnet.layer3"
    assert len(plain.model.vt) == 0


def test_pruning_without_loss_keeps_the_logits():
    for projector in ("inner", "none", "every"):
        model = randomise(timm.create_model("vt_resnet_nano", **VT, projector=projector))
        picture = torch.randn(1, 3, 48, 48)
        before, levels = model(picture), len(model.feature_info)
        assert model.prune_intermediate_layers(levels, prune_head=False) == list(range(levels))
        torch.testing.assert_close(model(picture), before)
        model.prune_intermediate_layers([1])
        assert model(picture).shape == (1, 8, 48, 48)


@settings(max_examples=25, deadline=None)
@given(st.integers(9, 100), st.integers(9, 100), st.sampled_from([*VT_SWITCHES]), st.integers(1, 3))
def test_any_size_and_batch(height, width, key, batch):
    """Maps have the promised stride, rounded up; a picture gets the same logits alone and in a batch."""
    _, args = VT_SWITCHES[key]
    model = randomise(timm.create_model("vt_resnet_nano", **args))
    pictures = torch.randn(batch, 3, height, width)
    with torch.no_grad():
        for feature, info in zip(
            model.forward_intermediates(pictures, intermediates_only=True), model.feature_info, strict=True
        ):
            grid = [-(-side // info["reduction"]) for side in (height, width)]
            assert list(feature.shape) == [batch, info["num_chs"], *grid]
        torch.testing.assert_close(model(pictures)[-1:], model(pictures[-1:]), rtol=1e-3, atol=1e-4)


class Copied(TorchDispatchMode):
    """Sizes of the tensors that the forward pass copies."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@every_switch
def test_maps_are_never_copied(args):
    """Tokens are, by torch's attention with keys and values of unequal width and by products with them.

    K-means makes numbers of the clusters of its pixels, one for each pixel and token.
    """
    model = randomise(timm.create_model("vt_resnet_nano", **args))
    picture = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.no_grad(), Copied() as copied:
        model(picture)
    pixels = 16 * 16
    assert max(copied.sizes, default=0) <= 2 * args["num_tokens"] * max(args["token_dim"], pixels)
    assert args["num_tokens"] < min(args["widths"][-1], args["channels"])  # else that could be a map


# Training -------------------------------------------------------------------------------------------------------


def test_initialisation():
    model = timm.create_model("vt_resnet18")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | vt.TokenConv):
            fan_out = module.weight.shape[0] * module.weight[0, 0].numel()
            gain = 1 if isinstance(module, vt.TokenConv | vt.GroupedConv) else 2  # no norm follows in a VT module
            assert module.weight.std().item() == pytest.approx((gain / fan_out) ** 0.5, rel=0.1), module
            assert module.bias is None or not module.bias.any()
    alone = vt.VisualTransformer(64, 64)
    assert alone.relation.f1.weight.std().item() == pytest.approx((1 / 1024) ** 0.5, rel=0.1)
    graph = vt.GraphConvolution(8, 64)
    assert graph.adjacency.std().item() == pytest.approx((1 / 64) ** 0.5, rel=0.1)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", ["vt_resnet34", "vt_resnet50", "vt_resnet101"])
def test_a_new_network_is_of_ordinary_size(name):
    """In eval mode, too, and so in half precision: blocks start as the identity."""
    model, picture = timm.create_model(name).eval(), torch.randn(1, 3, 96, 96)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert model(picture).abs().max() < 50


def test_stochastic_depth_grows_over_blocks_and_modules():
    model = timm.create_model("vt_resnet34", drop_path_rate=0.3)
    blocks = [block for name in ("layer1", "layer2", "layer3") for block in getattr(model.resnet, name)]
    rates = [block.drop_path.drop_prob if block.drop_path is not None else 0.0 for block in blocks]
    for module in model.vt:
        rates.append(module.relation.drop_path.drop_prob)
        if module.projector is not None:
            assert module.projector.drop_path.drop_prob == rates[-1]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.3, 16))


def test_dropout_and_stochastic_depth_act_on_branches():
    """With every branch dropped, transformer and projector return what came."""
    tokens, x = torch.randn(2, 5, 32), torch.randn(2, 4, 4, 16)
    for rates in (dict(drop_path=0.5), dict(proj_drop=0.5)):
        transformer = vt.Transformer(32, 4, **rates).train()
        for module in transformer.modules():
            if hasattr(module, "drop_prob"):
                module.drop_prob = 1 - 1e-9
            elif isinstance(module, nn.Dropout) and "proj_drop" in rates:
                module.p = 1.0
        assert torch.equal(transformer(tokens), tokens)
        assert not torch.equal(transformer.eval()(tokens), tokens)
    projector = vt.Projector(16, 32, 16, group_width=8, drop_path=0.5).train()
    projector.drop_path.drop_prob = 1 - 1e-9
    assert torch.equal(projector(x, tokens), x)
    model = timm.create_model("vt_resnet_nano", drop_rate=0.1, proj_drop_rate=0.2)
    assert (model.head_drop.p, *(m.relation.drop.p for m in model.vt)) == (0.1, 0.2, 0.2)


def test_layer_groups():
    model = timm.create_model("vt_resnet18", device="meta")
    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    firsts = [
        "resnet.bn1.weight",
        "resnet.layer1.0.conv1.weight",
        "resnet.layer3.1.conv1.weight",
        "vt.0.relation.f1.bias",
    ]
    assert [groups[name] for name in [*firsts, "vt.1.relation.f1.bias", "head.bias"]] == [0, 1, 6, 7, 8, 9]
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert [coarse[name] for name in [*firsts, "head.bias"]] == [0, 1, 3, 4, 6]


# The ResNet -----------------------------------------------------------------------------------------------------


def torchvision_maps(resnet: nn.Module, picture: Tensor) -> list[Tensor]:
    stem = resnet.relu(resnet.bn1(resnet.conv1(picture)))
    layer1 = resnet.layer1(resnet.maxpool(stem))
    layer2 = resnet.layer2(layer1)
    return [stem, layer1, layer2, resnet.layer3(layer2)]


def original_strides(resnet: nn.Module) -> None:
    """The stride from the 3x3 convolution of each first bottleneck to its first 1x1."""
    for stage in (resnet.layer2, resnet.layer3, resnet.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)


def check_trunk(ours: nn.Module, theirs: nn.Module) -> None:
    picture = torch.randn(2, 3, 75, 64, dtype=torch.float64)
    with torch.no_grad():
        maps = ours.double().forward_intermediates(picture, indices=[0, 1, 2, 3], intermediates_only=True)
        for got, want in zip(maps, torchvision_maps(theirs.double(), picture), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("depth", "args"), [(18, {}), (34, {}), (50, dict(bottleneck_stride="3x3")), (50, dict(bottleneck_stride="1x1"))]
)
def test_trunk_equals_torchvision(depth, args):
    theirs = randomise(getattr(torchvision.models, f"resnet{depth}")())
    ours = timm.create_model(f"vt_resnet{depth}", **args).eval()
    new = {key: value.clone() for key, value in ours.state_dict().items() if not key.startswith("resnet.")}
    load_host(ours, theirs.state_dict(), **args)
    if args.get("bottleneck_stride") == "1x1":
        original_strides(theirs)
    check_trunk(ours, theirs)
    assert {key.split(".")[0] for key in new} == {"vt", "head"}
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in new.items())


def test_timm_resnets_load_too(tmp_path):
    """From a file; grey pictures get the sum over the colours, as timm does it."""
    theirs = randomise(timm.create_model("resnet18"))
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "resnet18.pth")
    ours = timm.create_model("vt_resnet18", in_chans=1).eval()
    load_host(ours, tmp_path / "resnet18.pth")
    grey = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        expected = theirs.forward_intermediates(grey.expand(-1, 3, -1, -1), indices=[3], intermediates_only=True)[0]
        got = ours.forward_intermediates(grey, indices=[3], intermediates_only=True)[0]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", ["1x1", "3x3"])
def test_real_weights(stride):
    """A published ResNet-50, half precision on disk; it was trained with the stride in the 1x1 convolutions."""
    file = DATA / "resnet50-imagenet" / "resnet50_v1_fp16.safetensors"
    if not file.is_file():
        pytest.skip(f"{file} is not there; WEFT_DATA names the folder that holds resnet50-imagenet")
    theirs = torchvision.models.resnet50().eval()
    theirs.load_state_dict(load_file(file))
    if stride == "1x1":
        original_strides(theirs)
    ours = timm.create_model("vt_resnet50", bottleneck_stride=stride).eval()
    load_host(ours, file, bottleneck_stride=stride)
    assert ours.resnet.conv1.weight.dtype == torch.float32
    check_trunk(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("layer3.1.bn2.running_var"), "layer3.1.bn2.running_var (256,), which is missing"),
        (lambda s: s.update({"layer2.0.conv1.weight": torch.zeros(1)}), "layer2.0.conv1.weight"),
        (lambda s: s.update({"layer3.2.conv1.weight": torch.zeros(1)}), "layer3.2.conv1.weight"),
        (lambda s: s.update({"blocks.0.weight": torch.zeros(1)}), "blocks.0.weight"),
    ],
)
def test_other_weights_are_refused(change, message):
    state = torchvision.models.resnet18().state_dict()
    change(state)
    model = timm.create_model("vt_resnet18")
    before = model.resnet.conv1.weight.clone()
    with pytest.raises(weft.WeftError) as error:
        load_host(model, state)
    assert message in str(error.value)
    assert torch.equal(model.resnet.conv1.weight, before)
