"""Any timm model as an encoder of segmentation_models_pytorch, at the strides that its decoders are written for.

Its own `tu-` encoders take the maps that a model has, and want them at strides 2 to 32 or 4 to 32. Of the hybrids few
end at stride 32, and the small ones begin finer, so `Features` makes what is missing. For stride 2 there is an empty
map, as SMP has it for all transformers.
"""

from typing import Any

import timm
import torch
from torch import Tensor, nn

from weft.errors import WeftError
from weft.heads.features import STRIDES, Features, any_size
from weft.models.registry import check_name

DEEPEST = 1 + len(STRIDES)  # levels behind the picture: the empty one, then those of `Features`


def smp(name: str, **args: Any) -> str:
    """Makes a model known to segmentation_models_pytorch as an encoder, and returns the name it has there.

        smp.Unet(weft.smp("cetnet_nano"), encoder_weights=None, classes=3)

    Args:
        name: of a model of Weft or timm.
        args: of `timm.create_model`, such as pretrained=True.
    """
    try:
        from segmentation_models_pytorch.encoders import encoders
    except ImportError:
        raise WeftError(
            "weft.smp needs segmentation_models_pytorch: pip install segmentation-models-pytorch."
        ) from None
    check_name(name)
    if wrong := {"features_only", "in_chans", "num_classes", "out_indices"} & args.keys():
        raise WeftError(f"weft.smp({name!r}): {', '.join(sorted(wrong))} is the decoder's to say; leave it out.")
    key = f"weft-{name}" + "".join(f",{key}={value!r}" for key, value in sorted(args.items()))
    encoders[key] = {"encoder": SmpEncoder, "pretrained_settings": {}, "params": {"name": name, "args": args}}
    return key


class SmpEncoder(nn.Module):
    """(B, C, H, W) pictures of any size -> the pictures, an empty map of stride 2, maps of strides 4, 8, 16, 32."""

    def __init__(self, name: str, args: dict[str, Any], depth: int = DEEPEST, output_stride: int = STRIDES[-1]):
        super().__init__()
        if output_stride != STRIDES[-1]:
            raise WeftError(
                f"{name} cannot be dilated to an output stride of {output_stride}; choose a decoder that takes maps at"
                " strides 4 to 32: Unet, UnetPlusPlus, MAnet, Linknet, FPN, UPerNet, Segformer."
            )
        if not 3 <= depth <= DEEPEST:
            raise WeftError(f"encoder_depth={depth} is out of range for {name}; choose 3, 4 or 5.")
        self.name, self.args, self.depth, self.in_channels = name, args, depth, 0
        self.set_in_channels(3)

    def set_in_channels(self, in_channels: int, pretrained: bool = True) -> None:
        """Called by SMP once the encoder exists."""
        if in_channels == self.in_channels:
            return
        args = {**any_size(self.name), **self.args, "num_classes": 0, "in_chans": in_channels}
        self.in_channels, self.features = in_channels, Features(timm.create_model(self.name, **args))

    @property
    def out_channels(self) -> list[int]:
        return [self.in_channels, 0, *self.features.channels][: self.depth + 1]

    @property
    def output_stride(self) -> int:
        return 2**self.depth

    def forward(self, x: Tensor) -> list[Tensor]:
        height, width = (-(-side // 2) for side in x.shape[2:])
        empty = torch.empty(len(x), 0, height, width, dtype=x.dtype, device=x.device)
        return [x, empty, *self.features(x)][: self.depth + 1]
