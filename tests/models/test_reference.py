"""Weft against networks that others wrote, or that were written from the specification alone."""

import pytest
import timm
import torch

import weft
from tests.conftest import randomise
from tests.helpers.published import OfficialCeiT, hugging_face_cvt
from weft.models.weights.layouts import _official_ceit


@pytest.fixture(scope="module")
def cvt_pair():
    """transformers' CvT-13 and ours, same weights, trained-looking BatchNorm."""
    torch.manual_seed(0)
    theirs = randomise(hugging_face_cvt())
    return theirs, weft.convert(theirs.state_dict(), model="cvt_13")


@pytest.mark.parametrize("size", [(224, 224), (161, 250)])
def test_cvt_forward_equals_transformers(cvt_pair, size):
    theirs, ours = cvt_pair
    picture = torch.randn(2, 3, *size)
    with torch.no_grad():
        expected = theirs(picture, output_hidden_states=True)
        torch.testing.assert_close(ours(picture), expected.logits, rtol=0, atol=1e-5)
        maps = ours.forward_intermediates(picture, intermediates_only=True)
    for got, want in zip(maps, expected.hidden_states, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_cvt_gradients_equal_transformers():
    """In training mode and float64: batch statistics, every parameter, and the picture itself."""
    small = dict(embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 2, 3], drop_path_rate=[0.0, 0.0, 0.0])
    theirs = hugging_face_cvt(**small).double().train()
    ours = timm.create_model(
        "cvt_13",
        embed_dims=(16, 32, 64),
        num_heads=(1, 2, 4),
        depths=(1, 2, 3),
        num_classes=10,
        act_layer="gelu",
        drop_path_rate=0.0,
        dtype=torch.float64,
    ).train()
    ours.load_state_dict(weft.models.weights.layouts.filter_published(theirs.state_dict(), ours))
    picture = torch.randn(3, 3, 70, 52, dtype=torch.float64)
    gradients = []
    for model in (theirs, ours):
        given = picture.clone().requires_grad_()
        out = model(given)
        (out.logits if model is theirs else out).square().sum().backward()
        named = {name: p.grad for name, p in model.named_parameters()}
        gradients.append({"picture": given.grad, **named})
    theirs_renamed = weft.models.weights.layouts.filter_published(gradients[0], ours)
    assert theirs_renamed.keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradient, theirs_renamed[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("name", "dim", "heads", "size"), [("ceit_tiny", 192, 3, 224), ("ceit_small", 384, 6, 96)])
def test_ceit_equals_the_released_network(name, dim, heads, size):
    theirs = randomise(OfficialCeiT(dim, heads, img_size=size, classes=10))
    ours = weft.convert(theirs.state_dict(), model=name)
    picture = torch.randn(2, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), theirs(picture), rtol=0, atol=2e-5)


def test_ceit_gradients_equal_the_released_network():
    theirs = OfficialCeiT(32, 2, depth=3, img_size=48, classes=5).double().train()
    ours = timm.create_model(
        "ceit_tiny",
        embed_dim=32,
        num_heads=2,
        depth=3,
        img_size=48,
        num_classes=5,
        drop_path_rate=0,
        dtype=torch.float64,
    ).train()
    ours.load_state_dict(_official_ceit(theirs.state_dict()))
    picture = torch.randn(3, 3, 48, 48, dtype=torch.float64)
    for model in (theirs, ours):
        model(picture).square().sum().backward()
    expected = _official_ceit({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_ceit_without_its_convolutions_is_deit():
    """I2T, LeFF's convolution and LCA switched off: timm's DeiT-T, weight for weight."""
    deit = randomise(timm.create_model("deit_tiny_patch16_224", num_classes=10))
    ours = timm.create_model(
        "ceit_tiny", num_classes=10, i2t_layers="none", leff_kernel=0, leff_norm=False, lca=False
    ).eval()
    state = {}
    for key, value in deit.state_dict().items():
        key = key.replace("patch_embed.proj", "proj").replace("mlp.fc", "leff.linear")
        key = key.replace("leff.linear1.", "leff.linear1.linear.").replace("leff.linear2.", "leff.linear2.linear.")
        state[key] = value
    positions = state.pop("pos_embed")
    state["pos_embed.cls"], state["pos_embed.grid"] = positions[:, :1], positions[0, 1:].view(14, 14, -1)
    ours.load_state_dict(state)
    picture = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(ours(picture), deit(picture), rtol=0, atol=1e-5)


@pytest.mark.parametrize("projection", ["conv", "avg", "linear"])
@pytest.mark.parametrize("size", [(24, 24), (13, 18)])
def test_cvt_attention_twin(projection, size):
    """Against attention written out: explicit softmax, scale by the full width, class token past the convolution."""
    from weft.models.cvt import Attention

    dim, heads, cls = 12, 3, torch.randn(2, 1, 12)
    attn = randomise(Attention(dim, heads, projection, 2, 0.0, 0.0))
    x = torch.randn(2, *size, dim)
    nchw = x.permute(0, 3, 1, 2)
    if projection == "conv":
        maps = [c.bn(c.conv(nchw)) for c in (attn.conv_proj_q, attn.conv_proj_k, attn.conv_proj_v)]
    elif projection == "avg":
        pooled = torch.nn.functional.avg_pool2d(nchw, 3, 2, 1, ceil_mode=True)
        maps = [nchw, pooled, pooled]
    else:
        maps = [nchw] * 3
    tokens = [torch.cat([cls, m.flatten(2).transpose(1, 2)], dim=1) for m in maps]
    q, k, v = (p(t) for p, t in zip((attn.proj_q, attn.proj_k, attn.proj_v), tokens, strict=True))
    out = [
        (qh @ kh.transpose(1, 2) * dim**-0.5).softmax(-1) @ vh
        for qh, kh, vh in zip(*(t.chunk(heads, -1) for t in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(attn(x, cls), attn.proj(torch.cat(out, -1)), rtol=1e-5, atol=1e-5)
