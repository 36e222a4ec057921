"""CSWin: the released network written out plainly, and what is special about it."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import weft
from tests.conftest import randomise
from tests.helpers.published import Namespace
from tests.helpers.variants import CSWIN
from tests.models.test_models import Copies
from weft.catalog.cost import count_macs, count_parameters
from weft.models.baselines.cswin import CrossShapedAttention, LePEAttention, StripeAttention
from weft.models.weights.layouts import filter_published

SMALL = dict(embed_dims=(8, 16, 32, 64), depths=(1, 2, 2, 1), num_heads=(2, 4, 4, 8))


def heads_attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    outputs = []
    for qh, kh, vh in zip(*(t.chunk(heads, dim=-1) for t in (q, k, v)), strict=True):
        outputs.append((qh @ kh.transpose(1, 2) / math.sqrt(qh.shape[-1])).softmax(-1) @ vh)
    return torch.cat(outputs, dim=-1)


def window_attend(q: Tensor, k: Tensor, v: Tensor, conv: nn.Conv2d, heads: int) -> Tensor:
    """One window of (B, C, h, w) maps: attention, plus the convolution of the values with zeros around the window."""
    tokens = (t.flatten(2).transpose(1, 2) for t in (q, k, v))
    y = heads_attend(*tokens, heads).transpose(1, 2).reshape(v.shape)
    return y + F.conv2d(v, conv.weight, conv.bias, padding=1, groups=v.shape[1])


def stripes_attend(qkv: list[Tensor], conv: nn.Conv2d, heads: int, split: int, vertical: bool) -> Tensor:
    """Stripe after stripe of (B, C, H, W) maps, padded on both sides where they do not fit."""
    side = qkv[0].shape[3 if vertical else 2]
    missing = -side % split
    before, after = missing // 2, missing - missing // 2
    qkv = [F.pad(t, (before, after) if vertical else (0, 0, before, after)) for t in qkv]
    out = torch.zeros_like(qkv[2])
    for start in range(0, side + missing, split):
        if vertical:
            out[..., start : start + split] = window_attend(*(t[..., start : start + split] for t in qkv), conv, heads)
        else:
            piece = [t[:, :, start : start + split] for t in qkv]
            out[:, :, start : start + split] = window_attend(*piece, conv, heads)
    return out[..., before : before + side] if vertical else out[:, :, before : before + side]


class OfficialCSWin(nn.Module):
    """The released CSWin (that for segmentation, where the size does not fit), forward pass and parameter names."""

    def __init__(self, embed_dims, depths, num_heads, split_sizes=(1, 2, 7, 7), classes=10):
        super().__init__()
        self.heads, self.split_sizes = num_heads, split_sizes
        first = embed_dims[0]
        self.stage1_conv_embed = nn.Sequential(nn.Conv2d(3, first, 7, 4, 2), nn.Identity(), nn.LayerNorm(first))
        for i, dim in enumerate(embed_dims):
            if i > 0:
                merge = Namespace(conv=nn.Conv2d(embed_dims[i - 1], dim, 3, 2, 1), norm=nn.LayerNorm(dim))
                setattr(self, f"merge{i}", merge)
            setattr(self, f"stage{i + 1}", nn.ModuleList(self.block(dim, i == 3) for _ in range(depths[i])))
        self.norm = nn.LayerNorm(embed_dims[3])
        self.head = nn.Linear(embed_dims[3], classes)

    @staticmethod
    def block(dim, last):
        branches = 1 if last else 2
        width = dim // branches
        convs = [Namespace(get_v=nn.Conv2d(width, width, 3, padding=1, groups=width)) for _ in range(branches)]
        return Namespace(
            qkv=nn.Linear(dim, 3 * dim),
            norm1=nn.LayerNorm(dim),
            proj=nn.Linear(dim, dim),
            attns=nn.ModuleList(convs),
            mlp=Namespace(fc1=nn.Linear(dim, 4 * dim), fc2=nn.Linear(4 * dim, dim)),
            norm2=nn.LayerNorm(dim),
        )

    @staticmethod
    def attention(block, x: Tensor, grid: tuple[int, int], heads: int, split: int) -> Tensor:
        batch, _, dim = x.shape
        qkv = [t.transpose(1, 2).reshape(batch, dim, *grid) for t in block.qkv(x).chunk(3, dim=-1)]
        if len(block.attns) == 1:
            y = window_attend(*qkv, block.attns[0].get_v, heads)
        else:
            left, right = [t[:, : dim // 2] for t in qkv], [t[:, dim // 2 :] for t in qkv]
            y = torch.cat(
                [
                    stripes_attend(left, block.attns[0].get_v, heads // 2, split, vertical=True),
                    stripes_attend(right, block.attns[1].get_v, heads // 2, split, vertical=False),
                ],
                dim=1,
            )
        return block.proj(y.flatten(2).transpose(1, 2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            conv, norm = self.stage1_conv_embed[0], self.stage1_conv_embed[2]
            if i > 0:
                merge = getattr(self, f"merge{i}")
                conv, norm = merge.conv, merge.norm
            x = conv(x)
            grid = x.shape[2:]
            x = norm(x.flatten(2).transpose(1, 2))
            for block in getattr(self, f"stage{i + 1}"):
                x = x + self.attention(block, block.norm1(x), grid, self.heads[i], self.split_sizes[i])
                x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
            if i < 3:
                x = x.transpose(1, 2).reshape(x.shape[0], -1, *grid)
        return self.head(self.norm(x).mean(1))


# The released network -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(224, 224), (100, 83), (45, 150)])
def test_forward_equals_the_released_network(size):
    theirs = randomise(OfficialCSWin(**SMALL))
    ours = timm.create_model("cswin_tiny", num_classes=10, **SMALL).eval()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(2, 3, *size)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (52, 71)])
def test_gradients_equal_the_released_network(size):
    """In float64: every parameter, and the picture itself."""
    theirs = OfficialCSWin(**SMALL).double().train()
    args = dict(SMALL, num_classes=10, drop_path_rate=0.0, dtype=torch.float64)
    ours = timm.create_model("cswin_tiny", **args).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture, gradients = torch.randn(2, 3, *size, dtype=torch.float64), []
    for model in (theirs, ours):
        given = picture.clone().requires_grad_()
        model(given).square().sum().backward()
        gradients.append({"picture": given.grad, **{n: p.grad for n, p in model.named_parameters()}})
    expected = filter_published(gradients[0], ours)
    assert expected.keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_published_file_converts(tmp_path):
    """Wrapped as the released files are: averaged weights beside a state that must not be taken."""
    full = dict(embed_dims=(64, 128, 256, 512), depths=(1, 2, 21, 1), num_heads=(2, 4, 8, 16))
    theirs = randomise(OfficialCSWin(**full))
    wrong = {key: torch.zeros_like(value) for key, value in theirs.state_dict().items()}
    torch.save({"state_dict": wrong, "state_dict_ema": theirs.state_dict(), "epoch": 3}, tmp_path / "cswin.pth")
    ours = weft.convert(tmp_path / "cswin.pth", model="cswin_tiny")
    picture = torch.randn(1, 3, 112, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=2e-5)
    with pytest.raises(weft.WeftError, match="fit cswin_tiny"):
        weft.convert(tmp_path / "cswin.pth", model="cswin_small")


def test_epsilons():
    model = timm.create_model("cswin_tiny", device="meta")
    assert {m.eps for m in model.modules() if isinstance(m, nn.LayerNorm)} == {1e-5}


# Counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "parameters", "macs"),
    [
        ("cswin_tiny", 224, 22_320_552, 4.324),
        ("cswin_small", 224, 34_643_304, 6.801),
        ("cswin_base", 224, 77_382_184, 14.955),
        ("cswin_base.msft_in1k_384", 384, 77_382_184, 46.964),
    ],
)
def test_counts(name, size, parameters, macs):
    """The paper: 23, 35, 78, 78 M and 4.3, 6.9, 15.0, 47.0 G."""
    model = timm.create_model(name, device="meta")
    assert count_parameters(model) == parameters
    assert count_macs(model, (3, size, size)) / 1e9 == pytest.approx(macs, abs=5e-4)


def test_counts_of_the_parts():
    """CSWin-T: 4.070 G without the attention products; the four embeddings have 1.561 M parameters."""
    model = timm.create_model("cswin_tiny", device="meta").eval()
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, 3, 224, 224, device="meta"))
    layers = {op: n for op, n in counter.get_flop_counts()["Global"].items() if "bmm" not in str(op)}
    assert sum(layers.values()) / 2e9 == pytest.approx(4.070, abs=5e-4)
    assert sum(count_parameters(stage.embed) for stage in model.stages) == pytest.approx(1.561e6, abs=500)


# Stripes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(8, 8), (14, 7), (5, 11), (1, 3)])
@pytest.mark.parametrize("split", [1, 2, 7])
@pytest.mark.parametrize("along", [1, 2])
def test_stripes_against_a_loop(size, split, along):
    attn = StripeAttention(6, 2, split, along, 0.0)
    qkv = torch.randn(2, *size, 3, 6)
    maps = [t.permute(0, 3, 1, 2) for t in qkv.unbind(3)]
    expected = stripes_attend(maps, attn.lepe, 2, split, vertical=along == 2)
    torch.testing.assert_close(attn(qkv).permute(0, 3, 1, 2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("branch", "vertical"), [(0, True), (1, False)])
def test_a_stripe_sees_itself_alone(branch, vertical):
    """The first branch has the vertical stripes; LePE does not look beyond the border either."""
    attn = CrossShapedAttention(8, 2, 2, 0.0, 0.0).branches[branch]
    qkv = torch.randn(1, 6, 6, 3, 4, requires_grad=True)
    attn(qkv)[0, 1, 3].sum().backward()
    seen = qkv.grad[0].abs().sum((-2, -1)) > 0
    expected = torch.zeros(6, 6, dtype=torch.bool)
    expected[(slice(None), slice(2, 4)) if vertical else (slice(0, 2), slice(None))] = True
    assert torch.equal(seen, expected)


def test_whole_map():
    attn = CrossShapedAttention(8, 2, 0, 0.0, 0.0)
    assert [type(branch) for branch in attn.branches] == [LePEAttention]
    x = torch.randn(2, 5, 7, 8)
    maps = [t.permute(0, 3, 1, 2) for t in attn.qkv(x).chunk(3, dim=-1)]
    expected = attn.proj(window_attend(*maps, attn.branches[0].lepe, 2).permute(0, 2, 3, 1))
    torch.testing.assert_close(attn(x), expected, rtol=1e-5, atol=1e-5)


def test_only_vertical_stripes_are_copied():
    """Once when cut and, wider than 1, once when put together; each block with stripes then joins its two branches."""
    model = randomise(timm.create_model("cswin_tiny", **CSWIN))
    picture = torch.randn(2, 3, 224, 224).to(memory_format=torch.channels_last)
    with torch.no_grad(), Copies() as copies:
        model(picture)
    assert len(copies.seen) == 1 * 1 + 2 * 2 + 2 * 2  # blocks with stripes of 1, 2 and 7
    assert copies.joins == 1 + 2 + 2
    for feature in model.forward_intermediates(picture, output_fmt="NHWC", intermediates_only=True):
        assert feature.is_contiguous()


def test_split_sizes_arrive():
    def widths(name: str, **args) -> list[list[int]]:
        blocks = [stage.blocks[-1] for stage in timm.create_model(name, device="meta", **args).stages]
        return [[getattr(branch, "split_size", 0) for branch in block.attn.branches] for block in blocks]

    for name in ("cswin_tiny", "cswin_small", "cswin_base"):
        assert widths(name) == [[1, 1], [2, 2], [7, 7], [0]]
    assert widths("cswin_base.msft_in1k_384") == [[1, 1], [2, 2], [12, 12], [0]]
    assert widths("cswin_base.msft_in1k_384", split_sizes=(1, 2, 7, 0)) == [[1, 1], [2, 2], [7, 7], [0]]
    assert widths("cswin_tiny", split_sizes=(0, 3, 4, 5)) == [[0], [3, 3], [4, 4], [5, 5]]


def test_split_sizes_of_a_tag_are_saved(tmp_path):
    """The folder of the model for 384 pixels opens with its own stripes."""
    model = randomise(timm.create_model("cswin_base.msft_in1k_384", **CSWIN))
    weft.save_model(model, tmp_path / "m")
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    assert opened.stages[2].blocks[0].attn.branches[0].split_size == 12
    picture = torch.randn(1, 3, 384, 384)
    with torch.no_grad():
        torch.testing.assert_close(opened(picture), model(picture))


# The rest -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "blocks", "rate"), [("cswin_tiny", 25, 0.2), ("cswin_small", 40, 0.4)])
def test_drop_path_grows_over_all_blocks(name, blocks, rate):
    rates = [b.drop_path.drop_prob for s in timm.create_model(name, device="meta").stages for b in s.blocks]
    torch.testing.assert_close(torch.tensor(rates), torch.linspace(0, rate, blocks))
    assert timm.create_model("cswin_base", device="meta").stages[3].blocks[1].drop_path.drop_prob == 0.5


def test_drop_path_drops_both_branches():
    block = timm.create_model("cswin_tiny", **CSWIN).train().stages[2].blocks[1]
    block.drop_path.drop_prob = 1 - 1e-9
    x = torch.randn(4, 5, 5, 24)
    assert torch.equal(block(x), x)


def test_initialisation():
    model = timm.create_model("cswin_tiny")
    linear = model.stages[3].blocks[0].attn.qkv
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not linear.bias.any()
    assert not model.head.bias.any()
    lepe = model.stages[3].blocks[0].attn.branches[0].lepe  # as torch makes it: uniform, std 1 / sqrt(3 fan_in)
    assert lepe.weight.std().item() == pytest.approx(27**-0.5, rel=0.05)
    assert lepe.bias.any()


def test_dropout_rates_arrive():
    model = timm.create_model("cswin_tiny", **CSWIN, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    block = model.stages[1].blocks[0]
    assert model.head_drop.p == 0.1
    assert {block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p} == {0.2}
    attn = block.attn.train()
    x = torch.randn(2, 6, 6, 16)
    assert not torch.equal(attn(x), attn(x))
    attn.proj_drop.p = 0.0
    for branch in attn.branches:
        assert branch.attn_drop == 0.3
        assert not torch.equal(attn(x), attn(x))
        branch.attn_drop = 0.0
        assert torch.equal(attn(x), attn(x)) == (branch is attn.branches[-1])


def test_pooling():
    """Without a class token features are a map, and poolings are over it."""
    model = randomise(timm.create_model("cswin_tiny", **CSWIN, num_classes=0))
    picture = torch.randn(2, 3, 75, 90)
    features = model.forward_features(picture)
    assert features.shape == (2, 32, 3, 3)
    torch.testing.assert_close(model(picture), features.mean((2, 3)))
    _, (*_, last) = model.forward_intermediates(picture, norm=True)
    torch.testing.assert_close(last, features)


@pytest.mark.parametrize("indices", [None, (0,), (0, 1)])
def test_features_only_keeps_no_idle_parameters(indices):
    extra = {} if indices is None else dict(out_indices=indices)
    model = timm.create_model("cswin_tiny", features_only=True, **CSWIN, **extra)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 64, 64))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_every_parameter_gets_a_gradient():
    model = timm.create_model("cswin_tiny", **CSWIN).train()
    model(torch.randn(2, 3, 64, 64)).mean().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(embed_dims=(8, 16, 32)), "4 stages"),
        (dict(split_sizes=(1, 2, 7)), "4 stages"),
        (dict(split_sizes=(1, 2, -7, 0)), "width of a stripe"),
        (dict(split_sizes=(1, 2.0, 7, 0)), "width of a stripe"),
        (dict(num_heads=(1, 4, 8, 16)), "odd"),
        (dict(num_heads=(2, 4, 7, 16)), "does not divide"),
        (dict(mlp_ratios=(4, 4, 4, 0)), "positive"),
        (dict(img_size="big"), "positive"),
        (dict(global_pool="token"), "'avg', 'max', 'avgmax', ''"),
    ],
)
def test_wrong_values_say_what_is_right(args, message):
    with pytest.raises(weft.WeftError) as error:
        timm.create_model("cswin_tiny", device="meta", **args)
    assert message in str(error.value)
    assert next(iter(args)) in str(error.value)


def test_published_weights_are_pointed_to():
    with pytest.raises(weft.WeftError, match="microsoft/CSWin-Transformer"):
        timm.create_model("cswin_base.msft_in1k_384", pretrained=True)
