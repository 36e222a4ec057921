"""Any timm model as a pyramid: maps at strides 4, 8, 16 and 32, which the heads of segmentation and detection read.

A model gives the maps it has. What is missing is made as in ViTDet (Li et al., arXiv 2203.16527): a finer map by
transposed convolutions from the next coarser one, a coarser map by max-pooling of the next finer one. So a ViT, of
stride 16 alone, becomes a simple pyramid, and CvT, which ends at stride 16, gets one more level.
"""

import math
import re
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d, get_device_dtype
from timm.models import create_feature_extractor
from timm.models.resnet import ResNet
from torch import Tensor, nn

from weft.errors import WeftError
from weft.models.base import HybridModel

__all__ = ["STRIDES", "Features", "any_size"]

STRIDES = (4, 8, 16, 32)
PADS_ITSELF = (HybridModel, ResNet)  # ceil(H / s) rows at every stride s from 4 on, if 4 divides the height H
TRIAL = (128, 160)  # height and width of the picture that shows what a model does
ANY_SIZE: tuple[dict[str, Any], ...] = (  # how timm's models of one size are made for all
    {},
    dict(dynamic_img_size=True, dynamic_img_pad=True),  # ViT
    dict(strict_img_size=False),  # Swin, which in newer versions of timm takes the next one for the same
    dict(dynamic_img_size=True),
)


def any_size(name: str) -> dict[str, Any]:
    """The arguments that `timm.create_model(name)` needs so that the model takes pictures of any size."""
    for args in ANY_SIZE:
        try:
            model = timm.create_model(name, device="meta", **args)
            model(torch.empty(1, 3, *TRIAL, device="meta"))
        except Exception:  # whatever a model does with a picture that it does not like, or an argument
            continue
        return args
    return {}


class Features(nn.Module):
    """(B, C, H, W) pictures of any height and width -> four (B, C_i, ceil(H / s), ceil(W / s)) maps.

    `trunk` is the model without what no map depends on: classifier, final norm, levels behind the last map. Where the
    model has LayerNorms, each of its maps gets one: a pre-norm network leaves the sum of its residuals as it is.

    Args:
        backbone: a timm model, not made with `features_only`; it is changed. `any_size` says how to make it.
    """

    def __init__(self, backbone: nn.Module):
        super().__init__()
        infos = _infos(backbone)
        levels = {_stride(info): i for i, info in enumerate(infos)}  # the last level of each stride
        dd: Any = get_device_dtype(backbone)
        exempt: Any = getattr(backbone, "no_weight_decay", set)
        matcher: Any = getattr(backbone, "group_matcher", lambda coarse: {})
        self.exempt = set(exempt())  # from weight decay, by their names in the trunk
        self.layers = {coarse: matcher(coarse=coarse) for coarse in (False, True)}
        self.multiple = 4 if isinstance(backbone, PADS_ITSELF) else math.lcm(32, *(i["reduction"] for i in infos))
        self.strides = list(STRIDES)
        self.own = sorted(stride for stride in levels if stride in STRIDES) or [max(levels)]
        self.sources = [_source(stride, self.own) for stride in STRIDES]
        self.trunk, self.take = _prune(backbone, [levels[stride] for stride in self.own])

        widths = dict(zip(self.own, self._try_out(**dd), strict=True))
        norm = LayerNorm2d if any(isinstance(m, nn.LayerNorm) for m in backbone.modules()) else nn.Identity
        self.norms = nn.ModuleList(norm(width, **dd) for width in widths.values())
        makers = [_maker(widths[s], s, stride, **dd) for s, stride in zip(self.sources, STRIDES, strict=True)]
        self.makers = nn.ModuleList(maker for maker, _ in makers)
        self.channels = [channels for _, channels in makers]

    def forward(self, x: Tensor) -> list[Tensor]:
        height, width = x.shape[2:]
        x = F.pad(x, (0, -width % self.multiple, 0, -height % self.multiple))
        found = {
            stride: norm(_sized(y, -(-x.shape[2] // stride), -(-x.shape[3] // stride)))
            for stride, norm, y in zip(self.own, self.norms, self._trunk_maps(x), strict=True)
        }
        made = [make(found[source]) for make, source in zip(self.makers, self.sources, strict=True)]
        return [y[:, :, : -(-height // s), : -(-width // s)] for y, s in zip(made, STRIDES, strict=True)]

    def _trunk_maps(self, x: Tensor) -> list[Tensor]:
        if self.take is None:  # a graph that ends in the maps
            return list(self.trunk(x).values())
        run: Any = self.trunk.forward_intermediates
        return run(x, indices=self.take, intermediates_only=True, output_fmt="NCHW")

    def _try_out(self, **dd: Any) -> list[int]:
        """Channels of the trunk's maps. What no map depends on, such as a lone class token, is not trained.

        A model that takes pictures of one size alone says so here, by whatever breaks first.
        """
        channels = next((m.in_channels for m in self.trunk.modules() if isinstance(m, nn.Conv2d)), 3)
        training = self.trunk.training
        self.trunk.eval()
        try:
            with torch.enable_grad():
                maps = self._trunk_maps(torch.zeros(1, channels, *TRIAL, **dd))
        except Exception as error:
            raise WeftError(
                f"The model gives no feature maps for pictures of any size; choose another model: {_line(error)}"
            ) from error
        self.trunk.train(training)
        reached = _reached(maps)
        for parameter in self.trunk.parameters():
            parameter.requires_grad_(parameter in reached)
        return [y.shape[1] for y in maps]

    def no_weight_decay(self) -> set[str]:
        return {f"trunk.{name}" for name in self.exempt}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The layers of the trunk, for layer-wise learning rates; the rest counts as the last one."""
        return prefixed("trunk", self.layers[coarse])

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        setter: Any = self.trunk.set_grad_checkpointing
        setter(enable)


def prefixed(prefix: str, matcher: Any) -> Any:
    """timm's patterns of parameter names, for a model that has become the part `prefix` of another one."""
    if isinstance(matcher, dict):
        return {key: prefixed(prefix, value) for key, value in matcher.items()}
    if isinstance(matcher, list | tuple):
        return type(matcher)(prefixed(prefix, value) for value in matcher)
    if isinstance(matcher, str):
        pattern = re.sub(r"(?<!\[)\^", "", matcher)  # a ^ stands for the beginning, but for "not" in [^...]
        return rf"^{re.escape(prefix)}\.(?:{pattern})"
    return matcher


def _infos(backbone: nn.Module) -> list[dict[str, Any]]:
    """Stride, channels and module of each level, from the picture on."""
    infos: Any = getattr(backbone, "feature_info", None)
    if not infos:
        raise WeftError(f"{type(backbone).__name__} gives no feature maps; choose another model (`weft models`).")
    return [dict(info) for info in infos]


def _stride(info: dict[str, Any]) -> int:
    return 2 ** round(math.log2(info["reduction"]))  # a patch of 14 pixels counts as one of 16; `_sized` resizes


def _sized(x: Tensor, height: int, width: int) -> Tensor:
    if x.shape[2:] == (height, width):
        return x
    return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)


def _prune(backbone: nn.Module, levels: list[int]) -> tuple[nn.Module, list[int] | None]:
    """The model up to the last of `levels`, and their indices in it; None where it had to be made a graph."""
    if hasattr(backbone, "forward_intermediates"):
        prune: Any = backbone.prune_intermediate_layers
        return backbone, prune(levels, prune_norm=True, prune_head=True)
    infos = _infos(backbone)
    nodes: Any = {infos[level]["module"]: str(level) for level in levels}
    try:
        return create_feature_extractor(backbone, nodes), None
    except Exception as error:
        name = type(backbone).__name__
        raise WeftError(f"{name} gives no feature maps; choose another model: {_line(error)}") from error


def _reached(maps: list[Tensor]) -> set[Tensor]:
    """The parameters that `maps` were computed from, found in the graph of their gradients."""
    found, seen, left = set(), set(), [y.grad_fn for y in maps]
    while left:
        node: Any = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            if hasattr(node, "variable"):
                found.add(node.variable)
    return found


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _source(stride: int, own: list[int]) -> int:
    """The map that one of `stride` is made of: that one, the next coarser one, or the coarsest there is."""
    return next((s for s in own if s >= stride), own[-1])


def _maker(channels: int, source: int, stride: int, **dd: Any) -> tuple[nn.Module, int]:
    """The module that makes a map of `stride` out of one of `source`, and the channels of that map."""
    if stride >= source:
        return (nn.MaxPool2d(stride // source, ceil_mode=True) if stride > source else nn.Identity()), channels
    layers: list[nn.Module] = []
    while source > stride:
        if layers:
            layers += [LayerNorm2d(channels, **dd), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2, **dd))
        source, channels = source // 2, channels // 2
    return nn.Sequential(*layers), channels
