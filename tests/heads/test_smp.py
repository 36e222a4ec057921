"""Models as encoders of segmentation_models_pytorch: all families under its decoders, at its default depth."""

import pytest
import segmentation_models_pytorch as smp
import timm
import torch

import weft
from weft.errors import WeftError

FAMILY_MODELS = ("ceit_nano", "vitae_nano", "vt_resnet_nano", "cvt_13", "cetnet_nano")
SMALL = {"cvt_13": dict(depths=(1, 1, 1))}


def test_each_family_is_tried():
    assert {name.split("_")[0] for name in FAMILY_MODELS} == {"ceit", "vitae", "vt", "cvt", "cetnet"}


def narrow(decoder: str) -> dict:
    if decoder in ("Unet", "UnetPlusPlus", "MAnet"):
        return dict(decoder_channels=(16, 16, 8, 8, 8))
    key = "decoder_pyramid_channels" if decoder == "FPN" else "decoder_channels"
    return {key: 16, **(dict(decoder_segmentation_channels=32) if decoder == "FPN" else {})}


@pytest.mark.parametrize("decoder", ["Unet", "FPN", "UPerNet"])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_decoders_train_on_every_family(name, decoder):
    """Unet takes pictures of any size, the others want multiples of 32, which SMP itself says."""
    torch.manual_seed(0)
    encoder = weft.smp(name, **SMALL.get(name, {}))
    model = getattr(smp, decoder)(encoder, encoder_weights=None, classes=3, **narrow(decoder))
    assert model.encoder.out_channels[:2] == [3, 0]
    assert len(model.encoder.out_channels) == 6
    for height, width in [(64, 96), *([(61, 93), (33, 70)] if decoder == "Unet" else [])]:
        picture = torch.randn(2, 3, height, width)
        maps = model.encoder(picture)
        strides = (1, 2, 4, 8, 16, 32)
        expected = [
            (2, channels, -(-height // s), -(-width // s))
            for channels, s in zip(model.encoder.out_channels, strides, strict=True)
        ]
        assert [tuple(one.shape) for one in maps] == expected
        masks = model(picture)
        assert masks.shape == (2, 3, height, width)
    masks.square().mean().backward()
    trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert [n for n, grad in trained.items() if grad is None] == []
    assert sum(float(grad.abs().sum()) > 0 for n, grad in trained.items() if n.startswith("encoder")) > 10


@pytest.mark.parametrize("decoder", ["UnetPlusPlus", "MAnet", "Linknet", "Segformer", "PSPNet"])
def test_other_decoders(decoder):
    args = {} if decoder in ("Linknet", "Segformer", "PSPNet") else narrow(decoder)
    model = getattr(smp, decoder)(weft.smp("cetnet_nano"), encoder_weights=None, in_channels=4, classes=2, **args)
    assert model(torch.randn(2, 4, 64, 96)).shape == (2, 2, 64, 96)


def test_maps_are_those_of_the_model():
    """Where a model has a map of a stride, the encoder gives that one, normalised."""
    model = smp.Unet(weft.smp("cvt_13", depths=(1, 1, 1)), encoder_weights=None).eval()
    plain = timm.create_model("cvt_13", depths=(1, 1, 1), num_classes=0).eval()
    plain.load_state_dict(model.encoder.features.trunk.state_dict(), strict=False)
    picture = torch.randn(1, 3, 64, 96)
    theirs = plain.forward_intermediates(picture, intermediates_only=True)
    ours = model.encoder(picture)[2:5]
    for a, b, norm in zip(ours, theirs, model.encoder.features.norms, strict=True):
        torch.testing.assert_close(a, norm(b))


def test_a_saved_model_opens_again(tmp_path):
    model = smp.FPN(weft.smp("ceit_nano"), encoder_weights=None, **narrow("FPN")).eval()
    model.save_pretrained(str(tmp_path))
    again = smp.from_pretrained(str(tmp_path)).eval()
    picture = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(picture), again(picture))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: smp.DeepLabV3(weft.smp("cvt_nano"), encoder_weights=None), "output stride of 8"),
        (lambda: smp.Unet(weft.smp("cvt_nano"), encoder_weights=None, encoder_depth=2), "encoder_depth=2"),
        (lambda: weft.smp("cvt_nanno"), "cvt_nano"),
        (lambda: weft.smp("cvt_nano", in_chans=4), "in_chans is the decoder's to say"),
    ],
)
def test_what_cannot_be(make, words):
    with pytest.raises(WeftError, match=words):
        make()
