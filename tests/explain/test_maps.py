"""Layers as maps, Grad-CAM against captum's, receptive fields against arithmetic, VT's tokens against the equations."""

import numpy as np
import pytest
import timm
import torch
from captum.attr import LayerGradCam
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import weft
from tests.conftest import randomise
from tests.helpers.variants import NANO
from weft.explain import attention_of
from weft.explain.maps import as_map, block_layers, default_layer, layer_of, record_outputs, stage_layers, tensor_of
from weft.explain.receptive import Field, receptive_fields
from weft.explain.saliency import class_scores, grad_cam
from weft.explain.tokens import token_maps
from weft.heads import make_segmenter

MODELS = {
    **{name: {} for name in NANO},
    "t2t_vit_7": {},
    "resnet18": {},
    "vit_tiny_patch16_224": {"img_size": (32, 48)},
    "swin_tiny_patch4_window7_224": {"img_size": (32, 48), "depths": (1, 1, 1, 1)},
    "convnext_atto": {},
}


def make(name: str, **kwargs) -> nn.Module:
    return randomise(timm.create_model(name, num_classes=5, **MODELS.get(name, {}), **kwargs))


# Maps ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_levels_are_the_maps_that_the_model_offers(name):
    """What timm's `forward_intermediates` gives, which knows each model's layout."""
    model, x = make(name), torch.randn(2, 3, 32, 48)
    layers = stage_layers(model)
    infos = [info["module"] for info in model.feature_info]
    indices = [infos.index(layer) for layer in layers]
    with torch.no_grad(), record_outputs(model, layers) as out:
        expected = model.forward_intermediates(x, indices=indices, intermediates_only=True)
    for layer, level in zip(layers, expected, strict=True):
        torch.testing.assert_close(
            as_map(tensor_of(out[layer], layer), (32, 48), model, layer).permute(0, 3, 1, 2), level
        )


def test_a_map_as_wide_as_it_is_high_and_deep():
    """cvt_nano at 64 pixels begins with 32 x 32 x 32; the memory tells where the channels are."""
    model = make("cvt_nano")
    with torch.no_grad(), record_outputs(model, ["stages.0", "stages.0.embed.proj"]) as out:
        expected = model.forward_intermediates(torch.randn(1, 3, 64, 64), indices=[0], intermediates_only=True)[0]
    found = as_map(tensor_of(out["stages.0"], "stages.0"), (64, 64), model, "stages.0")
    assert found.shape == (1, 32, 32, 32)
    torch.testing.assert_close(found.permute(0, 3, 1, 2), expected)


def test_layers_that_are_no_maps_are_refused_in_one_line():
    model = make("vt_resnet_nano")
    with pytest.raises(weft.WeftError, match=r"no map of the picture; choose one such as 'vt\.0'"):
        grad_cam(model, torch.randn(1, 3, 32, 32), "vt.0.relation")
    with pytest.raises(weft.WeftError, match=r"Did you mean 'resnet\.layer1'"):
        layer_of(model, "resnet.layr1")
    with pytest.raises(weft.WeftError, match=r"no layer 'xyz'\. Some that it has: .*resnet\.layer3, vt\.0\.$"):
        layer_of(model, "xyz")
    assert block_layers(model)[-1] == "vt.0"


def test_class_tokens_of_models_whose_blocks_have_other_names():
    with torch.device("meta"):
        volo, coat = timm.create_model("volo_d1_224"), timm.create_model("coat_lite_tiny")
    assert default_layer(volo) == "network.4"
    coat.feature_info = []  # as before timm 1.0.31
    with pytest.raises(weft.WeftError, match=r"CoaT does not say which of its layers give maps"):
        default_layer(coat)


# Grad-CAM -----------------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """A layer whose map goes through `map` as (B, C, H, W), which is what captum understands."""

    def __init__(self, layer: nn.Module, grid: tuple[int, int], last: bool, prefix: int):
        super().__init__()
        self.layer, self.map, self.grid, self.last, self.prefix = layer, nn.Identity(), grid, last, prefix

    def forward(self, *args):
        out = self.layer(*args)
        y = out[0] if isinstance(out, tuple) else out
        if y.dim() == 3:
            tokens = y[:, self.prefix :]
            z = self.map(tokens.transpose(1, 2).unflatten(2, self.grid)).flatten(2).transpose(1, 2)
            y = torch.cat([y[:, : self.prefix], z], dim=1)
        elif self.last:
            y = self.map(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        else:
            y = self.map(y)
        return (y, *out[1:]) if isinstance(out, tuple) else y


@pytest.mark.parametrize(
    ("name", "layer", "grid", "last", "prefix"),
    [
        ("vitae_nano", "", (4, 6), True, 0),  # the attention of the last normal cell: tokens
        ("cvt_nano", "", (4, 6), True, 0),
        ("cvt_nano", "stages.1", (8, 12), True, 0),
        ("ceit_nano", "", (8, 12), True, 0),
        ("vt_resnet_nano", "", (8, 12), False, 0),
        ("cetnet_nano", "", (2, 3), True, 0),
        ("vit_tiny_patch16_224", "", (2, 3), False, 1),
        ("resnet18", "layer3", (2, 3), False, 0),
    ],
)
def test_grad_cam_is_that_of_captum(name, layer, grid, last, prefix):
    model, x, classes = make(name), torch.randn(2, 3, 32, 48), torch.tensor([1, 4])
    layer = layer or default_layer(model)
    cam = grad_cam(model, x, layer, classes)
    above, _, own = layer.rpartition(".")
    seen = Seen(layer_of(model, layer), grid, last, prefix)
    setattr(model.get_submodule(above), own, seen)
    expected = LayerGradCam(model, seen.map).attribute(x, target=classes, relu_attributions=True)
    assert cam.max() > 0
    torch.testing.assert_close(cam, expected.squeeze(1), rtol=1e-3, atol=1e-4 * float(cam.max()))


@pytest.mark.parametrize("name", MODELS)
def test_the_default_layer_has_a_say(name):
    model = make(name)
    if name == "vitae_nano":
        assert default_layer(model) == f"blocks.{len(model.blocks) - 1}.attn"  # figure 4 of the paper
    assert grad_cam(model, torch.randn(1, 3, 32, 48).expand(5, -1, -1, -1), classes=range(5)).max() > 0


def test_a_planted_class_is_found_where_it_is():
    """A network whose only score is the sum of one corner's brightness."""

    class Corner(nn.Module):
        feature_info = (dict(module="conv", reduction=1, num_chs=2),)

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 1, bias=False)
            nn.init.ones_(self.conv.weight)

        def forward(self, x):
            return self.conv(x).sum(dim=(2, 3))

    x = torch.zeros(1, 1, 8, 8)
    x[..., 1, 6] = 1
    assert int(grad_cam(Corner().eval(), x).argmax()) == 1 * 8 + 6


def test_a_segmenter_is_asked_about_its_pixels():
    x = torch.tensor([[[[1.0, 0.0], [0.5, 0.0]]]])
    answer = {"out": torch.cat([x, 0.4 - x], dim=1)}  # class 0 where x > 0.2
    assert class_scores(answer, [0]).item() == 1.5  # of the pixels that are given to the class, no others
    assert class_scores(answer, [1]).item() == pytest.approx(0.8)


# Receptive fields ---------------------------------------------------------------------------------------------------


class Chain(nn.Sequential):
    """A network that says which of its layers are levels."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers)
        self.feature_info = [dict(module=str(i), reduction=1) for i in range(len(layers))]


@given(st.sampled_from([1, 3, 5, 7]), st.integers(0, 3))
def test_the_field_of_a_convolution_is_its_kernel(kernel, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(1, 1, kernel, padding=kernel // 2).double()
    (field,) = receptive_fields(Chain(conv).eval(), torch.randn(3, 1, 17, 17, dtype=torch.float64), draws=1)
    expected = conv.weight.detach().abs()[0, 0]
    half = kernel // 2
    window = field.values[8 - half : 9 + half, 8 - half : 9 + half]
    np.testing.assert_allclose(window, expected / expected.max(), rtol=1e-9)
    assert (field.values > 0).sum() == kernel**2  # and nothing outside of it


def test_a_stack_is_as_wide_as_arithmetic_says():
    """Kernels k at strides s: the width grows by (k - 1) times the strides before."""
    layers = [nn.Conv2d(3, 4, 3, 1, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.LeakyReLU(), nn.Conv2d(4, 4, 5, 2, 2)]
    fields = receptive_fields(Chain(*layers).double().eval(), torch.randn(4, 3, 64, 64, dtype=torch.float64))
    widths = [np.ptp(np.nonzero(field.values)[axis]) + 1 for field in fields for axis in (0, 1)]
    assert widths == [3, 3, 3, 3, 5, 5, 5, 5, 13, 13]


def test_random_signs_add_the_squares_of_the_channels():
    conv = nn.Conv2d(2, 3, 3, padding=1, bias=False).double()
    (field,) = receptive_fields(Chain(conv).eval(), torch.zeros(1, 2, 9, 9, dtype=torch.float64), draws=1500)
    expected = conv.weight.detach().square().sum(dim=(0, 1)).sqrt()
    np.testing.assert_allclose(field.values[3:6, 3:6], expected / expected.max(), atol=0.08)


def test_sizes_of_a_field():
    values = np.zeros((20, 20))
    values[5:13, 6:14] = 1
    field = Field("x", values)
    assert field.side(1.0) == 8  # as many pixels as a square of 8 x 8
    assert field.side(0.25) == 4
    assert field.centre == (9, 10)
    values[9, 18] = 3
    assert field.centre == pytest.approx(((64 * 9 + 3 * 9.5) / 67, (64 * 10 + 3 * 18.5) / 67))
    values[9, 18] = 0
    assert field.numbers() == {"layer": "x", "side_50": round(32**0.5, 2), "side_95": round(61**0.5, 2)}


# VT's tokens --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_token_maps_are_equations_1_and_3():
    """Both rows of the paper's figure 6, computed again from the parameters."""
    model, x = make("vt_resnet_nano"), torch.randn(2, 3, 32, 48)
    with record_outputs(model, ["resnet.layer3", "vt.0.tokenizer"]) as out:
        first, second = token_maps(attention_of(model, x))
    pixels, tokens = out["resnet.layer3"].flatten(2).transpose(1, 2), out["vt.0.tokenizer"]
    tokenizer, relation = model.vt[0].tokenizer, model.vt[0].relation
    made = (tokenizer.coefficients(pixels) / pixels.shape[2] ** 0.5).softmax(dim=1).transpose(1, 2)  # (B, L, H * W)
    q, k = (conv(tokens.unsqueeze(2)).squeeze(2).unflatten(2, (4, -1)) for conv in (relation.query, relation.key))
    weights = (torch.einsum("bihc,bjhc->bhij", q, k) / q.shape[3] ** 0.5).softmax(dim=3).mean(dim=1)
    torch.testing.assert_close(first.maps.flatten(2), made)
    torch.testing.assert_close(first.interactions.flatten(2), weights @ made)
    assert (first.name, second.name, second.maps.shape) == ("vt.0", "vt.1", (2, 16, 8, 12))
    torch.testing.assert_close(second.interactions.sum(dim=(2, 3)), torch.ones(2, 16))


def test_levels_of_vt_fpn_have_token_maps_of_their_own():
    backbone = timm.create_model("vt_resnet_nano")
    model = make_segmenter(backbone, "vt-fpn", 3, channels=32, head_channels=16, num_tokens=4, token_dim=64).eval()
    maps = token_maps(attention_of(model, torch.randn(1, 3, 64, 64)))
    names = [module.name for module in maps]
    assert len(set(names)) == len(names)
    assert [name for name in names if "tokenizers" in name] == [f"head.pyramid.tokenizers.{i}" for i in range(4)]


def test_models_without_visual_tokens_have_no_token_maps():
    assert token_maps(attention_of(make("cvt_nano"), torch.randn(1, 3, 32, 32))) == []
