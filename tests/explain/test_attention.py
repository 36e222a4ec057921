"""Attention that is read against what the layers do with it: weights times values are their answers."""

from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.conftest import randomise
from tests.helpers.variants import PLAIN, SWITCHES
from weft.errors import WeftError
from weft.explain import LayerAttention, attention_layers, attention_of, left_out, record_attention, rollout
from weft.models import ceit, cetnet, cvt, vt
from weft.models.baselines import cswin, pvt
from weft.models.performer import SoftmaxAttention

OWN = (
    *PLAIN,
    *("cvt-avg", "cvt-linear", "cvt-per-block", "cvt-no-class-token", "cvt-pos-every", "vitae-paper", "ceit-no-lca"),
    *("cetnet-window-7", "cetnet-T-T-T-T-T-T-T-T", "vt-clustering", "vt-carried", "vt-every-projector", "pvt-sr"),
    *("cswin-split", "vitae-rc-heads", "t2t-vit-softmax"),
)
TIMM = {
    "vit": ("vit_tiny_patch16_224", dict(img_size=(64, 48), patch_size=8, depth=2, qk_norm=True, reg_tokens=3)),
    "swin": ("swin_tiny_patch4_window7_224", dict(img_size=56, embed_dim=12, depths=(2, 2, 2, 2))),
    "swin-padded": ("swin_tiny_patch4_window7_224", dict(img_size=(72, 64), embed_dim=12, depths=(2, 2, 2, 2))),
}
SIZES = {"vit": (64, 48), "swin": (56, 56), "swin-padded": (72, 64)}
MODELS = {name: SWITCHES[name] for name in OWN} | TIMM


def make(name: str) -> tuple[nn.Module, Tensor]:
    """A model with weights that make attention sharp, and pictures that windows and strides do not divide."""
    model_name, args = MODELS[name]
    model = randomise(timm.create_model(model_name, **args, num_classes=5))
    for key, parameter in model.named_parameters():
        projects = any(letter in f".{key}".split(".")[-2] for letter in "qk")
        if parameter.ndim == 1 or (parameter.ndim == 2 and (projects or "table" in key)):
            nn.init.normal_(parameter, std=0.3)
    return model, torch.randn(2, 3, *SIZES.get(name, (44, 36)))


def heads(x: Tensor, count: int) -> Tensor:
    return x.flatten(1, -2).unflatten(2, (count, -1)).transpose(1, 2)  # (B, heads, N, d)


class Calls(dict):
    """What every module of a model got first, and what it gave."""

    def __init__(self, model: nn.Module):
        super().__init__()
        for module in model.modules():
            module.register_forward_hook(lambda m, args, output: self.__setitem__(m, (args, output)))

    def got(self, module: nn.Module) -> Tensor:
        return self[module][0][0]

    def gave(self, module: nn.Module) -> Tensor:
        return self[module][1]


def values_and_answer(module, calls: Calls) -> tuple[Tensor, Tensor]:
    """(B, keys, C) values of an attention layer, by its own modules, and the (B, queries, C) that it makes of them."""
    match module:
        case Attention():
            return calls.gave(module.qkv).chunk(3, dim=-1)[2], calls.got(module.proj)
        case cvt.Attention():
            return calls.gave(module.proj_v), calls.got(module.proj)
        case ceit.LCA() | pvt.SpatialReductionAttention():
            return calls.gave(module.kv).chunk(2, dim=-1)[1], calls.got(module.proj)
        case cetnet.LEWinAttention():
            return calls.gave(module.v), calls.got(module.proj)
        case WindowAttention() | cswin.CrossShapedAttention():
            return calls.gave(module.qkv).chunk(3, dim=-1)[2], calls.got(module.proj)
        case vt.FilterTokenizer() | vt.ClusteringTokenizer() | vt.RecurrentTokenizer():
            return module.value(calls.got(module)), calls.got(module.token)
        case vt.Transformer():
            return module.value(calls.got(module).unsqueeze(2)), calls.got(module.f1) - calls.got(module)
        case vt.Projector():
            x, tokens = calls[module][0]
            return module.value(tokens), calls.gave(module) - module.shortcut(x)
    raise AssertionError(type(module))


def check(model: nn.Module, layer: LayerAttention, calls: Calls) -> None:
    module = model.get_submodule(layer.name)
    if isinstance(module, SoftmaxAttention):  # its layers are one level up
        step: Any = model.get_submodule(layer.name.removesuffix(".attention"))
        values, answer = calls.gave(step.kqv).chunk(3, dim=-1)[2], calls.got(step.proj)
    else:
        values, answer = values_and_answer(module, calls)
    rows = layer.rows()
    assert rows.shape == (2, layer.heads, len(layer.queries), len(layer.keys))
    found = (rows @ heads(values, layer.heads)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, answer.flatten(1, -2), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("swin")])
def test_weights_times_values_are_the_answers_of_a_layer(name):
    model, pictures = make(name)
    model = model.double()
    for module in model.modules():
        if isinstance(module, cswin.LePEAttention):  # it is added to what attention answers
            for parameter in module.lepe.parameters():
                nn.init.zeros_(parameter)
    layers = attention_of(model, pictures.double())
    calls = Calls(model)
    with torch.no_grad():
        model(pictures.double())
        for layer in layers:
            check(model, layer, calls)
    assert [layer.name for layer in layers] == [n for n in attention_layers(model) if n in [x.name for x in layers]]
    assert layers


@pytest.mark.parametrize("name", ["swin", "swin-padded"])
def test_weights_times_values_are_the_answers_of_timms_swin(name):
    model, pictures = make(name)
    model, size = model.double(), SIZES[name]
    blocks: Any = [module for module in model.modules() if isinstance(module, SwinTransformerBlock)]
    for block in blocks:
        with torch.no_grad():
            block.attn.qkv.bias[-block.attn.qkv.out_features // 3 :] = 0  # what padding answers
    calls = Calls(model)
    with torch.no_grad(), record_attention(model, size) as layers:
        model(pictures.double())
    assert len(layers) == 8
    assert any(any(block.shift_size) for block in blocks)
    with torch.no_grad():
        for layer, block in zip(layers, blocks, strict=True):
            x = calls.gave(block.norm1)
            values = heads(block.attn.qkv(x).chunk(3, dim=-1)[2], layer.heads)
            found = block.attn.proj((layer.rows() @ values).transpose(1, 2).flatten(2))
            torch.testing.assert_close(found, block._attn(x).flatten(1, 2), rtol=1e-9, atol=1e-11)


def check_unchanged(model: nn.Module, pictures: Tensor) -> None:
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with torch.inference_mode():
        before = model(pictures)
        with record_attention(model, (pictures.shape[2], pictures.shape[3])) as layers:
            during = model(pictures)
    assert torch.equal(before, during)
    assert [layer.name for layer in layers] == attention_layers(model)
    assert hooks == [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize("name", [*PLAIN, "vit", "swin"])
def test_answers_stay_the_same_to_the_last_bit(name):
    model, pictures = make(name)
    check_unchanged(model, pictures)
    check_unchanged(weft.fuse(model), pictures)


@pytest.mark.parametrize("name", PLAIN)
def test_a_fused_model_has_the_same_attention(name):
    """Folded weights round differently. The last block of CvT is asked by the class token alone."""
    model, pictures = make(name)
    plain, fused = attention_of(model, pictures), attention_of(weft.fuse(model), pictures)
    for a, b in zip(plain, fused, strict=True):
        assert (a.name, a.kind, a.heads, a.keys) == (b.name, b.kind, b.heads, b.keys)
        torch.testing.assert_close(b.rows(), a.rows(0, len(b.queries)), rtol=1e-3, atol=1e-5)


def test_class_token_alone_asks_in_the_last_block_of_a_fused_cvt():
    model, pictures = make("cvt")
    last = attention_of(weft.fuse(model), pictures)[-1]
    assert (last.queries.extra, last.queries.grid, last.keys.extra) == (1, None, 1)


@pytest.mark.parametrize("name", [*PLAIN, "swin-padded"])
def test_chunks_are_the_whole(name):
    model, pictures = make(name)
    for layer in attention_of(model, pictures):
        whole = layer.rows()
        pieces = list(layer.chunks(most=3 * layer.pictures * layer.heads * len(layer.keys)))
        assert [first for first, _ in pieces] == sorted(first for first, _ in pieces)
        torch.testing.assert_close(torch.cat([rows for _, rows in pieces], dim=2), whole)
        torch.testing.assert_close(layer.received(), whole.mean(dim=2))


class Largest(TorchDispatchMode):
    """The largest number of elements that an operation has made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(t.numel() for t in tensors if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize(("name", "layer_name"), [("ceit", "blocks.0.attn"), ("cetnet", "stages.0.blocks.0.attn")])
def test_memory_is_that_of_a_chunk(name, layer_name):
    model, pictures = make(name)
    most, pictures = 2**16, torch.randn(1, 3, 112, 112)
    with Largest() as pass_alone, torch.no_grad():
        model(pictures)
    with Largest() as recording:
        layer, *rest = attention_of(model, pictures, [layer_name])
    assert not rest
    assert layer.heads * len(layer.queries) * len(layer.keys) > 10 * most
    with Largest() as asking:
        assert sum(rows.shape[2] for _, rows in layer.chunks(most=most)) == len(layer.queries)
    assert asking.elements <= most
    assert recording.elements <= pass_alone.elements


@pytest.mark.parametrize(
    ("name", "layer", "queries", "keys"),
    [  # extra tokens; rows and columns; pixels from one to the next; centre of the first
        ("cvt", 0, (0, 22, 18, (2, 2), (1, 1)), (0, 11, 9, (4, 4), (1, 1))),
        ("cvt", -1, (1, 6, 5, (8, 8), (4, 4)), (1, 3, 3, (16, 16), (4, 4))),
        ("cvt-avg", 0, (0, 22, 18, (2, 2), (1, 1)), (0, 12, 10, (4, 4), (1, 1))),
        ("ceit", 0, (1, 11, 9, (4, 4), (2, 2)), (1, 11, 9, (4, 4), (2, 2))),
        ("cetnet", 0, (0, 22, 18, (2, 2), (1, 1)), (0, 22, 18, (2, 2), (1, 1))),
        ("pvt", 1, (0, 6, 5, (8, 8), (4, 4)), (0, 2, 2, (32, 32), (16, 16))),
        ("pvt", -1, (1, 2, 2, (32, 32), (16, 16)), (1, 2, 2, (32, 32), (16, 16))),
        ("vit", 0, (4, 8, 6, (8, 8), (4, 4)), (4, 8, 6, (8, 8), (4, 4))),
    ],
)
def test_tokens_know_where_they_are(name, layer, queries, keys):
    model, pictures = make(name)
    found = attention_of(model, pictures)[layer]
    for side, (extra, height, width, step, start) in ((found.queries, queries), (found.keys, keys)):
        assert side.grid is not None
        assert (side.extra, side.grid.height, side.grid.width) == (extra, height, width)
        assert (side.grid.step, side.grid.start) == (step, start)
        assert side.grid.centers()[-1].tolist() == [start[0] + step[0] * (height - 1), start[1] + step[1] * (width - 1)]
        assert [side.grid.index(y, x) for y, x in side.grid.centers().tolist()] == list(range(height * width))


def test_tokens_of_a_visual_transformer_and_layers_of_lca_have_no_place():
    model, pictures = make("vt")
    found = {layer.name: layer for layer in attention_of(model, pictures)}
    kinds = {name: layer.kind for name, layer in found.items()}
    assert kinds == {
        "vt.0.tokenizer": "tokenizer",
        "vt.0.relation": "tokens",
        "vt.0.projector": "projector",
        "vt.1.tokenizer": "tokenizer",
        "vt.1.relation": "tokens",
    }
    assert found["vt.0.tokenizer"].queries.grid is None
    assert found["vt.0.projector"].keys.extra == 8
    lca = attention_of(*make("ceit"), layers=["lca"])[0]
    assert (lca.kind, len(lca.queries), lca.keys.extra, lca.keys.grid) == ("layers", 1, 3, None)


def test_a_segmenter_with_vt_fpn_is_read_whole():
    from weft.heads import make_segmenter

    backbone = timm.create_model("vt_resnet_nano", **SWITCHES["vt"][1])
    model = make_segmenter(backbone, "vt-fpn", 3, channels=32, token_dim=64).eval()
    layers = attention_of(model, torch.randn(1, 3, 64, 64))
    kinds = [layer.kind for layer in layers if "pyramid" in layer.name]
    assert kinds == ["tokenizer"] * 4 + ["tokens"] + ["projector"] * 4
    with pytest.raises(WeftError, match="relates the tokens of several maps"):
        rollout(layers)


def test_a_replayed_or_compiled_model_is_read_as_the_model_in_it():
    model, pictures = make("ceit")
    compiled: Any = torch.compile(model, backend="eager")
    for wrapped in (weft.replay(model), compiled):
        assert len(attention_of(wrapped, pictures)) == 4


def test_what_does_not_apply_is_said():
    model, pictures = make("vitae")
    assert "linear" in left_out(model)["reductions.0.transformer.attention"]
    with pytest.raises(WeftError, match=r"'reductions.0.transformer.attention': does not apply"):
        attention_of(model, pictures, ["reductions.0.transformer.attention"])
    assert "is not known" in left_out(timm.create_model("pvt_v2_b0"))["stages.0.blocks.0.attn"]


def test_errors_say_what_to_do():
    model, pictures = make("cvt")
    with pytest.raises(WeftError, match=r"Did you mean 'stages.2.blocks.1.attn'"):
        attention_of(model, pictures, ["stages.2.block.1.attn"])
    with pytest.raises(WeftError, match=r"ResNet has no attention that can be read"):
        attention_of(timm.create_model("resnet10t").eval(), pictures)
    with pytest.raises(WeftError, match=r"model.eval\(\)"):
        attention_of(model.train(), pictures)
    patterns = attention_of(model.eval(), pictures, ["stages.2.*"])
    assert [layer.name for layer in patterns] == ["stages.2.blocks.0.attn", "stages.2.blocks.1.attn"]
