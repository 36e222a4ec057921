"""Pyramids: every family and timm's kinds of models, at odd sizes, with a gradient for all that is trained."""

import copy
import functools

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models import group_parameters
from torch import nn

import weft
from tests.helpers.variants import SMALL
from weft.heads.features import STRIDES, Features, any_size
from weft.heads.segmenter import Segmenter

TIMM = {  # own strides of each
    "resnet18": [4, 8, 16, 32],
    "convnext_atto": [4, 8, 16, 32],
    "vit_tiny_patch16_224": [16],
    "swin_tiny_patch4_window7_224": [4, 8, 16, 32],
    "mobilenetv3_small_050": [4, 8, 16, 32],
    "xcit_nano_12_p16_224": [16],  # whose class token no map depends on
    "dla46_c": [4, 8, 16, 32],  # without forward_intermediates
}
OWN = {
    "cvt_nano": [4, 8],  # strides 2, 4, 8
    "ceit_nano": [4],
    "vitae_nano": [4, 8],
    "vt_resnet_nano": [4],
    "cetnet_nano": [4, 8, 16],
    "t2t_vit_7": [4, 8, 16],
    "pvt_small": [4, 8, 16, 32],
    "cswin_tiny": [4, 8, 16, 32],
    "ce_swin_tiny": [4, 8, 16, 32],
}


ARGS = {
    **SMALL,
    "vt_resnet_nano": {},  # on its 1x1 convolutions of 8 channels and stride 2 oneDNN crashes
    "swin_tiny_patch4_window7_224": dict(embed_dim=24, depths=(2, 1, 1, 1), num_heads=(1, 2, 4, 8)),
}
size_args = functools.cache(any_size)


def small(name: str, **kwargs) -> nn.Module:
    return timm.create_model(name, num_classes=0, **size_args(name), **ARGS.get(name, {}), **kwargs)


def sizes(height: int, width: int) -> list[tuple[int, int]]:
    return [(-(-height // stride), -(-width // stride)) for stride in STRIDES]


@pytest.mark.parametrize(("name", "own"), [*((name, OWN[name]) for name in SMALL), *TIMM.items()])
def test_maps_of_any_size_and_gradients(name, own):
    features = Features(small(name))
    assert (features.own, features.strides, features.training) == (own, [4, 8, 16, 32], True)
    maps = features(torch.randn(2, 3, 97, 131))
    assert [y.shape[1] for y in maps] == features.channels
    assert [tuple(y.shape[2:]) for y in maps] == sizes(97, 131)
    sum(y.square().sum() for y in maps).backward()
    assert [name for name, p in features.named_parameters() if p.requires_grad and p.grad is None] == []
    left = [name for name, p in features.named_parameters() if not p.requires_grad]
    assert all(name.startswith(("trunk.head", "trunk.cls_token")) for name in left)


@pytest.mark.parametrize("name", ["cetnet_nano", "cvt_nano", "vt_resnet_nano", "convnext_atto"])
def test_own_maps_are_the_models(name):
    """They are what the whole model gives on the way, and making them has changed no weight and no statistic."""
    model = small(name).eval()
    picture = torch.randn(1, 3, 64, 96)
    expected = copy.deepcopy(model).forward_intermediates(picture, intermediates_only=True)
    features = Features(model)
    assert not features.trunk.training
    features.norms = nn.ModuleList(nn.Identity() for _ in features.own)
    for stride, got in zip(STRIDES, features(picture), strict=True):
        if stride in features.own:
            [want] = [y for y in expected if y.shape[2] == 64 // stride][-1:]
            torch.testing.assert_close(got, want)


def test_missing_maps_are_made():
    """Coarse ones by pooling, fine ones by transposed convolutions that halve the channels."""
    _, eighth, sixteenth, last = Features(small("cvt_nano"))(torch.randn(1, 3, 104, 72))
    assert torch.equal(sixteenth, F.max_pool2d(eighth, 2, ceil_mode=True))
    assert torch.equal(last, F.max_pool2d(eighth, 4, ceil_mode=True))
    features = Features(small("vit_tiny_patch16_224"))
    assert features.channels == [48, 96, 192, 192]
    quarter, half, same, _ = features.makers
    found = torch.randn(1, 192, 2, 3)
    assert quarter(found).shape == (1, 48, 8, 12)
    assert half(found).shape == (1, 96, 4, 6)
    assert same(found) is found


def test_a_patch_of_fourteen_pixels_counts_as_sixteen():
    maps = Features(small("eva02_tiny_patch14_224", depth=1))(torch.randn(1, 3, 60, 100))
    assert [tuple(y.shape[2:]) for y in maps] == sizes(60, 100)


def test_padding_is_inside():
    """A model that cuts rows off sees a padded picture, and the maps end where the picture ends."""
    features = Features(small("convnext_atto")).eval()
    picture = torch.randn(1, 3, 70, 97)
    padded = features(F.pad(picture, (0, 31, 0, 26)))
    for got, want in zip(features(picture), padded, strict=True):
        assert torch.equal(got, want[:, :, : got.shape[2], : got.shape[3]])


TINY = Features(small("cetnet_nano")).eval()


@given(height=st.integers(1, 90), width=st.integers(1, 90))
@settings(max_examples=15)
def test_every_size(height, width):
    with torch.no_grad():
        maps = TINY(torch.zeros(1, 3, height, width))
    assert [tuple(y.shape[2:]) for y in maps] == sizes(height, width)
    assert all(y.isfinite().all() for y in maps)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050", "ceit_nano"])
def test_layers_and_weight_decay_are_the_models(name):
    """Layer-wise rates and exemptions reach the same parameters through the new names; what is new comes last."""
    model = small(name)
    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else set()
    expected = group_parameters(model, model.group_matcher(coarse=False), reverse=True)
    whole = Segmenter(Features(model), nn.Conv2d(1, 1, 1))
    assert whole.no_weight_decay() == {f"backbone.trunk.{name}" for name in exempt}
    got = group_parameters(whole, whole.group_matcher(coarse=False), reverse=True)
    shared = {key for key in expected if f"backbone.trunk.{key}" in got}
    assert len(shared) > len(expected) // 2
    assert {key: got[f"backbone.trunk.{key}"] for key in shared} == {key: expected[key] for key in shared}
    assert got["head.weight"] == max(got.values())


def test_model_of_one_size_cannot():
    with pytest.raises(weft.WeftError, match="any size"):
        Features(timm.create_model("mixer_s32_224", num_classes=0, device="meta"))


def test_model_that_names_no_maps_cannot():
    model = timm.create_model("resnet18", num_classes=0, device="meta")
    del model.feature_info
    with pytest.raises(weft.WeftError, match="ResNet gives no feature maps"):
        Features(model)


def test_what_makes_a_model_take_any_size():
    assert any_size("cvt_nano") == any_size("resnet18") == {}
    assert any_size("vit_tiny_patch16_224") == {"dynamic_img_size": True, "dynamic_img_pad": True}
    assert any_size("swin_tiny_patch4_window7_224") == {"strict_img_size": False}


def test_gradient_checkpointing_reaches_the_trunk():
    features = Features(small("cetnet_nano"))
    features.set_grad_checkpointing()
    assert features.trunk.grad_checkpointing
