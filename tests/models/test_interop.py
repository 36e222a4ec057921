"""In other people's pipelines: segmentation_models_pytorch takes the models as encoders by their timm names."""

import pytest
import segmentation_models_pytorch as smp
import torch

import weft  # noqa: F401  registers the models

CHANNELS = [3, 0, 64, 192, 384]  # SMP puts a picture and an empty level in front of strides 4, 8 and 16


@pytest.mark.parametrize(
    ("decoder", "args"), [("unet", dict(decoder_channels=(32, 16, 16, 8))), ("upernet", dict(decoder_channels=32))]
)
def test_smp_decoders_train_on_cvt(decoder, args):
    model = smp.create_model(
        decoder, encoder_name="tu-cvt_13", encoder_weights=None, encoder_depth=4, classes=3, depths=(1, 1, 1), **args
    )
    assert list(model.encoder.out_channels) == CHANNELS
    picture = torch.randn(2, 3, 64, 96)
    expected = model.encoder.model.model.forward_intermediates(picture, intermediates_only=True)
    assert [tuple(f.shape) for f in expected] == [(2, 64, 16, 24), (2, 192, 8, 12), (2, 384, 4, 6)]
    masks = model(picture)
    assert masks.shape == (2, 3, 64, 96)
    masks.square().mean().backward()
    first = model.encoder.model.model.stages[0].embed.proj.weight
    assert first.grad is not None
    assert first.grad.abs().sum() > 0
