"""`weft.load_host`: what a hybrid was built on gives it its weights, and nothing else does."""

import pytest
import timm
import torch
from torch import nn

import weft
from tests.conftest import randomise
from tests.helpers.variants import CSWIN, CVT, PVT


def hosts(name: str) -> tuple[nn.Module, nn.Module]:
    """A host with trained-looking weights and a hybrid with fewer blocks in the third stage."""
    if name == "swin":
        sizes = dict(embed_dim=16, num_heads=(1, 2, 4, 8), window_size=7)
        host = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 2, 4, 2), num_classes=10, **sizes)
        return randomise(host), timm.create_model("ce_swin_tiny", depths=(1, 2, 3, 2), num_classes=10, **sizes).eval()
    model, args = {"cvt": ("cvt_13", CVT), "pvt": ("pvt_small", PVT), "cswin": ("cswin_tiny", CSWIN)}[name]
    third = dict(args, depths=(*args["depths"][:2], args["depths"][2] + 1, *args["depths"][3:]))
    host = timm.create_model(model, num_classes=10, **third)
    return randomise(host), timm.create_model(model, num_classes=10, embed="ce", **args).eval()


@pytest.mark.parametrize("name", ["swin", "cvt", "pvt", "cswin"])
def test_hosts_of_the_embedding(name):
    """All but the embeddings are the host's; a stage fed with the same map computes what the host's stage does."""
    host, hybrid = hosts(name)
    before = {key: value.clone() for key, value in hybrid.state_dict().items()}
    left = weft.load_host(hybrid, host.state_dict())
    assert left
    assert all(".embed." in key for key in left)
    after = hybrid.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in left)
    assert torch.equal(after["head.weight"], host.state_dict()["head.fc.weight" if name == "swin" else "head.weight"])
    stage = hybrid.stages[1]
    host_stage = host.layers[1] if name == "swin" else host.stages[1]
    x = torch.randn(2, 28, 28, 2 * 16 if name == "swin" else hybrid.feature_info[1]["num_chs"])
    with torch.no_grad():
        y = z = x
        for ours, theirs in zip(stage.blocks, host_stage.blocks, strict=True):
            y, z = (ours(y, None)[0], theirs(z, None)[0]) if name in ("cvt", "pvt") else (ours(y), theirs(z))
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(y, x)


def test_other_classes_leave_the_head():
    host, _ = hosts("cswin")
    hybrid = timm.create_model("cswin_tiny", num_classes=3, embed="ce", **CSWIN)
    assert {"head.weight", "head.bias"} <= {*weft.load_host(hybrid, host.state_dict())}


def test_swin_of_its_authors():
    """Their files have the index of positions and the masks in them, and call the classifier `head`."""
    host, hybrid = hosts("swin")
    state = {key.replace("head.fc.", "head."): value for key, value in host.state_dict().items()}
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.int64)
    state["layers.0.blocks.0.attn_mask"] = torch.zeros(4, 49, 49)
    state["layers.0.downsample.reduction.weight"] = torch.zeros(32, 64)
    assert all(".embed." in key for key in weft.load_host(hybrid, state))


def test_position_tables_of_another_window():
    host, _ = hosts("swin")
    args = dict(embed_dim=16, depths=(1, 2, 3, 2), num_heads=(1, 2, 4, 8), num_classes=10, window_size=4)
    hybrid = timm.create_model("ce_swin_tiny", **args)
    weft.load_host(hybrid, host.state_dict())
    table = hybrid.stages[0].blocks[0].attn.relative_position_bias_table
    assert table.shape == (49, 1)
    given = host.layers[0].blocks[0].attn.relative_position_bias_table.view(1, 1, 13, 13)
    expected = nn.functional.interpolate(given, size=(7, 7), mode="bicubic", align_corners=False)
    torch.testing.assert_close(table.view(1, 1, 7, 7), expected)


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        ("cetnet_nano", {}, "has no host"),
        ("cvt_nano", {}, "has no host"),
        ("ce_swin_tiny", dict(embed_dim=24), "expected stages.0.blocks.0"),
        ("ce_cvt_13", {}, "expected stages."),
        ("vt_resnet18", {}, "expected resnet.conv1.weight"),
    ],
)
def test_other_networks_are_refused(model, source, message):
    host = timm.create_model("ceit_nano")
    if source:
        host = timm.create_model("swin_tiny_patch4_window7_224", **source)
    with pytest.raises(weft.WeftError, match=message) as error:
        weft.load_host(timm.create_model(model, num_classes=10), host.state_dict())
    assert "\n" not in str(error.value)


def test_strange_weights_are_refused():
    host, hybrid = hosts("swin")
    with pytest.raises(weft.WeftError, match=r"found layers\.0\.extra"):
        weft.load_host(hybrid, {**host.state_dict(), "layers.0.extra": torch.zeros(1)})


def test_strides_of_bottlenecks_must_agree():
    """torchvision's weights fit the default of vt_resnet50, which has its strides elsewhere; that must not pass."""
    weights = timm.create_model("resnet50").state_dict()
    with pytest.raises(weft.WeftError, match="bottleneck_stride='3x3'"):
        weft.load_host(timm.create_model("vt_resnet50"), weights)
    assert weft.load_host(timm.create_model("vt_resnet50"), weights, bottleneck_stride="1x1")
    assert weft.load_host(timm.create_model("vt_resnet50", bottleneck_stride="3x3"), weights)


def test_features_take_a_host_too():
    host, _ = hosts("swin")
    args = dict(embed_dim=16, depths=(1, 2, 3, 2), num_heads=(1, 2, 4, 8), window_size=7)
    features = timm.create_model("ce_swin_tiny", features_only=True, out_indices=(0, 1, 2), **args)
    left = weft.load_host(features, host.state_dict())
    assert all(".embed." in key for key in left)
    ours, theirs = features.model.stages[2].blocks[2].mlp.fc1.weight, host.layers[2].blocks[2].mlp.fc1.weight
    assert torch.equal(ours, theirs)


def test_a_much_deeper_host_is_refused():
    host = timm.create_model("swin_small_patch4_window7_224", embed_dim=16, num_heads=(1, 2, 4, 8), num_classes=10)
    hybrid = timm.create_model("ce_swin_tiny", embed_dim=16, num_heads=(1, 2, 4, 8), num_classes=10)
    with pytest.raises(weft.WeftError, match=r"found stages\.2\.blocks\.6"):
        weft.load_host(hybrid, host.state_dict())
