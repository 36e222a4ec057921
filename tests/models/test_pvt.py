"""PVT: the released network written out plainly, and what is special about it."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.conftest import randomise
from tests.helpers.published import Namespace
from tests.helpers.variants import PVT
from weft.catalog.cost import count_macs, count_parameters
from weft.models.baselines.pvt import SpatialReductionAttention
from weft.models.weights.layouts import filter_published

SMALL = dict(embed_dims=(8, 16, 24, 32), depths=(1, 2, 1, 2), num_heads=(1, 2, 3, 4), mlp_ratios=(3, 2, 2, 4))


class OfficialPVT(nn.Module):
    """The released PVT, forward pass and parameter names: glued tokens, NCHW convolutions, square pictures."""

    def __init__(self, embed_dims, depths, num_heads, mlp_ratios, sr_ratios=(8, 4, 2, 1), img_size=224, classes=10):
        super().__init__()
        self.heads, self.sr_ratios = num_heads, sr_ratios
        widths = (3, *embed_dims)
        for i, dim in enumerate(embed_dims):
            patch = 4 if i == 0 else 2
            embed = Namespace(proj=nn.Conv2d(widths[i], dim, patch, patch), norm=nn.LayerNorm(dim))
            setattr(self, f"patch_embed{i + 1}", embed)
            positions = (img_size // (4 * 2**i)) ** 2 + (i == 3)
            setattr(self, f"pos_embed{i + 1}", nn.Parameter(torch.randn(1, positions, dim)))
            blocks = [self.block(dim, mlp_ratios[i], sr_ratios[i]) for _ in range(depths[i])]
            setattr(self, f"block{i + 1}", nn.ModuleList(blocks))
        self.norm = nn.LayerNorm(embed_dims[3], eps=1e-6)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dims[3]))
        self.head = nn.Linear(embed_dims[3], classes)

    @staticmethod
    def block(dim, ratio, sr):
        attn = dict(q=nn.Linear(dim, dim), kv=nn.Linear(dim, 2 * dim), proj=nn.Linear(dim, dim))
        if sr > 1:
            attn.update(sr=nn.Conv2d(dim, dim, sr, sr), norm=nn.LayerNorm(dim))
        return Namespace(
            norm1=nn.LayerNorm(dim, eps=1e-6),
            attn=Namespace(**attn),
            norm2=nn.LayerNorm(dim, eps=1e-6),
            mlp=Namespace(fc1=nn.Linear(dim, int(dim * ratio)), fc2=nn.Linear(int(dim * ratio), dim)),
        )

    @staticmethod
    def attention(m, x: Tensor, heads: int, sr: int) -> Tensor:
        source = x
        if sr > 1:
            side = math.isqrt(x.shape[1])
            source = m.sr(x.transpose(1, 2).reshape(x.shape[0], -1, side, side))
            source = m.norm(source.flatten(2).transpose(1, 2))
        k, v = m.kv(source).chunk(2, dim=-1)
        outputs = []
        for qh, kh, vh in zip(*(t.chunk(heads, dim=-1) for t in (m.q(x), k, v)), strict=True):
            outputs.append((qh @ kh.transpose(1, 2) / math.sqrt(qh.shape[-1])).softmax(-1) @ vh)
        return m.proj(torch.cat(outputs, dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            embed, positions = getattr(self, f"patch_embed{i + 1}"), getattr(self, f"pos_embed{i + 1}")
            x = embed.norm(embed.proj(x).flatten(2).transpose(1, 2))
            if i == 3:
                x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
            x = x + positions
            for block in getattr(self, f"block{i + 1}"):
                x = x + self.attention(block.attn, block.norm1(x), self.heads[i], self.sr_ratios[i])
                x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
            if i < 3:
                side = math.isqrt(x.shape[1])
                x = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        return self.head(self.norm(x)[:, 0])


# The released network -------------------------------------------------------------------------------------------


def test_forward_equals_the_released_network():
    theirs = randomise(OfficialPVT(**SMALL))
    ours = timm.create_model("pvt_small", num_classes=10, **SMALL).eval()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=1e-5)


@pytest.mark.parametrize("eps", ["1e-6", "1e-5"])
def test_epsilons(eps):
    """Small enough to be lost in a comparison of outputs, so looked at."""
    model = timm.create_model("pvt_small", device="meta")
    norms = {n: m.eps for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    outer = {n for n in norms if n.endswith(("embed.norm", "sr.norm"))}
    assert len(outer) == 4 + 3 + 4 + 6
    expected = outer if eps == "1e-5" else norms.keys() - outer
    assert {n for n, value in norms.items() if value == float(eps)} == expected


def test_gradients_equal_the_released_network():
    """In float64: every parameter, and the picture itself."""
    theirs = OfficialPVT(**SMALL, img_size=64).double().train()
    args = dict(SMALL, img_size=64, num_classes=10, drop_path_rate=0.0, dtype=torch.float64)
    ours = timm.create_model("pvt_small", **args).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture, gradients = torch.randn(2, 3, 64, 64, dtype=torch.float64), []
    for model in (theirs, ours):
        given = picture.clone().requires_grad_()
        model(given).square().sum().backward()
        gradients.append({"picture": given.grad, **{n: p.grad for n, p in model.named_parameters()}})
    expected = filter_published(gradients[0], ours)
    assert expected.keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_published_file_converts(tmp_path):
    """The full network at another size: names, positions of all four stages, the size read off them."""
    full = dict(embed_dims=(64, 128, 320, 512), depths=(3, 4, 6, 3), num_heads=(1, 2, 5, 8), mlp_ratios=(8, 8, 4, 4))
    theirs = randomise(OfficialPVT(**full, img_size=64))
    torch.save(theirs.state_dict(), tmp_path / "pvt_small.pth")
    ours = weft.convert(tmp_path / "pvt_small.pth", model="pvt_small")
    assert [tuple(stage.pos_embed.grid.shape[:2]) for stage in ours.stages] == [(16, 16), (8, 8), (4, 4), (2, 2)]
    picture = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=2e-5)
    torn = {**theirs.state_dict(), "pos_embed2": torch.zeros(1, 63, 128)}
    with pytest.raises(weft.WeftError, match="pos_embed2 has 63 positions"):
        weft.convert(torn, model="pvt_small")


# What is special ------------------------------------------------------------------------------------------------


def test_counts():
    """24.486 M parameters, 3.816 G with the attention products; the four embeddings have 0.858 M of them."""
    model = timm.create_model("pvt_small", device="meta")
    assert count_parameters(model) == 24_485_864
    assert count_macs(model, (3, 224, 224)) == 3_815_701_504
    assert sum(count_parameters(stage.embed) for stage in model.stages) == 858_112


@pytest.mark.parametrize(
    ("name", "depths", "drop_path"),
    [
        ("pvt_tiny", (2, 2, 2, 2), 0.1),
        ("pvt_small", (3, 4, 6, 3), 0.1),
        ("pvt_medium", (3, 4, 18, 3), 0.3),
        ("pvt_large", (3, 8, 27, 3), 0.3),
    ],
)
def test_sizes_are_those_of_the_released_code(name, depths, drop_path):
    """Names and shapes of all weights, at 1,000 classes, and the stochastic depth it trained with."""
    with torch.device("meta"):
        theirs = OfficialPVT((64, 128, 320, 512), depths, (1, 2, 5, 8), (8, 8, 4, 4), classes=1000)
    ours = timm.create_model(name, device="meta")
    expected = filter_published(theirs.state_dict(), ours)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in expected.items()}
    assert ours.stages[3].blocks[-1].drop_path.drop_prob == pytest.approx(drop_path)


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 2)])
@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("sr", [1, 2, 4])
def test_spatial_reduction_attention(size, class_token, sr):
    """Against attention written out. Maps that the ratio does not divide are padded with zeros; the class token is not
    reduced."""
    attn = randomise(SpatialReductionAttention(12, 3, sr, 0.0, 0.0))
    x, cls = torch.randn(2, *size, 12), torch.randn(2, 1, 12) if class_token else None
    source = x.flatten(1, 2)
    if sr > 1:
        bottom, right = (-side % sr for side in size)
        nchw = F.pad(x.permute(0, 3, 1, 2), (0, right, 0, bottom))
        reduced = F.conv2d(nchw, attn.sr.proj.weight, attn.sr.proj.bias, stride=sr)
        source = attn.sr.norm(reduced.flatten(2).transpose(1, 2))
    tokens = x.flatten(1, 2)
    if class_token:
        tokens, source = torch.cat([cls, tokens], dim=1), torch.cat([cls, source], dim=1)
    k, v = attn.kv(source).chunk(2, dim=-1)
    outputs = [
        (qh @ kh.transpose(1, 2) / 2).softmax(-1) @ vh  # heads of width 4
        for qh, kh, vh in zip(*(t.chunk(3, -1) for t in (attn.q(tokens), k, v)), strict=True)
    ]
    torch.testing.assert_close(attn(x, cls), attn.proj(torch.cat(outputs, -1)), rtol=1e-5, atol=1e-5)


def test_sr_ratios_arrive():
    model = timm.create_model("pvt_small", **PVT, sr_ratios=(3, 1, 2, 4))
    ratios = [[b.attn.sr.proj.stride[0] if b.attn.sr is not None else 1 for b in s.blocks] for s in model.stages]
    assert ratios == [[3], [1, 1], [2], [4, 4]]
    assert model(torch.randn(1, 3, 50, 70)).shape == (1, 1000)


def test_no_pixel_is_lost():
    """The last row and column of an odd picture reach the first stage."""
    model = randomise(timm.create_model("pvt_small", **PVT))
    picture = torch.randn(1, 3, 61, 45, requires_grad=True)
    model.forward_intermediates(picture, indices=[0], intermediates_only=True)[0].square().sum().backward()
    assert picture.grad[:, :, -1].abs().min() > 0
    assert picture.grad[:, :, :, -1].abs().min() > 0


def test_class_token_and_positions():
    model = timm.create_model("pvt_small", img_size=(64, 96), **PVT)
    assert [stage.cls_token is not None for stage in model.stages] == [False, False, False, True]
    assert [stage.pos_embed.cls is not None for stage in model.stages] == [False, False, False, True]
    assert [tuple(s.pos_embed.grid.shape[:2]) for s in model.stages] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    assert model.no_weight_decay() == {"*.cls_token"}  # positions decay in the released code


def test_drop_path_grows_over_all_blocks():
    rates = [b.drop_path.drop_prob for s in timm.create_model("pvt_small", device="meta").stages for b in s.blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, 0.1, 16))


def test_initialisation():
    model = timm.create_model("pvt_small")
    linear = model.stages[3].blocks[0].attn.kv
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not linear.bias.any()
    assert not model.head.bias.any()
    assert model.stages[0].pos_embed.grid.std().item() == pytest.approx(0.02, rel=0.05)
    conv = model.stages[1].blocks[0].attn.sr.proj  # as torch makes it: uniform, std 1 / sqrt(3 fan_in)
    assert conv.weight.std().item() == pytest.approx((3 * 128 * 16) ** -0.5, rel=0.05)


def test_dropout_rates_arrive():
    model = timm.create_model("pvt_small", **PVT, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    block = model.stages[1].blocks[0]
    assert model.head_drop.p == 0.1
    assert {model.stages[0].drop.p, block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p} == {0.2}
    assert block.attn.attn_drop == 0.3
    attn = block.attn.train()
    x = torch.randn(2, 6, 6, 16)
    attn.proj_drop.p = 0.0
    assert not torch.equal(attn(x, None), attn(x, None))
    assert torch.equal(attn.eval()(x, None), attn(x, None))


@pytest.mark.parametrize("indices", [None, (0,), (0, 1)])
def test_features_only_keeps_no_idle_parameters(indices):
    extra = {} if indices is None else dict(out_indices=indices)
    model = timm.create_model("pvt_small", features_only=True, **PVT, **extra)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 64, 64))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_every_parameter_gets_a_gradient():
    model = timm.create_model("pvt_small", **PVT).train()
    model(torch.randn(2, 3, 64, 64)).mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(embed_dims=(8, 16, 32)), "4 stages"),
        (dict(sr_ratios=(8, 4, 2)), "4 stages"),
        (dict(sr_ratios=(8, 4, 0, 1)), "positive"),
        (dict(num_heads=(1, 2, 3, 8)), "does not divide"),
        (dict(mlp_ratios=(8, 8, 4, "4")), "positive"),
        (dict(drop_path_rate=1.0), "0 up to"),
        (dict(global_pool="mean"), "'token', 'avg'"),
    ],
)
def test_wrong_values_say_what_is_right(args, message):
    with pytest.raises(weft.WeftError) as error:
        timm.create_model("pvt_small", device="meta", **args)
    assert message in str(error.value)
    assert next(iter(args)) in str(error.value)


def test_published_weights_are_pointed_to():
    assert timm.list_models("pvt_small*", module="pvt", include_tags=True) == ["pvt_small.in1k"]
    with pytest.raises(weft.WeftError, match="whai362/PVT"):
        timm.create_model("pvt_small", pretrained=True)
