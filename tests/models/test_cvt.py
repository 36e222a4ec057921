"""CvT: against transformers' network, every switch computed again by hand, and the traits of the released code."""

import re
from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import _hub
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import weft
from tests.conftest import randomise
from tests.helpers.by_hand import Weights, attend, batch_norm, enlarge, layer_norm, linear, under
from tests.helpers.published import hugging_face_cvt, official_cvt_keys
from tests.helpers.variants import CVT, SWITCHES
from weft.models import cvt
from weft.models.layers import ConvNorm
from weft.models.weights.layouts import filter_published

POSITIONS = {"none": [], "first": [0], "last": [2], "every": [0, 1, 2]}
CVT_SWITCHES = {key: args for key, (name, args) in SWITCHES.items() if name == "cvt_nano"}


@pytest.fixture(scope="module")
def theirs():
    """transformers' CvT-13 with trained-looking norms."""
    torch.manual_seed(0)
    return randomise(hugging_face_cvt())


def logits(model: nn.Module, picture: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(picture)
    return getattr(out, "logits", out)


# The published network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(224, 224), (161, 250)])
def test_forward_equals_transformers(theirs, size):
    ours = weft.convert(theirs.state_dict(), model="cvt_13")
    picture = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = theirs(picture, output_hidden_states=True)
        torch.testing.assert_close(ours(picture), expected.logits, rtol=0, atol=1e-5)
        maps = ours.forward_intermediates(picture, intermediates_only=True)
    for got, want in zip(maps, expected.hidden_states, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_equal_transformers():
    """In training mode and float64: batch statistics, every parameter, and the picture itself."""
    small = dict(embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.0])
    theirs = hugging_face_cvt(**small).double().train()
    args = dict(embed_dims=(16, 32, 64), num_heads=(1, 2, 4), depths=(1, 2, 3), num_classes=10, drop_path_rate=0.0)
    ours = timm.create_model("cvt_13", act_layer="gelu", dtype=torch.float64, **args).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(3, 3, 70, 52, dtype=torch.float64)
    gradients = []
    for model in (theirs, ours):
        given = picture.clone().requires_grad_()
        out = model(given)
        (out.logits if model is theirs else out).square().sum().backward()
        named = {name: p.grad for name, p in model.named_parameters()}
        gradients.append({"picture": given.grad, **named})
    theirs_renamed = filter_published(gradients[0], ours)
    assert theirs_renamed.keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradient, theirs_renamed[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", ["safetensors", "bin", "file", "state dict"])
def test_hugging_face_files(theirs, kind, tmp_path):
    """A folder that transformers wrote gives what transformers computes: exact GELU, to 1e-5."""
    if kind == "safetensors":
        theirs.save_pretrained(tmp_path)
        source = tmp_path
    elif kind == "bin":
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        source = str(tmp_path)
    elif kind == "file":
        theirs.save_pretrained(tmp_path)
        source = tmp_path / "model.safetensors"
    else:
        source = theirs.state_dict()
    model = weft.convert(source, model="cvt_13")
    picture = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(logits(model, picture), logits(theirs, picture), rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_official_files(prefix, tmp_path):
    """The released files were trained with QuickGELU, so that is what they get."""
    theirs = randomise(hugging_face_cvt(quick_gelu=True))
    state = official_cvt_keys(theirs.state_dict())
    assert len(state) == 459
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / "CvT-13-224x224-IN-1k.pth")
    model = weft.convert(tmp_path / "CvT-13-224x224-IN-1k.pth", model="cvt_13")
    picture = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(logits(model, picture), logits(theirs, picture), rtol=0, atol=1e-5)


def test_official_files_have_the_released_names():
    """All 459 of them, written out from the description of the released files."""
    norms = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    both = ("weight", "bias")
    expected = {"stage2.cls_token", *(f"{m}.{p}" for m in ("norm", "head") for p in both)}
    for i, depth in enumerate((1, 2, 10)):
        expected |= {f"stage{i}.patch_embed.{m}.{p}" for m in ("proj", "norm") for p in both}
        for block in (f"stage{i}.blocks.{j}" for j in range(depth)):
            linears = ("norm1", "norm2", "attn.proj_q", "attn.proj_k", "attn.proj_v", "attn.proj", "mlp.fc1", "mlp.fc2")
            expected |= {f"{block}.{m}.{p}" for m in linears for p in both}
            for kind in "qkv":
                expected.add(f"{block}.attn.conv_proj_{kind}.conv.weight")
                expected |= {f"{block}.attn.conv_proj_{kind}.bn.{p}" for p in norms}
    assert set(official_cvt_keys(hugging_face_cvt().state_dict())) == expected


def test_evaluation_of_the_384_weights_is_the_authors():
    """The whole picture resized to a square, no crop."""
    for name in timm.list_models("cvt_*384", include_tags=True):
        config = timm.data.resolve_model_data_config(timm.create_model(name, device="meta"))
        assert (config["crop_pct"], config["crop_mode"], config["input_size"]) == (1.0, "squash", (3, 384, 384))


@pytest.mark.parametrize("name", [n for n in timm.list_models("cvt_*", include_tags=True) if ".msft" in n])
def test_hub_repositories(name):
    cfg = timm.get_pretrained_cfg(name)
    size = re.fullmatch(r"microsoft/cvt-(13|21|w24)(-384)?(-22k)?", cfg.hf_hub_id)
    assert size
    assert cfg.input_size[1] == (384 if size[2] else 224)
    assert ("in22k" in name) == bool(size[3])


def test_pretrained_loads_through_timm_with_quick_gelu(tmp_path, monkeypatch):
    """timm's own download path, with the hub replaced by a folder that transformers wrote."""
    theirs = randomise(hugging_face_cvt(quick_gelu=True, num_labels=1000))
    theirs.save_pretrained(tmp_path)
    asked: list[Tensor] = []

    def download(repo_id, filename, **kwargs):
        asked.append(repo_id)
        return str(tmp_path / filename)

    monkeypatch.setattr(_hub, "hf_hub_download", download)
    model = timm.create_model("cvt_13", pretrained=True).eval()
    assert set(asked) == {"microsoft/cvt-13"}
    picture = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(logits(model, picture), logits(theirs, picture), rtol=0, atol=1e-5)

    adapted = timm.create_model("cvt_13", pretrained=True, in_chans=1, num_classes=5)
    grey, colour = adapted.stages[0].embed.proj.weight, model.stages[0].embed.proj.weight
    torch.testing.assert_close(grey, colour.sum(1, keepdim=True))
    assert adapted.head.out_features == 5
    features = timm.create_model("cvt_13", pretrained=True, features_only=True)
    assert torch.equal(features.model.stages[2].cls_token, model.stages[2].cls_token)


# Switches, by hand ------------------------------------------------------------------------------------------------


def per_block(value, stage: int, block: int):
    """Of one value, one per stage, or one list per stage: what a block has."""
    value = value[stage] if isinstance(value, tuple) else value
    return value[block] if isinstance(value, tuple) else value


normed = partial(layer_norm, eps=1e-5)


def embed_by_hand(x: Tensor, w: Weights, name: str, kind: str, stride: int, stem: bool) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C): a convolution with a bias, then LayerNorm."""
    if kind == "patch":  # zeros where a patch is not full
        x = F.pad(x, (0, -x.shape[3] % stride, 0, -x.shape[2] % stride))
        kernel, padding = stride, 0
    else:
        kernel, padding = (7, 2 if stride == 4 else 3) if stem else (3, 1)
    assert w[f"{name}.proj.weight"].shape[2:] == (kernel, kernel)
    x = F.conv2d(x, w[f"{name}.proj.weight"], w[f"{name}.proj.bias"], stride, padding)
    return normed(x.permute(0, 2, 3, 1), w, f"{name}.norm")


def project_by_hand(x: Tensor, w: Weights, name: str, kind: str, stride: int, query: bool) -> Tensor:
    """The depth-wise half of a projection of a (B, C, H, W) map."""
    if kind == "conv":
        x = F.conv2d(x, w[f"{name}.conv.weight"], None, stride, 1, groups=x.shape[1])
        return batch_norm(x, w, f"{name}.bn")
    if kind == "avg" and not query:
        return F.avg_pool2d(x, 3, stride, 1, ceil_mode=True)
    return x


def attend_by_hand(
    tokens: Tensor, w: Weights, name: str, grid: tuple[int, int], heads: int, kind: str, stride: int
) -> Tensor:
    """The class token, if there is one, comes first and skips the convolutions. Logits are scaled by the full width."""
    batch, _, dim = tokens.shape
    cls, rest = tokens.split([tokens.shape[1] - grid[0] * grid[1], grid[0] * grid[1]], dim=1)
    x = rest.transpose(1, 2).reshape(batch, dim, *grid)
    asked: list[Tensor] = []
    for letter in "qkv":
        step = 1 if letter == "q" else stride
        y = project_by_hand(x, w, f"{name}.conv_proj_{letter}", kind, step, letter == "q")
        joined = torch.cat([cls, y.flatten(2).transpose(1, 2)], dim=1)
        asked.append(linear(joined, w, f"{name}.proj_{letter}"))
    return linear(attend(*asked, heads, scale=dim**-0.5), w, f"{name}.proj")


def run_by_hand(
    model: nn.Module,
    x: Tensor,
    *,
    embed_dims: tuple[int, ...],
    depths: tuple[int, ...],
    num_heads: tuple[int, ...],
    class_token: bool = True,
    global_pool: str = "token",
    stem_stride: int = 2,  # of cvt_nano
    stride_kv=2,
    mlp_ratio=4.0,
    projection="conv",
    embed: str = "conv",
    pos_embed: str = "none",
    act_layer: str = "quick_gelu",
) -> Tensor:
    """Logits of a CvT from nothing but its weights and the switches it was made with, in evaluation mode."""
    w = model.state_dict()
    for i, dim in enumerate(embed_dims):
        stage = f"stages.{i}"
        if embed == "ce":  # test_cetnet.py computes it
            x = model.stages[i].embed(x.permute(0, 2, 3, 1))
        else:
            x = embed_by_hand(x, w, f"{stage}.embed", embed, stem_stride if i == 0 else 2, stem=i == 0)
        grid = x.shape[1:3]
        tokens, has_class_token = x.flatten(1, 2), class_token and i == 2
        assert tokens.shape[2] == dim
        if has_class_token:
            tokens = torch.cat([w[f"{stage}.cls_token"].expand(len(x), -1, -1), tokens], dim=1)
        if i in POSITIONS[pos_embed]:
            positions = w[f"{stage}.pos_embed.grid"].flatten(0, 1)[None]
            if has_class_token:
                positions = torch.cat([w[f"{stage}.pos_embed.cls"], positions], dim=1)
            tokens = tokens + positions
        for j in range(depths[i]):
            block = f"{stage}.blocks.{j}"
            kind, stride = per_block(projection, i, j), per_block(stride_kv, i, j)
            y = normed(tokens, w, f"{block}.norm1")
            tokens = tokens + attend_by_hand(y, w, f"{block}.attn", grid, num_heads[i], kind, stride)
            hidden = linear(normed(tokens, w, f"{block}.norm2"), w, f"{block}.mlp.fc1")
            assert hidden.shape[2] == dim * per_block(mlp_ratio, i, j)
            hidden = F.gelu(hidden) if act_layer == "gelu" else hidden * torch.sigmoid(1.702 * hidden)
            tokens = tokens + linear(hidden, w, f"{block}.mlp.fc2")
        x = tokens[:, has_class_token:].transpose(1, 2).reshape(len(x), dim, *grid)
    tokens = normed(tokens, w, "norm")
    pooled = tokens[:, 0] if global_pool == "token" else tokens[:, int(class_token) :].mean(1)
    return linear(pooled, w, "head")


@pytest.mark.parametrize("args", CVT_SWITCHES.values(), ids=CVT_SWITCHES)
def test_every_switch(args):
    """At a size whose maps have odd sides on the way, so that strides must round as they should."""
    model = enlarge(timm.create_model("cvt_nano", num_classes=5, img_size=(40, 72), **args))
    picture = torch.randn(2, 3, 40, 72)
    with torch.no_grad():
        torch.testing.assert_close(model(picture), run_by_hand(model, picture, **args), rtol=1e-4, atol=1e-4)


def test_every_switch_has_a_variant():
    """What `test_every_switch` runs over changes each argument but sizes and rates, which have tests below."""
    arguments = {name for args in CVT_SWITCHES.values() for name in args}
    others = {"img_size", "in_chans", "num_classes", "drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"}
    known = set(cvt.CvT.__init__.__annotations__) - {"device", "dtype", "return"}
    assert known - arguments == others


@pytest.mark.parametrize("global_pool", ["token", "avg"])
def test_poolings_beside_a_class_token(global_pool):
    model = enlarge(timm.create_model("cvt_nano", global_pool=global_pool, **CVT))
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = run_by_hand(model, picture, global_pool=global_pool, **CVT)
        torch.testing.assert_close(model(picture), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("projection", ["conv", "avg", "linear"])
@pytest.mark.parametrize("size", [(24, 24), (13, 18)])
def test_attention(projection, size):
    """One layer alone, with a class token that passes the convolutions by."""
    attn = enlarge(cvt.Attention(12, 3, projection, 2, 0.0, 0.0))
    x, cls = torch.randn(2, *size, 12), torch.randn(2, 1, 12)
    tokens = torch.cat([cls, x.flatten(1, 2)], dim=1)
    expected = attend_by_hand(tokens, under("attn", attn), "attn", size, 3, projection, 2)
    torch.testing.assert_close(attn(x, cls), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("where", "stages"), POSITIONS.items())
def test_position_embeddings(where, stages):
    """They change the maps from their stage on."""
    model = randomise(timm.create_model("cvt_nano", pos_embed=where, **CVT))
    assert [i for i, stage in enumerate(model.stages) if stage.pos_embed is not None] == stages
    picture = torch.randn(1, 3, 64, 64)
    before = model.forward_intermediates(picture, intermediates_only=True)
    with torch.no_grad():
        for i in stages:
            model.stages[i].pos_embed.grid.add_(1 + torch.rand_like(model.stages[i].pos_embed.grid))
    after = model.forward_intermediates(picture, intermediates_only=True)
    changed = [i for i in range(3) if not torch.allclose(before[i], after[i])]
    assert changed == (list(range(stages[0], 3)) if stages else [])


def test_position_embeddings_of_table_6():
    """A position for every token of 224 pixels, the class token's among them."""
    plain, every = (timm.create_model("cvt_13", device="meta", pos_embed=where) for where in ("none", "every"))
    counts = [sum(p.numel() for p in model.parameters()) for model in (plain, every)]
    assert counts[1] - counts[0] == 56**2 * 64 + 28**2 * 192 + (14**2 + 1) * 384


@pytest.mark.parametrize(("kind", "kernels"), [("conv", [7, 3, 3]), ("patch", [4, 2, 2])])
def test_embeddings(kind, kernels):
    convs = [stage.embed.proj for stage in timm.create_model("cvt_13", embed=kind, device="meta").stages]
    assert [c.kernel_size[0] for c in convs] == kernels
    assert [c.stride[0] for c in convs] == [4, 2, 2]
    assert [c.padding[0] for c in convs] == ([2, 1, 1] if kind == "conv" else [0, 0, 0])
    assert all(c.bias is not None for c in convs)


def test_projection_per_stage():
    model = timm.create_model("cvt_nano", projection=("conv", "avg", "linear"), **CVT)
    kinds = [[type(m) for m in (s.blocks[0].attn.conv_proj_q, s.blocks[0].attn.conv_proj_k)] for s in model.stages]
    assert kinds == [[ConvNorm, ConvNorm], [nn.Identity, cvt.AvgProjection], [nn.Identity, nn.Identity]]


def test_dropout_rates_arrive():
    model = timm.create_model("cvt_nano", **CVT, drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3)
    assert model.head_drop.p == 0.1
    for stage in model.stages:
        assert stage.drop.p == 0.2
        for block in stage.blocks:
            assert {block.attn.proj_drop.p, block.mlp.drop1.p, block.mlp.drop2.p} == {0.2}
            assert block.attn.attn_drop == 0.3


# The released code ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dims", "depths", "heads", "rate"),
    [
        ("cvt_13", (64, 192, 384), (1, 2, 10), (1, 3, 6), 0.1),
        ("cvt_21", (64, 192, 384), (1, 4, 16), (1, 3, 6), 0.1),
        ("cvt_w24", (192, 768, 1024), (2, 2, 20), (3, 12, 16), 0.3),
    ],
)
def test_variants_of_table_2(name, dims, depths, heads, rate):
    model = timm.create_model(name, device="meta")
    assert tuple(info["num_chs"] for info in model.feature_info) == dims
    assert tuple(len(stage.blocks) for stage in model.stages) == depths
    assert tuple(stage.blocks[0].attn.num_heads for stage in model.stages) == heads
    assert {block.mlp.fc1.out_features // block.norm1.weight.numel() for s in model.stages for block in s.blocks} == {4}
    drops = [[block.drop_path.drop_prob for block in stage.blocks] for stage in model.stages]
    assert {*drops[0], *drops[1]} == {0.0}  # only the last stage drops paths
    assert drops[2] == pytest.approx([rate * i / (depths[2] - 1) for i in range(depths[2])])


@pytest.mark.parametrize(("name", "buffers"), [("cvt_13", 25_767), ("cvt_21", 41_919), ("cvt_w24", 134_472)])
def test_buffers_of_the_batch_norms(name, buffers):
    assert sum(b.numel() for b in timm.create_model(name, device="meta").buffers()) == buffers


def test_logits_are_scaled_by_the_full_width():
    """Not by the width of a head, as everywhere else: attention in stages 2 and 3 is softer than usual."""
    model = timm.create_model("cvt_13", device="meta")
    assert [stage.blocks[0].attn.scale for stage in model.stages] == [64**-0.5, 192**-0.5, 384**-0.5]


def test_keys_are_taken_at_half_the_resolution_rounded_up(monkeypatch):
    """197 queries and 50 keys in the last stage at 224 pixels, and 3 x 3 keys of 5 x 6 queries."""
    seen = []
    plain = cvt.Attention.answer

    def answer(self, q, k, v):
        seen.append((q.shape[1], k.shape[1], v.shape[1]))
        return plain(self, q, k, v)

    monkeypatch.setattr(cvt.Attention, "answer", answer)
    timm.create_model("cvt_13", device="meta")(torch.empty(1, 3, 224, 224, device="meta"))
    assert seen == [(56**2, 28**2, 28**2)] + [(28**2, 14**2, 14**2)] * 2 + [(197, 50, 50)] * 10
    seen.clear()
    timm.create_model("cvt_13", device="meta")(torch.empty(1, 3, 80, 96, device="meta"))
    assert seen[-1] == (1 + 5 * 6, 1 + 3 * 3, 1 + 3 * 3)


def test_convolutions_of_the_projections_are_depth_wise_without_bias():
    for block in (b for stage in timm.create_model("cvt_nano", **CVT).stages for b in stage.blocks):
        for layer in (block.attn.conv_proj_q, block.attn.conv_proj_k, block.attn.conv_proj_v):
            assert layer.conv.bias is None
            assert layer.conv.groups == layer.conv.in_channels
            assert layer.act == "none"


def test_class_token_belongs_to_the_last_stage_alone():
    model = timm.create_model("cvt_nano", **CVT)
    assert [stage.cls_token is not None for stage in model.stages] == [False, False, True]
    without = timm.create_model("cvt_nano", class_token=False, global_pool="avg", **CVT)
    assert all(stage.cls_token is None for stage in without.stages)


def test_norms_add_1e_5():
    norms = [m for m in timm.create_model("cvt_nano", **CVT).modules() if isinstance(m, nn.LayerNorm)]
    assert {norm.eps for norm in norms} == {1e-5}


def test_a_batch_of_one_keeps_its_dimension():
    """The released code squeezes it away."""
    model = timm.create_model("cvt_nano", num_classes=3, **CVT)
    assert model.eval()(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_quick_gelu_is_another_function():
    """Weights of one activation give other logits under the other, near enough to go unnoticed."""
    quick, exact = (timm.create_model("cvt_nano", act_layer=act, **CVT).eval() for act in ("quick_gelu", "gelu"))
    exact.load_state_dict(quick.state_dict())
    picture = torch.randn(4, 3, 64, 64)
    apart = (logits(quick, picture) - logits(exact, picture)).abs().max() / logits(quick, picture).std()
    assert 1e-4 < apart < 0.2


def test_initialisation_is_that_of_the_released_code():
    """Truncated-normal linear layers with zero bias, torch's own convolutions, and a head whose bias is torch's."""
    model = timm.create_model("cvt_13", num_classes=2000)
    attn, embed = model.stages[2].blocks[0].attn, model.stages[1].embed.proj
    for layer in (attn.proj_q, attn.proj, model.stages[2].blocks[0].mlp.fc1, model.head):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert not any(layer.bias.any() for layer in (attn.proj_q, attn.proj))
    bound = 384**-0.5
    assert bound * 0.95 < model.head.bias.abs().max().item() <= bound
    for conv in (embed, attn.conv_proj_k.conv):
        bound = conv.weight[0].numel() ** -0.5  # kaiming-uniform with a = sqrt(5)
        assert bound * 0.95 < conv.weight.abs().max().item() <= bound
    assert model.stages[2].cls_token.std().item() == pytest.approx(0.02, rel=0.15)


def test_nas_is_a_bottleneck():
    """Stages 1 and 2 narrow; in stage 3 three blocks wide with full keys, four wide, three narrow."""
    blocks = [block for stage in timm.create_model("cvt_13_nas", device="meta").stages for block in stage.blocks]
    strides = [block.attn.conv_proj_k.conv.stride[0] for block in blocks]
    assert strides == [block.attn.conv_proj_v.conv.stride[0] for block in blocks]
    assert strides == [2] + [2, 2] + [1] * 3 + [2] * 7
    assert [b.mlp.fc1.out_features // b.mlp.fc1.in_features for b in blocks] == [2] + [2, 2] + [4] * 7 + [2] * 3
    assert {block.attn.conv_proj_q.conv.stride[0] for block in blocks} == {1}


def test_weight_decay_spares_class_token_and_positions():
    model = timm.create_model("cvt_nano", pos_embed="every", **CVT)
    spared, decayed = param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    spared, decayed = ({id(p) for p in group["params"]} for group in (spared, decayed))
    assert {id(model.stages[2].cls_token), id(model.stages[0].pos_embed.grid)} <= spared
    assert {id(model.head.weight), id(model.stages[0].embed.proj.weight)} <= decayed
