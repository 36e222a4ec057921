"""ViTAE: against the released network written plainly, switch by switch, and the Performer at its limits."""

import argparse
import math

import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torch.nn.functional as F
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

import weft
from tests.conftest import randomise
from tests.helpers.published import attention
from tests.helpers.published_vitae import SMALL_ARGS, SMALL_TEST, TINY, OfficialViTAE, released_performer, to_tokens
from tests.helpers.variants import SWITCHES, T2T_VIT, VITAE, VITAE_PAPER
from weft.catalog.cost import count_parameters
from weft.models.layers import sinusoid_table
from weft.models.performer import PerformerAttention, SoftSplit, TokenTransformer
from weft.models.vitae import PRM, NormalCell, ReductionCell
from weft.models.weights.layouts import filter_published


@pytest.fixture(scope="module")
def official():
    torch.manual_seed(0)
    return randomise(OfficialViTAE(*TINY))


@pytest.mark.parametrize("size", [96, 64])
def test_equals_the_released_network(official, size):
    ours = weft.convert(official.state_dict(), model="vitae_tiny")
    picture = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), official(picture), rtol=0, atol=2e-5)


def test_gradients_equal_the_released_network():
    """In training mode and float64: batch statistics and every parameter."""
    theirs = OfficialViTAE(*SMALL_TEST).double().train()
    args = dict(drop_path_rate=0.0, rc_drop_rate=0.0, num_classes=10, dtype=torch.float64)
    ours = timm.create_model("vitae_tiny", **SMALL_ARGS, **args).train()
    ours.load_state_dict(filter_published(theirs.state_dict(), ours))
    picture = torch.randn(3, 3, 48, 48, dtype=torch.float64)
    for model in (theirs, ours):
        model(picture).square().sum().backward()
    marked = {n: p.grad if p.requires_grad else p for n, p in theirs.named_parameters()}  # w marks the layout
    expected = filter_published(marked, ours)
    assert {n for n, _ in ours.named_parameters()} == {n for n in expected if not n.endswith("attention.w")}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("prefix", ["", "module."])
def test_official_files(official, prefix, tmp_path):
    """timm's checkpoints: the averaged weights win, prefixes go, the Performer's matrices come along."""
    state = {prefix + key: value for key, value in official.state_dict().items()}
    wrong = {key: torch.zeros_like(value) for key, value in state.items()}
    content = {"epoch": 3, "state_dict": wrong, "state_dict_ema": state, "args": argparse.Namespace(lr=5e-4)}
    torch.save(content, tmp_path / "ViTAE-T.pth.tar")
    model = weft.convert(tmp_path / "ViTAE-T.pth.tar", model="vitae_tiny")
    assert torch.equal(model.reductions[1].transformer.attention.w, official.layers[1].RC.attn.w)
    picture = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(picture), official(picture), rtol=0, atol=2e-5)
    with pytest.raises(weft.WeftError, match="fit vitae_tiny"):
        weft.convert(tmp_path / "ViTAE-T.pth.tar", model="vitae_6m")


def test_pretrained_through_timm(official, tmp_path):
    """timm's own path; every convolution that reads the picture is adapted to one channel."""
    torch.save({"state_dict_ema": official.state_dict()}, tmp_path / "vitae.pth")
    overlay = dict(file=str(tmp_path / "vitae.pth"), num_classes=10)
    model = timm.create_model("vitae_tiny", pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1)
    cell, theirs = model.reductions[0], official.layers[0].RC
    for ours, conv in [
        *zip(cell.prm.convs, [c[0] for c in theirs.PRM.convs], strict=True),
        (cell.pcm[0].conv, theirs.PCM[0]),
    ]:
        torch.testing.assert_close(ours.weight, conv.weight.sum(1, keepdim=True))


def test_in_chans_are_read_off_the_weights(official):
    state = official.state_dict()
    for key in [k for k in state if k.startswith("layers.0.RC.PRM") and k.endswith("weight")] + [
        "layers.0.RC.PCM.0.weight"
    ]:
        state[key] = state[key][:, :2]
    assert weft.convert(state, model="vitae_tiny").in_chans == 2


def test_row_of_table_3_without_anything_is_t2t_vit():
    """Soft split, no PCM, and the paper's head: T2T-ViT, weight for weight (its q, k, v have no bias)."""
    baseline = randomise(timm.create_model("t2t_vit_7", **T2T_VIT, mlp_ratio=3.0, num_classes=10))
    args = dict(prm_dims=(1, 1, 1), token_dims=(8, 8, 32), depth=3, num_heads=2, mlp_ratio=3.0, num_classes=10)
    off = dict(dilations=((), (), ()), rc_pcm=False, nc_pcm="none")
    ours = timm.create_model("vitae_tiny", **args, **off, **VITAE_PAPER).eval()
    state = {}
    for key, value in baseline.state_dict().items():
        state[key.replace("attn.attn", "attn").replace("reductions.2.1.", "reductions.2.proj.")] = value
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert all(key.endswith("attn.qkv.bias") for key in missing)
    assert unexpected == []
    picture = torch.randn(2, 3, 80, 112)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), baseline(picture), rtol=1e-4, atol=1e-4)  # eps of the norms


NO_PCM = dict(rc_pcm=False, nc_pcm="none")


# Table 3 --------------------------------------------------------------------------------------------------------

OFF = dict(dilations=((), (), ()), **NO_PCM)
DOWN = dict(dilations=((1, 2, 3, 4), (1, 2, 3), (1, 2)))
TABLE_3 = [
    OFF,
    dict(OFF, nc_pcm="pre", nc_pcm_norm=False),
    dict(OFF, nc_pcm="post", nc_pcm_norm=False),
    dict(OFF, nc_pcm="post"),
    dict(OFF, nc_pcm="pre"),
    *(dict(NO_PCM, dilations=(tuple(range(1, n + 1)),) * 3) for n in (2, 3, 4, 5)),
    dict(NO_PCM, **DOWN),
    dict(DOWN, nc_pcm="none"),
    DOWN,
]


@pytest.mark.parametrize("row", TABLE_3)
def test_every_row_of_table_3(row):
    """Each row has the modules it names, and only them."""
    model = timm.create_model("vitae_tiny", device="meta", **row, **VITAE_PAPER)
    assert model(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 1000)
    for cell, dilations, kernel, stride in zip(model.reductions, row["dilations"], (7, 3, 3), (4, 2, 2), strict=True):
        assert isinstance(cell.prm, PRM if dilations else SoftSplit)
        if dilations:
            assert tuple(conv.dilation[0] for conv in cell.prm.convs) == dilations
            assert {(conv.kernel_size[0], conv.stride[0]) for conv in cell.prm.convs} == {(kernel, stride)}
    has_pcm = [cell.pcm is not None for cell in model.reductions]
    assert has_pcm == [row.get("rc_pcm", True)] * 2 + [False]
    for cell in model.blocks:
        assert (cell.pcm is not None) == (row.get("nc_pcm") != "none")
        assert cell.late == (row.get("nc_pcm") == "post")
        norms = sum(isinstance(m, nn.BatchNorm2d) for m in cell.modules())
        assert norms == (2 if cell.pcm is not None and row.get("nc_pcm_norm", True) else 0)


def test_default_is_the_last_row_of_table_3():
    default, row = (timm.create_model("vitae_tiny", device="meta", **args) for args in ({}, DOWN))
    assert str(default) == str(row)


# Switches, by hand ----------------------------------------------------------------------------------------------


def batch_norm(bn: nn.Module, y: Tensor) -> Tensor:
    return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-5)


def run_pcm(pcm: nn.Sequential, x: Tensor, strides, norms, groups: int, final_act: bool) -> Tensor:
    """Layer by layer from the weights, on an NCHW map."""
    convs = list(pcm)[::2]
    assert len(convs) == len(strides)
    for i, (layer, stride, norm) in enumerate(zip(convs, strides, norms, strict=True)):
        x = F.conv2d(x, layer.conv.weight, layer.conv.bias, stride, 1, groups=groups)
        x = batch_norm(layer.bn, x) if norm else x
        x = F.silu(x) if i < len(convs) - 1 or final_act else x
    return x


@pytest.mark.parametrize("class_token", [True, False])
@pytest.mark.parametrize("convs", [2, 3])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("fusion", ["pre", "post", "none"])
def test_normal_cell(fusion, norm, convs, class_token):
    dim, hidden, groups = 12, 24, 4
    cell = randomise(NormalCell(dim, 3, hidden, groups, fusion, norm, convs, 0.0, 0.0, 0.0))
    x, cls = torch.randn(2, 5, 4, dim), torch.randn(2, 1, dim) if class_token else None
    local = torch.zeros(2, 20, dim)
    if fusion != "none":
        norms = (norm, False) if convs == 2 else (norm, norm, False)
        local = to_tokens(run_pcm(cell.pcm, x.permute(0, 3, 1, 2), (1,) * convs, norms, groups, convs == 3))
    tokens = x.flatten(1, 2)
    if cls is not None:
        tokens, local = torch.cat([cls, tokens], 1), torch.cat([torch.zeros(2, 1, dim), local], 1)
    y = F.layer_norm(tokens, (dim,), cell.norm1.weight, cell.norm1.bias, 1e-6)
    y = tokens + attention(y, y, cell.attn.qkv, cell.attn.proj, 3)
    y = y + local if fusion == "pre" else y
    z = F.layer_norm(y, (dim,), cell.norm2.weight, cell.norm2.bias, 1e-6)
    y = y + cell.mlp.fc2(F.gelu(cell.mlp.fc1(z)))
    y = y + local if fusion == "post" else y
    got, got_cls = cell(x, cls)
    assert (got_cls is None) == (cls is None)
    got = got.flatten(1, 2) if got_cls is None else torch.cat([got_cls, got.flatten(1, 2)], 1)
    torch.testing.assert_close(got, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 16), (13, 22), (3, 9)])
@pytest.mark.parametrize("has_pcm", [True, False])
@pytest.mark.parametrize(("kind", "heads"), [("performer", 1), ("softmax", 1), ("softmax", 4), ("none", 1)])
@pytest.mark.parametrize("dilations", [(1, 2, 5), ()])
@pytest.mark.parametrize(("kernel", "stride"), [(7, 4), (7, 2), (7, 1), (3, 2)])
def test_reduction_cell(kernel, stride, dilations, kind, heads, has_pcm, size):
    """PRM or soft split, attention, PCM and FFN by hand, at sizes that are no multiples of the stride, too."""
    cell = randomise(ReductionCell(3, 4, 8, kernel, stride, dilations, kind, heads, has_pcm, 0.1))
    x = torch.randn(2, *size, 3)
    grid = [-(-side // stride) for side in size]
    nchw = F.pad(x.permute(0, 3, 1, 2), (0, grid[1] * stride - size[1], 0, grid[0] * stride - size[0]))
    if dilations:
        branches = []
        for conv, d in zip(cell.prm.convs, dilations, strict=True):
            padding = math.ceil(((kernel - 1) * d + 1 - stride) / 2)
            branches.append(F.gelu(F.conv2d(nchw, conv.weight, conv.bias, stride, padding, d)))
        tokens = to_tokens(torch.cat(branches, 1))
    else:
        tokens = F.unfold(nchw, kernel, padding=math.ceil((kernel - stride) / 2), stride=stride).transpose(1, 2)
    if kind == "none":
        expected = cell.proj(tokens)
        assert isinstance(cell.proj, nn.Linear)
        assert cell.pcm is None
    else:
        t, local = cell.transformer, 0.0
        if has_pcm:
            strides = {4: (2, 2, 1), 2: (2, 1, 1), 1: (1, 1, 1)}[stride]
            local = to_tokens(run_pcm(cell.pcm, nchw, strides, (False, True, False), 1, True))
        y = F.layer_norm(tokens, tokens.shape[-1:], t.norm1.weight, t.norm1.bias, 1e-5)
        k, q, v = t.kqv(y).chunk(3, dim=-1)
        parts = zip(*(x.chunk(heads, dim=-1) for x in (q, k, v)), strict=True)  # a head is 8 / heads wide
        mixed = [(a @ b.transpose(1, 2) / math.sqrt(8 / heads)).softmax(-1) @ c for a, b, c in parts]
        mixed = torch.cat(mixed, dim=-1)
        if kind == "performer":
            mixed = released_performer(q, k, v, t.attention.w)
        y = v + t.proj(mixed) + local
        z = F.layer_norm(y, (8,), t.norm2.weight, t.norm2.bias, 1e-5)
        expected = y + t.mlp.fc2(F.gelu(t.mlp.fc1(z)))
        assert (cell.pcm is not None) == has_pcm
    got = cell(x)
    assert got.shape[1:3] == tuple(grid)
    torch.testing.assert_close(got.flatten(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_a_prm_of_the_right_width_stays_as_it_is():
    assert isinstance(ReductionCell(3, 4, 8, 3, 2, (1, 2), "none", 1, True, 0.0).proj, nn.Identity)


def test_third_cell_is_full_on_demand():
    for full in (False, True):
        cell = timm.create_model("vitae_nano", full_rc3=full, **VITAE).reductions[2]
        assert isinstance(cell.transformer, TokenTransformer) == full
        assert (cell.pcm is not None) == full
        assert cell.stride == 2


def test_rc_heads_arrive():
    args = dict(VITAE, full_rc3=True, rc_attention="softmax")
    for given, found in ((4, [4, 4, 4]), ((1, 2, 8), [1, 2, 8])):
        model = timm.create_model("vitae_nano", rc_heads=given, **args)
        assert [cell.transformer.attention.num_heads for cell in model.reductions] == found


@pytest.mark.parametrize("full", [False, True])
def test_normal_cells_of_another_width(full):
    """A linear layer leads from the last reduction cell to them; features, positions and head have their width."""
    args = dict(VITAE, **VITAE_PAPER, full_rc3=full, img_size=(64, 48))
    model = randomise(timm.create_model("vitae_nano", embed_dim=48, **args))
    cell, linear = model.reductions[2]
    x = torch.randn(2, 8, 6, 8)
    torch.testing.assert_close(model.reductions[2](x), cell(x) @ linear.weight.T + linear.bias)
    assert (linear.in_features, linear.out_features) == (32, 48)
    assert [info["num_chs"] for info in model.feature_info] == [8, 8, 48, 48, 48]
    assert model.head.in_features == 48
    plain = timm.create_model("vitae_nano", **args)
    assert type(plain.reductions[2]) is ReductionCell
    assert plain.state_dict().keys() == timm.create_model("vitae_nano", embed_dim=32, **args).state_dict().keys()


def test_class_token_positions_and_final_norm():
    """The paper's head around the normal cells, computed outside of the model."""
    model = randomise(timm.create_model("vitae_nano", img_size=(64, 48), **VITAE, **VITAE_PAPER))
    picture = torch.randn(2, 3, 64, 48)
    seen = {}
    model.reductions[2].register_forward_hook(lambda m, a, output: seen.update(rc3=output))
    model.blocks[0].register_forward_hook(lambda m, a, output: seen.update(map=a[0], cls=a[1]))
    model.blocks[-1].register_forward_hook(lambda m, a, output: seen.update(last=output[1]))
    logits = model(picture)
    table = sinusoid_table(1 + 48, 32).float()
    torch.testing.assert_close(seen["cls"], model.cls_token.expand(2, -1, -1) + table[:1])
    torch.testing.assert_close(seen["map"].flatten(1, 2), seen["rc3"].flatten(1, 2) + table[1:])
    last = F.layer_norm(seen["last"][:, 0], (32,), model.norm.weight, model.norm.bias, 1e-6)
    torch.testing.assert_close(logits, model.head(last))
    assert model.norm.eps == 1e-6


def test_sinusoids():
    table = sinusoid_table(50, 6)
    for p in (0, 1, 49):
        for j in range(6):
            angle = p / 10000 ** (2 * (j // 2) / 6)
            assert table[p, j].item() == pytest.approx(math.cos(angle) if j % 2 else math.sin(angle), abs=1e-12)
    without = timm.create_model("vitae_nano", pos_embed="sinusoid", img_size=32, **VITAE)
    torch.testing.assert_close(without.pos_embed.grid.flatten(0, 1), sinusoid_table(16, 32).float())
    assert without.pos_embed.cls is None
    assert not any("pos_embed" in name for name, _ in without.named_parameters())


def test_default_has_neither_token_nor_positions_nor_norm():
    model = randomise(timm.create_model("vitae_nano", **VITAE))
    assert model.cls_token is None
    assert model.pos_embed is None
    assert isinstance(model.norm, nn.Identity)
    picture = torch.randn(1, 3, 40, 56)
    features = model.forward_features(picture)
    assert features.shape == (1, 32, 5, 7)
    torch.testing.assert_close(model(picture), model.head(features.mean((2, 3))))


@pytest.mark.parametrize(("stride", "reductions"), [(4, [4, 8, 16]), (2, [2, 4, 8]), (1, [1, 2, 4])])
def test_default_features(stride, reductions):
    """Two reduction cells and the last normal cell: one map per stride, as decoders want them."""
    features = timm.create_model("vitae_nano", features_only=True, stem_stride=stride, **VITAE)
    assert features.feature_info.reduction() == reductions
    assert features.feature_info.module_name() == ["reductions.0", "reductions.1", "blocks.2"]
    for feature, reduction in zip(features(torch.randn(1, 3, 45, 64)), reductions, strict=True):
        assert feature.shape[2:] == (-(-45 // reduction), 64 // reduction)


@pytest.mark.parametrize("indices", [(0,), (0, 1), (1, 2), (0, 1, 4)])
@pytest.mark.parametrize("args", [{}, VITAE_PAPER])
def test_features_only_keeps_no_idle_parameters(indices, args):
    model = timm.create_model("vitae_nano", features_only=True, out_indices=indices, **VITAE, **args)
    sum(feature.square().mean() for feature in model(torch.randn(2, 3, 32, 32))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert len(model.model.reductions) == min(indices[-1] + 1, 3)
    assert len(model.model.blocks) == max(indices[-1] - 1, 0)


def test_smp_takes_it_as_an_encoder():
    """Strides 4, 8 and 16 by default; SMP puts a picture and an empty level in front of them."""
    model = smp.create_model(
        "unet", encoder_name="tu-vitae_tiny", encoder_weights=None, encoder_depth=4, decoder_channels=(16, 8, 8, 8)
    )
    assert list(model.encoder.out_channels) == [3, 0, 64, 64, 256]
    assert model(torch.randn(2, 3, 64, 96)).shape == (2, 1, 64, 96)


@pytest.mark.parametrize(("name", "steps"), [("vitae_tiny", 7), ("vitae_small", 14)])
def test_layer_decay(name, steps):
    """Learning rates grow from the reduction cells over the normal cells to the head; Performer matrices have none."""
    model = timm.create_model(name, num_classes=3, device="meta", **VITAE_PAPER)
    spared = model.no_weight_decay()
    groups = param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=spared)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = {n: scale[id(p)] for n, p in model.named_parameters()}
    assert len(set(scales.values())) == steps + 2
    assert {s for n, s in scales.items() if n.startswith(("reduction", "cls"))} == {0.5 ** (steps + 1)}
    assert scales["blocks.0.pcm.0.conv.weight"] == 0.5**steps
    assert (scales["norm.weight"], scales["head.weight"]) == (0.5, 1.0)
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays[id(model.cls_token)] == 0.0
    assert decays[id(model.blocks[0].pcm[0].conv.weight)] == 0.05


def test_first_convs_follow_the_switches():
    for args, count in (({}, 5), (dict(rc_pcm=False), 4), (dict(dilations=((1, 2), (1,), (1,))), 3), (OFF, 0)):
        model = timm.create_model("vitae_nano", device="meta", **args)
        names = model.pretrained_cfg["first_conv"]
        assert len(names) == count
        assert {f"{name}.weight" for name in names} <= model.state_dict().keys()


def test_nano_is_small_and_keeps_a_grid():
    assert count_parameters(timm.create_model("vitae_nano", device="meta")) <= 1_500_000
    for size in (28, 32, 64, 96):
        model = timm.create_model("vitae_nano", img_size=size).eval()
        *_, last = model.forward_intermediates(torch.zeros(1, 3, size, size), intermediates_only=True)
        assert min(last.shape[2:]) >= 4


def test_dropouts_and_drop_paths_arrive():
    rates = dict(drop_rate=0.1, pos_drop_rate=0.2, proj_drop_rate=0.3, attn_drop_rate=0.4, drop_path_rate=0.2)
    model = timm.create_model("vitae_nano", **{**VITAE, "rc_drop_rate": 0.5}, **rates)
    cell, transformer = model.blocks[0], model.reductions[1].transformer
    assert (model.head_drop.p, model.pos_drop.p) == (0.1, 0.2)
    assert {cell.attn.proj_drop.p, cell.mlp.drop1.p, cell.mlp.drop2.p} == {0.3}
    assert cell.attn.attn_drop.p == 0.4
    assert (transformer.drop.p, transformer.mlp.drop1.p, transformer.mlp.drop2.p) == (0.5, 0.0, 0.5)
    paths = [c.drop_path.drop_prob for c in model.blocks]
    torch.testing.assert_close(torch.tensor(paths), torch.linspace(0, 0.2, 3))
    released = timm.create_model("vitae_tiny", device="meta")
    assert released.reductions[0].transformer.drop.p == 0.1
    assert released.blocks[-1].drop_path.drop_prob == pytest.approx(0.1)


def test_every_dropout_is_used():
    """Each dropout alone makes two passes in training mode differ; without any they agree."""
    model = timm.create_model("vitae_nano", drop_path_rate=0.0, **VITAE, **VITAE_PAPER).train()
    picture = torch.randn(4, 3, 32, 32)

    def passes_differ() -> bool:
        outputs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outputs.append(model(picture))
        return not torch.equal(*outputs)

    assert not passes_differ()
    for site in [m for m in model.modules() if isinstance(m, nn.Dropout)]:
        site.p = 0.5
        assert passes_differ(), site
        site.p = 0.0


def test_three_paths_are_dropped_independently():
    """Attention, PCM and FFN of a cell have a draw each; with all of them dropped the cell is the identity."""
    cell = NormalCell(8, 2, 16, 4, "pre", True, 3, 0.0, 0.0, 0.5).train()
    seen = []
    cell.drop_path.register_forward_hook(lambda m, a, output: seen.append(output != 0))
    x, cls = torch.randn(64, 3, 3, 8), torch.randn(64, 1, 8)
    cell(x, cls)
    assert len(seen) == 3
    assert not any(torch.equal(a, b) for a, b in ((seen[0], seen[1]), (seen[0], seen[2]), (seen[1], seen[2])))
    cell.drop_path.drop_prob = 1 - 1e-9
    out, out_cls = cell(x, cls)
    assert torch.equal(out, x)
    assert torch.equal(out_cls, cls)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(pos_embed="learned"), "'none', 'sinusoid'"),
        (dict(rc_attention="linear"), "'performer', 'softmax'"),
        (dict(rc_heads=2), "the Performer has one head"),
        (dict(rc_heads=(1, 2), rc_attention="softmax"), "a list of 3"),
        (dict(rc_heads=5, rc_attention="softmax"), "does not divide"),
        (dict(rc_heads=0, rc_attention="softmax"), "positive"),
        (dict(embed_dim=0), "positive"),
        (dict(nc_pcm="early"), "'pre', 'post', 'none'"),
        (dict(nc_pcm_convs=4), "2, 3"),
        (dict(stem_stride=8), "1, 2, 4"),
        (dict(rc_pcm="no"), "True, False"),
        (dict(full_rc3=1), "True, False"),
        (dict(dilations=((1, 2), (1, 2))), "three reduction cells"),
        (dict(dilations=(1, 2, 3)), "whole numbers"),
        (dict(dilations=((1, 2), (0,), (1,))), "whole numbers"),
        (dict(token_dims=(64, 256)), "three reduction cells"),
        (dict(prm_dims=(64, 0, 128)), "positive"),
        (dict(groups=48), "does not divide"),
        (dict(num_heads=3), "does not divide"),
        (dict(global_pool="token"), "class_token=True"),
        (dict(rc_drop_rate=1.0), "0 up to"),
    ],
)
def test_wrong_values_say_which_exist(args, message):
    with pytest.raises(weft.WeftError) as error:
        timm.create_model("vitae_tiny", device="meta", **args)
    assert message in str(error.value)
    assert next(iter(args)) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", [key for key in SWITCHES if key.startswith(("vitae", "t2t"))])
def test_every_switch_scripts(key):
    """TorchScript compiles each combination of the modules that may be there or not."""
    name, args = SWITCHES[key]
    model, picture = randomise(timm.create_model(name, **args)), torch.randn(2, 3, 45, 64)
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.script(model)(picture), model(picture), rtol=1e-4, atol=1e-5)


# The Performer --------------------------------------------------------------------------------------------------


def tokens(scale: float, dim: int = 64, length: int = 50) -> list[Tensor]:
    return [scale * torch.randn(2, length, dim, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("scale", [1e-3, 0.1, 0.5, 1.0, 2.0])
def test_performer_is_the_released_formula(scale):
    """Values and gradients in float64, from keys that hardly differ to sums that fall below the 1e-8 beside them."""
    attn = PerformerAttention(64, dtype=torch.float64)
    given, same = ([t.clone().requires_grad_() for t in tokens(scale)] for _ in range(2))
    with torch.no_grad():
        for a, b in zip(given, same, strict=True):
            b.copy_(a)
    got, want = attn(*given), released_performer(*same, attn.w)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    weights = torch.randn_like(got)
    for output in (got, want):
        (output * weights).sum().backward()
    for a, b in zip(given, same, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-8, atol=1e-12)


def test_the_epsilon_matters_in_that_test():
    """At scale 2 the released formula is governed by its 1e-8, so a wrong factor in front of it would have shown."""
    attn = PerformerAttention(64, dtype=torch.float64)
    q, k, v = tokens(2.0)
    assert released_performer(q, k, v, attn.w).norm() < 0.01 * released_performer(q / 4, k / 4, v, attn.w).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3, 3e4])
def test_performer_at_any_scale(scale, dtype):
    """Finite, with finite gradients, and near the float64 result of the same rounded numbers."""
    attn = PerformerAttention(64)
    rounded = [t.clamp(-6e4, 6e4).to(dtype) for t in tokens(scale)]
    given = [t.clone().requires_grad_() for t in rounded]
    got = attn(*given)
    assert got.dtype == dtype
    got.float().sum().backward()
    assert all(t.grad.isfinite().all() for t in given)
    exact = PerformerAttention(64, dtype=torch.float64)
    exact.w.copy_(attn.w)
    want = exact(*(t.double() for t in rounded))
    bound = rounded[2].double().abs().max()
    assert (got.double() - want).abs().max() <= 2 * torch.finfo(dtype).eps * bound + 1e-3 * want.abs().max()


def test_performer_where_float32_overflows():
    """Queries and keys along one row of w make features of exp(m / 2) each; their product is beyond float32."""
    attn = PerformerAttention(192)
    rows = attn.w[:1].expand(1, 8, 192)
    assert not released_performer(rows, rows, rows, attn.w).isfinite().all()
    torch.testing.assert_close(attn(rows, rows, rows), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_performer_under_autocast_is_computed_in_float32(dtype):
    attn = PerformerAttention(64)
    q, k, v = (t.to(dtype) for t in tokens(3.0))
    with torch.autocast("cpu", dtype):
        inside = attn(q, k, v)
    assert torch.equal(inside, attn(q, k, v))
    assert torch.equal(inside, attn(q.float(), k.float(), v.float()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_model_with_large_pictures(dtype):
    model = randomise(timm.create_model("vitae_nano", **VITAE)).to(dtype)
    with torch.no_grad():
        logits = model(200 * torch.randn(2, 3, 40, 56, dtype=dtype))
    assert logits.dtype == dtype
    assert logits.isfinite().all()


def test_scripted_performer_is_finite_under_autocast():
    """TorchScript cannot switch autocast off, but the shifts hold there, too."""
    attn = torch.jit.script(PerformerAttention(64))
    q, k, v = (t.half() for t in tokens(30.0))
    with torch.autocast("cpu", torch.float16):
        assert attn(q, k, v).isfinite().all()


def test_performer_matrix():
    """Orthogonal rows of length sqrt(m), different in each cell, kept in the state dict, not trained."""
    model = timm.create_model("vitae_nano")
    first, second = (cell.transformer.attention.w for cell in model.reductions[:2])
    torch.testing.assert_close(first @ first.T, 16 * torch.eye(16), rtol=0, atol=1e-4)
    assert not torch.equal(first, second)
    assert "reductions.0.transformer.attention.w" in model.state_dict()
    assert not any(name.endswith(".w") for name, _ in model.named_parameters())
    half = timm.create_model("vitae_nano", dtype=torch.bfloat16).reductions[0].transformer.attention.w
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()
