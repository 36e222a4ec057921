"""The layouts in which weights were published: how to recognise each, and how its names become ours."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import resize_rel_pos_bias_table_simple
from torch import Tensor, nn

from weft.errors import WeftError
from weft.models.layers import resize_grid

StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    name: str
    family: str  # the first part of the names of the models that can take it
    mark: str  # a key that only this layout has
    to_native: Callable[[StateDict], StateDict]
    read_args: Callable[[StateDict], dict[str, Any]]  # constructor arguments, read off the weights under our names
    model_args: dict[str, Any] = field(default_factory=dict)  # what the weights were made for, where not our default


def rename(rules: list[tuple[str, str]]) -> Callable[[StateDict], StateDict]:
    """Applies every rule, in order, to every key."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def renamed_keys(state_dict: StateDict) -> StateDict:
        renamed = {}
        for key, value in state_dict.items():
            for pattern, replacement in compiled:
                key = pattern.sub(replacement, key)
            renamed[key] = value
        return renamed

    return renamed_keys


def _in_chans(first_conv: str) -> Callable[[StateDict], dict[str, Any]]:
    def read(state: StateDict) -> dict[str, Any]:
        _, in_chans, _, _ = state[f"{first_conv}.weight"].shape
        return dict(in_chans=in_chans)

    return read


def _img_size(positions: str, stride: int) -> Callable[[StateDict], dict[str, Any]]:
    """The picture that has one position every `stride` pixels."""

    def read(state: StateDict) -> dict[str, Any]:
        height, width, _ = state[f"{positions}.grid"].shape
        return dict(img_size=(stride * height, stride * width))

    return read


def _all(*readers: Callable[[StateDict], dict[str, Any]]) -> Callable[[StateDict], dict[str, Any]]:
    return lambda state: {key: value for read in readers for key, value in read(state).items()}


def _split_positions(state: StateDict, published: str, native: str, class_token: bool) -> None:
    """Published (1, [1 +] N, C) positions, the class token's first, become ours: one and a grid."""
    positions = state.pop(published, None)
    if positions is None:
        return
    if class_token:
        state[f"{native}.cls"], positions = positions[:, :1], positions[:, 1:]
    count = positions.shape[1]
    side = math.isqrt(count)
    if side == 0 or side * side != count:
        raise WeftError(
            f"{published} has {count} positions, which form no square; the grids of published files are square."
        )
    state[f"{native}.grid"] = positions[0].unflatten(0, (side, side))


OFFICIAL_CVT = [(r"^stage(\d+)\.", r"stages.\1."), (r"\.patch_embed\.", ".embed.")]

_HF_SELF = r"attention\.attention\."
HUGGING_FACE_CVT = [
    (r"^cvt\.encoder\.stages\.", "stages."),
    (r"embedding\.convolution_embeddings\.projection", "embed.proj"),
    (r"embedding\.convolution_embeddings\.normalization", "embed.norm"),
    (r"\.layers\.", ".blocks."),
    (_HF_SELF + r"convolution_projection_(\w)\w+\.convolution_projection\.convolution", r"attn.conv_proj_\1.conv"),
    (_HF_SELF + r"convolution_projection_(\w)\w+\.convolution_projection\.normalization", r"attn.conv_proj_\1.bn"),
    (_HF_SELF + r"projection_([qkv])\w+", r"attn.proj_\1"),
    (r"attention\.output\.dense", "attn.proj"),  # before the next but one, which would match it
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
]

OFFICIAL_CEIT = [
    (r"^i2t\.backbone\.", "stem.convs.0."),
    (r"^i2t\.proj\.", "proj."),
    (r"^pos_layer_embed$", "lca.pos_layer_embed"),
    (r"^lca\.attn\.proj\.", "lca.proj."),
    (r"\.leff\.conv1\.", ".leff.linear1.linear."),
    (r"\.leff\.bn1\.", ".leff.linear1.bn."),
    (r"\.leff\.conv2\.", ".leff.dwconv.conv."),
    (r"\.leff\.bn2\.", ".leff.dwconv.bn."),
    (r"\.leff\.conv3\.", ".leff.linear2.linear."),
    (r"\.leff\.bn3\.", ".leff.linear2.bn."),
]


def _official_ceit(state_dict: StateDict) -> StateDict:
    state = rename(OFFICIAL_CEIT)(state_dict)
    for key, value in state.items():
        if ".leff.linear" in key and value.ndim == 4:
            state[key] = value.flatten(1)  # (out, in, 1, 1) -> (out, in)
    for kind in ("weight", "bias"):  # rows q, k, v
        qkv = state.pop(f"lca.attn.qkv.{kind}", None)
        if qkv is not None:
            dim = qkv.shape[0] // 3
            state[f"lca.q.{kind}"], state[f"lca.kv.{kind}"] = qkv[:dim], qkv[dim:]
    _split_positions(state, "pos_embed", "pos_embed", class_token=True)
    return state


TOKEN_TRANSFORMER = [  # of ViTAE's released code, which has it from T2T-ViT's
    (r"\.transformer\.mlp\.0\.", ".transformer.mlp.fc1."),
    (r"\.transformer\.mlp\.2\.", ".transformer.mlp.fc2."),
]

OFFICIAL_VITAE = [
    (r"^layers\.(\d)\.RC\.", r"reductions.\1."),
    (r"\.PRM\.convs\.(\d)\.0\.", r".prm.convs.\1."),
    (r"^(reductions\.\d)\.attn\.w$", r"\1.transformer.attention.w"),
    (r"^(reductions\.\d)\.attn\.(kqv|proj|norm1|norm2|mlp)\.", r"\1.transformer.\2."),
    *TOKEN_TRANSFORMER,
    (r"^(reductions\.\d)\.PCM\.0\.", r"\1.pcm.0.conv."),
    (r"^(reductions\.\d)\.PCM\.2\.", r"\1.pcm.2.conv."),
    (r"^(reductions\.\d)\.PCM\.3\.", r"\1.pcm.2.bn."),
    (r"^(reductions\.\d)\.PCM\.5\.", r"\1.pcm.4.conv."),
    (r"^layers\.2\.NC\.", "blocks."),
    (r"\.PCM\.0\.", ".pcm.0.conv."),
    (r"\.PCM\.1\.", ".pcm.0.bn."),
    (r"\.PCM\.3\.", ".pcm.2.conv."),
    (r"\.PCM\.4\.", ".pcm.2.bn."),
    (r"\.PCM\.6\.", ".pcm.4.conv."),
]

OFFICIAL_T2T_VIT = [
    (r"^blocks\.(\d+)\.attn\.", r"blocks.\1.attn.attn."),
    (r"^tokens_to_token\.project\.", "reductions.2.1."),
    (r"^tokens_to_token\.attention1\.", "reductions.0.transformer."),
    (r"^tokens_to_token\.attention2\.", "reductions.1.transformer."),
    (r"\.transformer\.w$", ".transformer.attention.w"),
    (r"\.transformer\.attn\.proj\.", ".transformer.proj."),
    *TOKEN_TRANSFORMER,
]


def _official_t2t_vit(state_dict: StateDict) -> StateDict:
    state = rename(OFFICIAL_T2T_VIT)(state_dict)
    for step in ("reductions.0.transformer", "reductions.1.transformer"):  # of those with softmax
        qkv = state.pop(f"{step}.attn.qkv.weight", None)
        if qkv is not None:
            q, k, v = qkv.chunk(3)
            state[f"{step}.kqv.weight"] = torch.cat([k, q, v])
    _split_positions(state, "pos_embed", "pos_embed", class_token=True)
    return state


def _t2t_vit_in_chans(state: StateDict) -> dict[str, Any]:
    _, window = state["reductions.0.transformer.kqv.weight"].shape  # 7 x 7 pixels
    return dict(in_chans=window // 49)


OFFICIAL_PVT = [
    *((rf"^patch_embed{i + 1}\.", f"stages.{i}.embed.") for i in range(4)),
    *((rf"^block{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    (r"^cls_token$", "stages.3.cls_token"),
    (r"\.attn\.sr\.", ".attn.sr.proj."),
    (r"\.attn\.norm\.", ".attn.sr.norm."),
]


def _official_pvt(state_dict: StateDict) -> StateDict:
    state = rename(OFFICIAL_PVT)(state_dict)
    for i in range(4):
        _split_positions(state, f"pos_embed{i + 1}", f"stages.{i}.pos_embed", class_token=i == 3)
    return state


OFFICIAL_CSWIN = [
    (r"^stage1_conv_embed\.0\.", "stages.0.embed.proj."),
    (r"^stage1_conv_embed\.2\.", "stages.0.embed.norm."),
    (r"^merge(\d)\.conv\.", r"stages.\1.embed.proj."),
    (r"^merge(\d)\.norm\.", r"stages.\1.embed.norm."),
    *((rf"^stage{i + 1}\.", f"stages.{i}.blocks.") for i in range(4)),
    (r"(blocks\.\d+)\.(qkv|proj)\.", r"\1.attn.\2."),
    (r"\.attns\.(\d)\.get_v\.", r".attn.branches.\1.lepe."),
]


LAYOUTS = (
    Layout(
        "official CvT",
        "cvt",
        "stage0.patch_embed.proj.weight",
        rename(OFFICIAL_CVT),
        _in_chans("stages.0.embed.proj"),
    ),
    Layout(
        "Hugging Face CvT",
        "cvt",
        "cvt.encoder.stages.0.embedding.convolution_embeddings.projection.weight",
        rename(HUGGING_FACE_CVT),
        _in_chans("stages.0.embed.proj"),
        dict(act_layer="gelu"),
    ),
    Layout(
        "official CeiT",
        "ceit",
        "i2t.backbone.conv.weight",
        _official_ceit,
        _all(_in_chans("stem.convs.0.conv"), _img_size("pos_embed", 16)),
    ),
    Layout(
        "official ViTAE",
        "vitae",
        "layers.0.RC.attn.w",
        rename(OFFICIAL_VITAE),
        _in_chans("reductions.0.prm.convs.0"),
    ),
    Layout(
        "official T2T-ViT",
        "t2t_vit",
        "tokens_to_token.attention1.w",
        _official_t2t_vit,
        _all(_t2t_vit_in_chans, _img_size("pos_embed", 16)),
    ),
    Layout(
        "official T2T-ViT_t",
        "t2t_vit",
        "tokens_to_token.attention1.attn.qkv.weight",
        _official_t2t_vit,
        _all(_t2t_vit_in_chans, _img_size("pos_embed", 16)),
    ),
    Layout(
        "official PVT",
        "pvt",
        "pos_embed4",
        _official_pvt,
        _all(_in_chans("stages.0.embed.proj"), _img_size("stages.0.pos_embed", 4)),
    ),
    Layout(
        "official CSWin",
        "cswin",
        "stage1_conv_embed.0.weight",
        rename(OFFICIAL_CSWIN),
        _in_chans("stages.0.embed.proj"),
    ),
)


def own_layout(family: str, model: nn.Module) -> Layout:
    """The layout of our own: the names that a model's `state_dict` has."""
    published = next((layout for layout in LAYOUTS if layout.family == family), None)
    cfg: Any = model.pretrained_cfg
    convs = [cfg["first_conv"]] if isinstance(cfg["first_conv"], str) else list(cfg["first_conv"] or [])
    channels = _in_chans(convs[0]) if convs else published.read_args if published else lambda state: {}
    own = model.state_dict()
    grid = next((key for key in own if key.endswith("pos_embed.grid")), "")

    def size(state: StateDict) -> dict[str, Any]:
        """Twice the positions are twice the pixels."""
        sides = zip(cfg["input_size"][1:], state[grid].shape, own[grid].shape, strict=False) if grid else ()
        return dict(img_size=tuple(side * found // usual for side, found, usual in sides)) if grid else {}

    return Layout("Weft's own", family, "", dict, _all(channels, size))


def recognise(state_dict: Mapping[str, Any]) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.mark in state_dict), None)


def filter_published(state_dict: StateDict, model: nn.Module) -> StateDict:
    """timm's `checkpoint_filter_fn` for every family: any published layout in, ours out, positions resized to fit."""
    layout = recognise(state_dict)
    state = layout.to_native(state_dict) if layout else dict(state_dict)
    expected = model.state_dict()
    for key, value in state.items():
        if key.endswith("pos_embed.grid") and key in expected:
            height, width, _ = expected[key].shape
            state[key] = resize_grid(value, height, width)
        elif key.endswith("relative_position_bias_table") and key in expected:
            places, _ = shape = expected[key].shape  # one row for each of the (2 window - 1) ** 2 distances
            window = (math.isqrt(places) + 1) // 2
            state[key] = resize_rel_pos_bias_table_simple(value, (window, window), shape)
    return state
