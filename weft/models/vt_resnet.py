"""VT-ResNet: ResNets whose last stage is replaced by Visual Transformers (Wu et al. 2020, arXiv 2006.03677).

Paper to code:
    section 4                  conv1 to layer3 of a ResNet, then VT modules    ResNetTrunk, VTResNet
    figure 1, section 3        the modules and their parts                     weft/models/vt.py
    tables 2 and 8             VT-R18, VT-R34, VT-R50, VT-R101                 VARIANTS
    tables 3 to 7              the arguments tokenizer, later_tokenizer, relation, num_tokens, projector of VTResNet

Defaults give the parameters and FLOPs of tables 2 to 7 for VT-R18 and VT-R34, those of table 8 for VT-R101. What these
counts say where the text says nothing or something else:
    - the width of the map is 256 in front of the first module of VT-R18 and VT-R34, and 512 behind it;
    - the last module of VT-R18 and VT-R34 has no projector, that of VT-R50 and VT-R101 has one. So has every parameter
      a use: the head of the first two averages the tokens, as the paper says; that of the other two averages the map
      which the last projector returns;
    - VT-R50 and VT-R101 have two modules, not three, and the stride of a bottleneck in its first 1x1 convolution;
      torchvision has it in the 3x3 (`bottleneck_stride`). VT-R50 of table 8 (21.4 M parameters, 3.412 G) is still
      missed by 1.1 M and 5 M;
    - VT-R18 and VT-R34 of table 8 are other networks than those of tables 2 to 7 (`vt_resnet18_table8`, and 34): their
      recurrent tokenizers renew half of the tokens, and VT-R34 has two transformers for three modules;
    - without projectors (table 7) only the first module has a tokenizer;
    - the pooling row of table 3 has pooling tokenizers in all modules, the clustering row in the first.
The paper's "stochastic depth" and "dropout" are spread here over ResNet blocks and modules, and over the transformers.
`vt_resnet_nano` and `vt_resnet_mini` are Weft's own, for pictures of 28 to 96 pixels.
"""

from functools import partial
from typing import Any, Optional

import torch
from timm.models import checkpoint, generate_default_cfgs
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from weft.errors import WeftError, check_choice, check_positive, check_rates
from weft.models._timm import make_blocks
from weft.models.base import HybridModel
from weft.models.layers import MaxPool, grid_size, image_to_map, to_nchw, to_nhwc
from weft.models.variants import build, register_variants, weights_cfg
from weft.models.vt import RELATIONS, VisualTransformer

__all__ = ["VTResNet"]

BOTTLENECK_STRIDES = ("1x1", "3x3")
STEM_STRIDES = (1, 2, 4)
FIRST_TOKENIZERS = ("filter", "pooling", "clustering")
LATER_TOKENIZERS = ("recurrent", *FIRST_TOKENIZERS)
PROJECTORS = ("every", "inner", "none")
STAGES = 3
BLOCKS = {"basic": BasicBlock, "bottleneck": Bottleneck}


class ResNetTrunk(nn.Module):
    """conv1 to layer3 of a ResNet, made of timm's blocks, under the names that torchvision and timm give their weights.

    A `stem_stride` below 4 gives up the max-pooling first, then the stride of conv1; weights keep their shapes.
    """

    def __init__(
        self,
        in_chans: int,
        block: str,
        depths: tuple[int, ...],
        widths: tuple[int, ...],
        stem_stride: int,
        bottleneck_stride: str,
        drop_path: float,
        **dd: Any,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chans, widths[0], 7, stride=min(stem_stride, 2), padding=3, bias=False, **dd)
        self.bn1 = nn.BatchNorm2d(widths[0], **dd)
        self.act1 = nn.ReLU(inplace=True)
        self.maxpool = MaxPool(2) if stem_stride == 4 else nn.Identity()
        named_stages: Any = make_blocks(
            (BLOCKS[block],) * STAGES,
            widths,
            depths,
            widths[0],
            drop_path_rate=drop_path,
            act_layer=nn.ReLU,
            norm_layer=nn.BatchNorm2d,
            **dd,
        )[0]
        self.layer1, self.layer2, self.layer3 = (Stage(*stage) for _, stage in named_stages)
        if bottleneck_stride == "1x1":
            for _, (first, *_) in named_stages:
                first.conv1.stride, first.conv2.stride = first.conv2.stride, first.conv1.stride

    def stem(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(self.conv1(x)))

    def forward(self, x: Tensor, last: Optional[int] = None) -> list[Tensor]:
        """(B, C, H, W) pictures in channels-last format -> maps behind act1, layer1, layer2, layer3, up to `last`."""
        maps = [self.stem(x)]
        if last is None or last >= 1:
            x = to_nchw(self.maxpool(to_nhwc(maps[-1])))
            maps.append(self.layer1(x))
        if last is None or last >= 2:
            maps.append(self.layer2(maps[-1]))
        if last is None or last >= 3:
            maps.append(self.layer3(maps[-1]))
        return maps


def trunk_levels(block: str, widths: tuple[int, ...], stem_stride: int) -> list[dict[str, Any]]:
    """The `feature_info` of the maps of a ResNetTrunk."""
    first = dict(num_chs=widths[0], reduction=min(stem_stride, 2), module="resnet.act1")
    return [first] + [
        dict(num_chs=width * BLOCKS[block].expansion, reduction=stem_stride * 2**i, module=f"resnet.layer{i + 1}")
        for i, width in enumerate(widths)
    ]


class Stage(nn.Sequential):
    """The blocks of one ResNet stage, one of which may be recomputed at a time in the backward pass."""

    def __init__(self, *blocks: nn.Module):
        super().__init__(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  of the name
        for block in self:
            x = checkpoint(block, x) if self.grad_checkpointing and not torch.jit.is_scripting() else block(x)
        return x


class VTResNet(HybridModel):
    """ResNet up to layer3, at stride 16, and Visual Transformers in place of layer4.

    `forward_features` returns what the head averages: the (B, L, CT) tokens of the last module or, if that one has a
    projector, its (B, C, H, W) map. `weft.models.weights.host.load_resnet` starts the trunk from a ResNet's weights.

    Args:
        img_size: default picture size; accepted because every model has it, nothing depends on it.
        global_pool: "avg", "max", "avgmax" over the tokens or the map, or "" for none.
        block, depths, widths: "basic" or "bottleneck"; blocks and width of the three stages.
        bottleneck_stride: convolution of a bottleneck that has the stride: "3x3" as in torchvision, or "1x1".
        stem_stride: stride in front of layer1, 4, or 2 without max-pooling, or 1, to keep a useful grid on small
            pictures: the modules see a map at stride 4 * stem_stride. Weights keep their shapes.
        num_modules: VT modules.
        num_tokens, token_dim: L and CT. channels: C, width of the map behind the first module.
        tokenizer: of the first module, "filter", "pooling" or "clustering" (table 3).
        later_tokenizer: of the others, "recurrent" or one of these (tables 3 and 4).
        carried_tokens: how many tokens a recurrent tokenizer passes on as they are.
        relation: "transformer", "graph", or "none" for a convolution on each token (table 5); "identity" for nothing.
        num_relations: how many modules, counted from the last, relate their tokens; all by default.
        projector: which modules write the tokens back to the map: "every", "inner" for every one but the last, "none".
            With "none", modules behind the first take their tokens from the one before (table 7).
        group_width: channels in a group of the convolutions on pixels, and in a head of tokenizers and projectors.
        num_heads: of the transformers.
        drop_rate: dropout before the classifier. proj_drop_rate: in the residual branches of the transformers.
        drop_path_rate: stochastic depth of the last module; grows linearly over the ResNet blocks and the modules.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        block: str = "basic",
        depths: tuple[int, ...] = (2, 2, 2),
        widths: tuple[int, ...] = (64, 128, 256),
        bottleneck_stride: str = "3x3",
        stem_stride: int = 4,
        num_modules: int = 2,
        num_tokens: int = 16,
        token_dim: int = 1024,
        channels: int = 512,
        tokenizer: str = "filter",
        later_tokenizer: str = "recurrent",
        carried_tokens: int = 0,
        relation: str = "transformer",
        num_relations: Optional[int] = None,
        projector: str = "inner",
        group_width: int = 64,
        num_heads: int = 16,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        dd: dict[str, Any] = dict(device=device, dtype=dtype)
        check_choice("block", block, BLOCKS)
        check_choice("bottleneck_stride", bottleneck_stride, BOTTLENECK_STRIDES if block == "bottleneck" else ("3x3",))
        check_choice("stem_stride", stem_stride, STEM_STRIDES)
        check_choice("tokenizer", tokenizer, FIRST_TOKENIZERS)
        check_choice("later_tokenizer", later_tokenizer, LATER_TOKENIZERS)
        check_choice("relation", relation, RELATIONS)
        check_choice("projector", projector, PROJECTORS)
        if carried_tokens and (later_tokenizer != "recurrent" or projector == "none"):
            raise WeftError(f"carried_tokens={carried_tokens!r} needs later_tokenizer='recurrent' and a projector.")
        check_positive(in_chans=in_chans, num_modules=num_modules, num_tokens=num_tokens)
        check_rates(drop_rate=drop_rate, proj_drop_rate=proj_drop_rate, drop_path_rate=drop_path_rate)
        num_relations = num_modules if num_relations is None else num_relations
        check_choice("num_relations", num_relations, range(num_modules + 1))
        if not len(depths) == len(widths) == STAGES:
            raise WeftError(f"depths={depths!r} and widths={widths!r} must have one entry for each of three stages.")
        for depth, width in zip(depths, widths, strict=True):
            check_positive(depths=depth, widths=width)
        grid_size(img_size, 4 * stem_stride)  # checks it

        num_blocks = sum(depths)
        step = drop_path_rate / (num_blocks + num_modules - 1)  # from one block or module to the next
        self.bottleneck_stride = bottleneck_stride if block == "bottleneck" else ""  # weights do not tell it
        self.in_chans = in_chans
        self.resnet = ResNetTrunk(
            in_chans, block, depths, widths, stem_stride, bottleneck_stride, step * (num_blocks - 1), **dd
        )
        self.feature_info = trunk_levels(block, widths, stem_stride)

        later = later_tokenizer if projector != "none" else "none"
        tokenizers = [tokenizer] + [later] * (num_modules - 1)
        relations = ["identity"] * (num_modules - num_relations) + [relation] * num_relations
        num_projectors = dict(every=num_modules, inner=num_modules - 1, none=0)[projector]
        # A module without a projector has no map of its own, and runs with the level of the last map there is.
        self.vt_levels = [STAGES + min(i + 1, num_projectors) for i in range(num_modules)]
        self.vt = nn.ModuleList()
        args: dict[str, Any] = dict(group_width=group_width, num_heads=num_heads, carried_tokens=carried_tokens, **dd)
        for i in range(num_modules):
            sizes = (self.feature_info[-1]["num_chs"], channels, num_tokens, token_dim)
            kinds = (tokenizers[i], relations[i], i < num_projectors)
            drop_path = step * (num_blocks + i)
            self.vt.append(VisualTransformer(*sizes, *kinds, proj_drop=proj_drop_rate, drop_path=drop_path, **args))
            if i < num_projectors:
                self.feature_info.append(dict(num_chs=channels, reduction=4 * stem_stride, module=f"vt.{i}"))

        num_features = channels if projector == "every" else token_dim
        self.make_head(num_features, num_classes, global_pool, False, drop_rate, nn.Identity(), **dd)
        self.head_reads_tokens = projector != "every"
        self.init_weights(needs_reset=False)

    def init_weights(self, needs_reset: bool = True) -> None:
        super().init_weights(needs_reset)
        for module in self.resnet.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, BasicBlock | Bottleneck):
                module.zero_init_last()  # as timm does: the map keeps its size however many blocks there are

    def forward_trunk(
        self, x: Tensor, take: Optional[list[int]] = None, last: Optional[int] = None
    ) -> tuple[Tensor, Optional[Tensor], list[Tensor]]:
        """Besides the final map there are the tokens of the last module, in the place of a class token."""
        maps: list[Tensor] = []
        tokens: Optional[Tensor] = None
        x = to_nchw(image_to_map(x))
        for level, stage_map in enumerate(self.resnet(x, last)):
            x = stage_map
            if take is not None and level in take:
                maps.append(to_nhwc(x))
        for i, module in enumerate(self.vt):
            level = self.vt_levels[i]
            if last is None or level <= last:
                if self.grad_checkpointing and not torch.jit.is_scripting():
                    projected, tokens = checkpoint(module, x, tokens)
                else:
                    projected, tokens = module(x, tokens)
                if projected is not None:
                    x = projected
                    if take is not None and level in take:
                        maps.append(to_nhwc(x))
        return to_nhwc(x), tokens, maps

    def forward_final_norm(self, x: Tensor, cls: Optional[Tensor]) -> Tensor:
        """Returns the (B, L, CT) tokens or the (B, C, H, W) map that the head averages."""
        tokens = cls if self.head_reads_tokens else None
        return to_nchw(x) if tokens is None else tokens

    def prune_levels(self, last: int, keep_head: bool) -> None:
        is_last = last == len(self.feature_info) - 1
        if not (is_last and keep_head):
            self.vt = self.vt[: max(last - STAGES, 0)]
            self.head_reads_tokens = False
        for stage in range(last + 1, STAGES + 1):
            setattr(self.resnet, f"layer{stage}", nn.Identity())

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        return dict(
            stem=r"^resnet\.(?:conv1|bn1)",
            blocks=r"^resnet\.layer(\d+)" if coarse else r"^resnet\.layer(\d+)\.(\d+)",
            vt=r"^vt\.(\d+)",
        )

    def no_weight_decay(self) -> set[str]:
        return set()


# Variants -------------------------------------------------------------------------------------------------------

_BOTTLENECK: dict[str, Any] = dict(block="bottleneck", bottleneck_stride="1x1", channels=1024, projector="every")
VARIANTS: dict[str, dict[str, Any]] = {
    "vt_resnet_nano": dict(
        depths=(1, 2, 2), widths=(32, 64, 128), stem_stride=1, token_dim=256, channels=128, num_heads=4
    ),
    "vt_resnet_mini": dict(stem_stride=1, token_dim=512, channels=256, num_heads=8),
    "vt_resnet18": dict(depths=(2, 2, 2)),
    "vt_resnet34": dict(depths=(3, 4, 6), num_modules=3),
    "vt_resnet18_table8": dict(depths=(2, 2, 2), carried_tokens=8),
    "vt_resnet34_table8": dict(depths=(3, 4, 6), num_modules=3, carried_tokens=8, num_relations=2),
    "vt_resnet50": dict(depths=(3, 4, 6), **_BOTTLENECK),
    "vt_resnet101": dict(depths=(3, 4, 23), **_BOTTLENECK),
}


_cfg = partial(
    weights_cfg,
    stride=16,
    first_conv="resnet.conv1",
    paper_ids="arXiv:2006.03677",
    paper_name="Visual Transformers: Token-based Image Representation and Processing for Computer Vision",
    interpolation="bilinear",
)

default_cfgs = generate_default_cfgs(
    {
        "vt_resnet_nano": _cfg(64, stride=4),
        "vt_resnet_mini": _cfg(64, stride=4),
        "vt_resnet18": _cfg(),
        "vt_resnet34": _cfg(),
        "vt_resnet18_table8": _cfg(),
        "vt_resnet34_table8": _cfg(),
        "vt_resnet50": _cfg(),
        "vt_resnet101": _cfg(),
    }
)

# ImageNet-1k top-1 in percent: table 2 for the first two; table 8 (distilled from FBNetV3-G) for the others.
PUBLISHED_TOP1 = {
    "vt_resnet18": 72.0,
    "vt_resnet34": 74.8,
    "vt_resnet18_table8": 76.8,
    "vt_resnet34_table8": 79.9,
    "vt_resnet50": 80.6,
    "vt_resnet101": 82.3,
}


def _create(variant: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    out_indices = (0, 1, 2, -1)  # strides 2, 4, 8, and 16 behind the last projector
    return build(VTResNet, variant, pretrained, VARIANTS[variant], kwargs, out_indices)


register_variants(
    _create,
    {
        "vt_resnet_nano": "VT-ResNet for small pictures, Weft's own: 1.5 M parameters, the modules at stride 4.",
        "vt_resnet_mini": "VT-R18 with modules of half the width, for small pictures, Weft's own: 5.3 M parameters.",
        "vt_resnet18": "VT-R18 of tables 2 to 7, 11.7 M parameters.",
        "vt_resnet34": "VT-R34 of tables 2 to 7, 21.9 M parameters.",
        "vt_resnet18_table8": "VT-R18 of table 8, which renews half of its tokens, 11.7 M parameters.",
        "vt_resnet34_table8": "VT-R34 of table 8, with two transformers, 19.2 M parameters.",
        "vt_resnet50": "VT-R50, 22.5 M parameters: VT-R101 with the blocks of ResNet-50.",
        "vt_resnet101": "VT-R101 of table 8, 41.5 M parameters.",
    },
)
