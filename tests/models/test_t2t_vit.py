"""T2T-ViT: against the released network written plainly, counts, and the positions at other sizes."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from tests.conftest import randomise
from tests.helpers.published import Namespace, attention
from tests.helpers.published_vitae import TokenPerformer, to_map, token_performer
from tests.helpers.variants import T2T_VIT
from weft.catalog.cost import count_macs, count_parameters
from weft.models.layers import sinusoid_table
from weft.models.performer import SoftSplit
from weft.models.weights.layouts import filter_published


class OfficialT2TViT(nn.Module):
    """The released T2T-ViT, forward pass and parameter names."""

    def __init__(
        self, dim: int, depth: int, heads: int, ratio: int, token_dim=64, img_size=224, classes=10, softmax=False
    ):
        super().__init__()
        self.heads = heads
        step = TokenSoftmax if softmax else TokenPerformer
        self.tokens_to_token = Namespace(
            attention1=step(3 * 49, token_dim),
            attention2=step(9 * token_dim, token_dim),
            project=nn.Linear(9 * token_dim, dim),
        )
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        table = sinusoid_table(1 + (img_size // 16) ** 2, dim).float()
        self.pos_embed = nn.Parameter(table[None], requires_grad=False)
        self.blocks = nn.ModuleList(
            Namespace(
                norm1=nn.LayerNorm(dim),
                attn=Namespace(qkv=nn.Linear(dim, 3 * dim, bias=False), proj=nn.Linear(dim, dim)),
                norm2=nn.LayerNorm(dim),
                mlp=Namespace(fc1=nn.Linear(dim, ratio * dim), fc2=nn.Linear(ratio * dim, dim)),
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        t2t = self.tokens_to_token
        x = self.step(t2t.attention1, F.unfold(x, 7, padding=2, stride=4).transpose(1, 2))
        x = self.step(t2t.attention2, F.unfold(to_map(x), 3, padding=1, stride=2).transpose(1, 2))
        x = t2t.project(F.unfold(to_map(x), 3, padding=1, stride=2).transpose(1, 2))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            y = block.norm1(x)
            qkv = nn.Linear(1, 1)  # `attention` wants a bias
            qkv.weight, qkv.bias = (
                block.attn.qkv.weight,
                nn.Parameter(torch.zeros_like(block.attn.qkv.weight[:, 0])),
            )
            x = x + attention(y, y, qkv, block.attn.proj, self.heads)
            x = x + block.mlp.fc2(F.gelu(block.mlp.fc1(block.norm2(x))))
        return self.head(self.norm(x)[:, 0])

    @staticmethod
    def step(m: nn.Module, tokens: Tensor) -> Tensor:
        return token_softmax(m, tokens) if isinstance(m, TokenSoftmax) else token_performer(m, tokens, 0.0)


class TokenSoftmax(Namespace):
    """The parameters of one token transformer with softmax, under the names of the released code."""

    def __init__(self, in_dim: int, dim: int):
        super().__init__(
            norm1=nn.LayerNorm(in_dim),
            attn=Namespace(qkv=nn.Linear(in_dim, 3 * dim, bias=False), proj=nn.Linear(dim, dim)),
            norm2=nn.LayerNorm(dim),
            mlp=Namespace(fc1=nn.Linear(dim, dim), fc2=nn.Linear(dim, dim)),
        )


def token_softmax(m: nn.Module, tokens: Tensor) -> Tensor:
    """One head, scaled by the width of the tokens that come in."""
    q, k, v = m.attn.qkv(m.norm1(tokens)).chunk(3, dim=-1)
    x = v + m.attn.proj((q @ k.transpose(1, 2) * tokens.shape[-1] ** -0.5).softmax(-1) @ v)
    return x + m.mlp.fc2(F.gelu(m.mlp.fc1(m.norm2(x))))


SIZES = {  # width, depth, heads and expansion in the released code
    "t2t_vit_7": (256, 7, 4, 2),
    "t2t_vit_14": (384, 14, 6, 3),
    "t2t_vit_19": (448, 19, 7, 3),
    "t2t_vit_24": (512, 24, 8, 3),
    "t2t_vit_t_14": (384, 14, 6, 3),
    "t2t_vit_t_19": (448, 19, 7, 3),
    "t2t_vit_t_24": (512, 24, 8, 3),
}


@pytest.mark.parametrize(("name", "size"), [("t2t_vit_7", 96), ("t2t_vit_14", 64), ("t2t_vit_t_14", 64)])
def test_equals_the_released_network(name, size, tmp_path):
    theirs = randomise(OfficialT2TViT(*SIZES[name], img_size=size, softmax="_t_" in name))
    state = {f"module.{key}": value for key, value in theirs.state_dict().items()}
    torch.save({"state_dict_ema": state, "state_dict": {}}, tmp_path / "T2T.pth.tar")
    ours = weft.convert(tmp_path / "T2T.pth.tar", model=name)
    if "_t_" not in name:
        assert torch.equal(ours.reductions[1].transformer.attention.w, theirs.tokens_to_token.attention2.w)
    assert ours.pretrained_cfg["input_size"] == (3, size, size)
    picture = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["performer", "softmax"])
def test_gradients_equal_the_released_network(kind):
    theirs = OfficialT2TViT(32, 2, 2, 3, token_dim=8, img_size=48, softmax=kind == "softmax").double().train()
    args = dict(embed_dim=32, depth=2, num_heads=2, mlp_ratio=3.0, token_dim=8, img_size=48, num_classes=10)
    args["token_attention"] = kind
    ours = timm.create_model("t2t_vit_7", **args, drop_path_rate=0.0, token_drop_rate=0.0, dtype=torch.float64).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(3, 3, 48, 48, dtype=torch.float64)
    for model in (theirs, ours):
        model(picture).square().sum().backward()
    marked = {n: p.grad if p.requires_grad else p for n, p in theirs.named_parameters()}  # w marks the layout
    expected = filter_published(marked, ours)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_files_for_other_channels_and_sizes():
    """Channels are read off the first linear layer, the picture size off the positions, which need not be sinusoids."""
    theirs = OfficialT2TViT(256, 7, 4, 2, img_size=64)
    state = theirs.state_dict()
    state["tokens_to_token.attention1.kqv.weight"] = torch.randn(192, 49)
    for kind in ("weight", "bias"):
        state[f"tokens_to_token.attention1.norm1.{kind}"] = torch.randn(49)
    state["pos_embed"] = torch.randn(1, 17, 256)
    ours = weft.convert(state, model="t2t_vit_7")
    assert ours.in_chans == 1
    assert torch.equal(ours.pos_embed.grid, state["pos_embed"][0, 1:].view(4, 4, 256))
    with pytest.raises(weft.WeftError, match="no square"):
        weft.convert({**state, "pos_embed": torch.randn(1, 18, 256)}, model="t2t_vit_7")


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_released_code(name):
    """Names and shapes of all weights that are trained, at 1,000 classes."""
    with torch.device("meta"):
        theirs = OfficialT2TViT(*SIZES[name], classes=1000, softmax="_t_" in name)
    ours = timm.create_model(name, device="meta")
    expected = filter_published(dict(theirs.named_parameters()), ours)
    trained = {key: value.shape for key, value in ours.named_parameters()}
    assert trained == {key: value.shape for key, value in expected.items() if key in trained}
    assert expected.keys() - trained.keys() <= dict(ours.named_buffers()).keys()


def test_wrong_form_is_told():
    state = OfficialT2TViT(*SIZES["t2t_vit_14"], img_size=32, softmax=True).state_dict()
    with pytest.raises(weft.WeftError, match="The weights fit t2t_vit_t_14"):
        weft.convert(state, model="t2t_vit_14")


@pytest.mark.parametrize(
    ("name", "trained", "matrices", "positions", "macs"),
    [
        ("t2t_vit_7", 4_255_694, 4_096, 197 * 256, 1.147),  # published: 4.3 M, 1.1 G
        ("t2t_vit_14", 21_465_806, 4_096, 197 * 384, 4.784),  # published: 21.5 M, 4.8 G
    ],
)
def test_counts(name, trained, matrices, positions, macs):
    model = timm.create_model(name, device="meta")
    assert sum(p.numel() for p in model.parameters()) == trained
    assert count_parameters(model) == trained + matrices
    assert sum(b.numel() for b in model.buffers()) == matrices + positions
    assert count_macs(model, (3, 224, 224)) / 1e9 == pytest.approx(macs, rel=1e-3)


def test_positions():
    """The sinusoids of the flat index, the class token first; bicubic at other sizes."""
    model = randomise(timm.create_model("t2t_vit_7", img_size=(48, 64), **T2T_VIT))
    table = sinusoid_table(13, 32).float()
    assert torch.equal(model.pos_embed.cls[0], table[:1])
    assert torch.equal(model.pos_embed.grid.flatten(0, 1), table[1:])
    seen = []
    model.pos_embed.register_forward_hook(lambda m, a, output: seen.append((a[0], output[0])))
    model(torch.randn(1, 3, 80, 40))
    grid = model.pos_embed.grid.permute(2, 0, 1)[None]
    resized = F.interpolate(grid, size=(5, 3), mode="bicubic", align_corners=False)
    torch.testing.assert_close(seen[0][1] - seen[0][0], resized.permute(0, 2, 3, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(7, 4), (3, 2), (7, 2), (7, 1)])
@pytest.mark.parametrize("size", [(16, 8), (13, 10), (1, 5)])
def test_soft_split_is_unfold(kernel, stride, size):
    x = torch.randn(2, *size, 3)
    grid = [-(-side // stride) for side in size]
    nchw = F.pad(x.permute(0, 3, 1, 2), (0, grid[1] * stride - size[1], 0, grid[0] * stride - size[0]))
    expected = F.unfold(nchw, kernel, padding=-(-(kernel - stride) // 2), stride=stride).transpose(1, 2)
    got = SoftSplit(kernel, stride)(x)
    assert got.shape[1:3] == tuple(grid)
    assert torch.equal(got.flatten(1, 2), expected)


def test_features():
    features = timm.create_model("t2t_vit_7", features_only=True, device="meta")
    assert features.feature_info.reduction() == [4, 8, 16]
    assert features.feature_info.channels() == [64, 64, 256]
    assert features.feature_info.module_name() == ["reductions.0", "reductions.1", "blocks.6"]


@pytest.mark.parametrize("indices", [(0,), (0, 1), (0, 2), (0, 1, 4)])
def test_features_only_keeps_no_idle_parameters(indices):
    model = timm.create_model("t2t_vit_7", features_only=True, out_indices=indices, **T2T_VIT)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 32, 32))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert len(model.model.reductions) == min(indices[-1] + 1, 3)
    assert len(model.model.blocks) == max(indices[-1] - 1, 0)


def test_dropouts_and_drop_paths_arrive():
    rates = dict(drop_rate=0.1, pos_drop_rate=0.2, proj_drop_rate=0.3, attn_drop_rate=0.4, drop_path_rate=0.2)
    model = timm.create_model("t2t_vit_7", **{**T2T_VIT, "token_drop_rate": 0.5}, **rates)
    block, transformer = model.blocks[0], model.reductions[1].transformer
    assert (model.head_drop.p, model.pos_drop.p) == (0.1, 0.2)
    assert {block.attn.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p} == {0.3}
    assert block.attn.attn.attn_drop.p == 0.4
    assert (transformer.drop.p, transformer.mlp.drop1.p, transformer.mlp.drop2.p) == (0.5, 0.0, 0.5)
    paths = [b.drop_path.drop_prob for b in model.blocks]
    torch.testing.assert_close(torch.tensor(paths), torch.linspace(0, 0.2, 3))
    for name, rate in (("t2t_vit_14", 0.1), ("t2t_vit_t_14", 0.0)):
        assert timm.create_model(name, device="meta").reductions[0].transformer.drop.p == rate


def test_initialisation():
    model = timm.create_model("t2t_vit_7")
    assert model.blocks[0].attn.attn.qkv.bias is None
    for linear in (model.blocks[0].attn.attn.qkv, model.reductions[1].transformer.kqv, model.reductions[2][1]):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not model.reductions[2][1].bias.any()
    assert model.cls_token.std().item() == pytest.approx(0.02, rel=0.2)
