"""Heads for segmentation: against segmentation_models_pytorch, against equations written out, and the papers' counts.

The counts of whole networks are rows of weft/catalog/papers.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from segmentation_models_pytorch.decoders.fpn import decoder as smp_fpn
from segmentation_models_pytorch.decoders.upernet import decoder as smp_upernet
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from tests.conftest import randomise
from tests.heads.test_features import small
from weft.engine.optim import freeze
from weft.heads import make_segmenter
from weft.heads.features import STRIDES
from weft.heads.fpn import FPN, SemanticFPN, SemanticHead
from weft.heads.upernet import UPerNet
from weft.heads.vt_fpn import VTFPN

HEADS = {
    "fpn": dict(channels=32, head_channels=16),
    "vt-fpn": dict(channels=32, head_channels=16, num_tokens=4, token_dim=64),
    "upernet": dict(channels=16, aux_channels=8),
}
every_head = pytest.mark.parametrize(("head", "args"), HEADS.items(), ids=HEADS)
WIDTHS = [8, 12, 16, 20]


def pyramid(height: int, width: int) -> list[Tensor]:
    return [torch.randn(2, c, height // 2**i, width // 2**i, dtype=torch.float64) for i, c in enumerate(WIDTHS)]


def weights(module: nn.Module) -> list[Tensor]:
    """Parameters and statistics in the order of the layers."""
    return [value for value in module.state_dict().values() if value.is_floating_point()]


def copy_weights(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for value, target in zip(weights(one), weights(other), strict=True):
            target.copy_(value)


# Against segmentation_models_pytorch ----------------------------------------------------------------------------


def test_upernet_is_that_of_smp():
    ours = randomise(UPerNet(WIDTHS, 5, channels=16)).double()
    theirs = smp_upernet.UPerNetDecoder([3, 4, *WIDTHS], decoder_channels=16).double().eval()
    theirs.feature_norms = nn.ModuleList(nn.Identity() for _ in WIDTHS)  # ours lie in the backbone
    blocks = [*(block[1] for block in theirs.psp.blocks), theirs.psp.out_conv]
    blocks += [block.conv_norm_relu for block in reversed(theirs.fpn_lateral_blocks)]
    blocks += [*reversed(theirs.fpn_conv_blocks), theirs.fusion_block]
    copy_weights([*ours.pool.pooled, ours.pool.fuse, *ours.laterals, *ours.outputs, ours.fuse], blocks)
    maps = pyramid(24, 40)
    with torch.no_grad():
        for training in (False, True):
            ours.train(training)
            ours.dropout.eval()
            fused = theirs.train(training)([torch.empty(0), torch.empty(0), *maps])
            torch.testing.assert_close(ours(maps), ours.predictor(fused))


def test_semantic_fpn_is_that_of_smp(monkeypatch):
    """Theirs lacks the 3x3 convolutions of the pyramid, which stand for nothing here, and aligns corners."""
    resize = F.interpolate
    ours = SemanticFPN(WIDTHS, 5, channels=32, head_channels=32).double().eval()
    theirs = smp_fpn.FPNDecoder([3, 4, *WIDTHS], pyramid_channels=32, segmentation_channels=32).double().eval()
    laterals = [theirs.p2.skip_conv, theirs.p3.skip_conv, theirs.p4.skip_conv, theirs.p5]
    branches = [block.block for block in reversed(theirs.seg_blocks)]
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2)
    for conv in ours.pyramid.outputs:
        nn.init.dirac_(conv.weight)
        nn.init.zeros_(conv.bias)
    copy_weights([*ours.pyramid.laterals, *ours.head.branches], [*laterals, *branches])
    maps = pyramid(24, 40)
    with torch.no_grad():
        got = ours(maps)
        monkeypatch.setattr(F, "interpolate", lambda *args, align_corners=None, **kwargs: resize(*args, **kwargs))
        expected = ours.head.predictor(theirs([torch.empty(0), torch.empty(0), *maps]))
    torch.testing.assert_close(got, expected)


# VT-FPN, written out --------------------------------------------------------------------------------------------


def plain_vt_fpn(state: dict[str, Tensor], maps: list[Tensor], num_tokens: int) -> list[Tensor]:
    """Section 3 of the paper's figure 4 with nothing but einsum: b picture, l token, n pixel, h head, c channels."""

    def dense(name: str, x: Tensor) -> Tensor:  # (b, n, c)
        weight = state[f"{name}.weight"].flatten(1)
        return torch.einsum("bnc,dc->bnd", x, weight) + state[f"{name}.bias"]

    def grouped(name: str, x: Tensor) -> Tensor:
        weight = state[f"{name}.weight"].flatten(1)  # (d, c / groups)
        groups = x.shape[2] // weight.shape[1]
        parts = x.unflatten(2, (groups, -1)), weight.unflatten(0, (groups, -1))
        return torch.einsum("bngc,gdc->bngd", *parts).flatten(2) + state[f"{name}.bias"]

    def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        q, k, v = (t.unflatten(2, (heads, -1)) for t in (q, k, v))
        scores = torch.einsum("bnhc,blhc->bhnl", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhnl,blhd->bnhd", scores.softmax(-1), v).flatten(2)

    levels, tokens = [], []
    for i, x in enumerate(maps):
        x = dense(f"laterals.{i}", x.flatten(2).transpose(1, 2))
        share = (dense(f"tokenizers.{i}.coefficients", x) * x.shape[2] ** -0.5).softmax(1)
        tokens.append(dense(f"tokenizers.{i}.token", torch.einsum("bnl,bnc->blc", share, x)))
        levels.append(x)
    t = torch.cat(tokens, dim=1)
    t = t + attend(*(grouped(f"transformer.{name}", t) for name in ("query", "key", "value")), 16)
    t = t + dense("transformer.f2", dense("transformer.f1", t).relu())
    out = []
    for i, (x, shape) in enumerate(zip(levels, maps, strict=True)):
        own = t[:, i * num_tokens : (i + 1) * num_tokens]
        q = grouped(f"projectors.{i}.query", x)
        x = x + attend(q, dense(f"projectors.{i}.key", own), dense(f"projectors.{i}.value", own), 16)
        out.append(x.transpose(1, 2).unflatten(2, shape.shape[2:]))
    return out


def test_vt_fpn_is_what_the_paper_says():
    model = VTFPN(WIDTHS, channels=64, num_tokens=3, token_dim=128).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    maps = pyramid(16, 24)
    got = model(maps)
    expected = plain_vt_fpn(dict(model.named_parameters()), maps, 3)
    torch.testing.assert_close(got, expected)
    signs = [torch.randn_like(y) for y in got]
    gradients = [
        torch.autograd.grad(sum((y * s).sum() for y, s in zip(out, signs, strict=True)), list(model.parameters()))
        for out in (got, expected)
    ]
    torch.testing.assert_close(*gradients)


# Counts ---------------------------------------------------------------------------------------------------------

COUNTS = [  # in G, of the spec's ResNets; the ratio is the paper's 6.5 and 6.4
    (FPN, (800, 1216), 55.10),
    (VTFPN, (800, 1216), 8.57),
    (FPN, (473, 473), 12.89),
    (VTFPN, (473, 473), 2.10),
]


def macs(module: nn.Module, widths: list[int], size: tuple[int, int]) -> float:
    counter = FlopCounterMode(display=False)
    with counter:
        module([torch.empty(1, c, -(-size[0] // s), -(-size[1] // s)) for c, s in zip(widths, STRIDES, strict=True)])
    return counter.get_total_flops() / 2e9


@pytest.mark.parametrize(("kind", "size", "expected"), COUNTS)
def test_macs_of_the_pyramids(kind, size, expected):
    widths = [256, 512, 1024, 2048]
    with torch.device("meta"):
        assert macs(kind(widths), widths, size) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("classes", "size", "expected"), [(54, (800, 1216), 29.28), (20, (473, 473), 6.80)])
def test_macs_of_the_semantic_head(classes, size, expected):
    with torch.device("meta"):
        assert macs(SemanticHead(256, classes), [256] * 4, size) == pytest.approx(expected, abs=0.005)


# The whole network ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["cetnet_nano", "vit_tiny_patch16_224", "resnet18"])
@every_head
def test_every_head_trains_at_odd_sizes(head, args, backbone):
    """One picture alone, too: the mean over it has no variance, and a BatchNorm would refuse it."""
    model = make_segmenter(small(backbone), head, 5, **args)
    logits = model(torch.randn(1, 3, 97, 131))
    assert set(logits) == ({"out", "aux"} if head == "upernet" else {"out"})
    assert logits["out"].shape == (1, 5, 25, 33)
    sum(y.square().sum() for y in logits.values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    twin = copy.deepcopy(model).eval()
    picture = torch.randn(2, 3, 64, 48)
    with torch.no_grad():
        assert set(twin(picture)) == {"out"}
        assert torch.equal(twin(picture)["out"], model.eval()(picture)["out"])


@every_head
def test_only_the_trunk_is_frozen(head, args):
    model = make_segmenter(small("cetnet_nano"), head, 3, **args)
    freeze(model, "backbone")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith("backbone.trunk."), name


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_norms(norm):
    head = SemanticHead(16, 3, 8, norm=norm)
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm, "none": nn.Identity}
    convs = [conv for branch in head.branches for conv in branch]
    assert len(convs) == 7
    assert all(isinstance(conv[1], kinds[norm]) and (conv[0].bias is None) == (norm != "none") for conv in convs)


def test_without_auxiliary_head():
    assert make_segmenter(small("resnet18", device="meta"), "upernet", 3, aux_channels=0).aux is None


@pytest.mark.parametrize(
    ("head", "args", "message"),
    [
        ("upper", {}, "There is no head 'upper' for segmentation; .* Did you mean 'upernet'?"),
        ("fpn", dict(chanels=64), "has no argument 'chanels'; it has channels, .* Did you mean 'channels'?"),
        ("fpn", dict(aux_channels=64), "has no argument 'aux_channels'"),
        ("fpn", dict(norm="layer"), "norm='layer' does not exist; choose from 'batch', 'group', 'none'"),
        ("vt-fpn", dict(token_dim=0), "token_dim=0 is not a positive whole number"),
        ("vt-fpn", dict(channels=40), "channels=40 is not a multiple of 16"),
        ("upernet", dict(dropout=1.5), "dropout=1.5 is not a rate"),
        ("upernet", dict(aux_channels=-1), "aux_channels=-1"),
    ],
)
def test_wrong_arguments(head, args, message):
    with pytest.raises(weft.WeftError, match=message):
        make_segmenter(small("resnet18", device="meta"), head, 3, **args)
