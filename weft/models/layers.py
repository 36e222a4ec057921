"""Layers and helpers that two or more families share.

One memory layout holds everywhere: a feature map is a contiguous (B, H, W, C) tensor. Its tokens are the view
(B, H*W, C); a convolution sees the view (B, C, H, W), which is torch's channels-last format. Nothing is copied on
the way from attention to convolution and back. The class token travels beside the map as (B, 1, C); where a layer
wants both as one sequence, `join` glues them, and that is the one kind of copy there is.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from timm.layers import register_notrace_function, trunc_normal_
from torch import Tensor, nn

from weft.errors import WeftError, check_positive


def grid_size(img_size: int | tuple[int, int], reduction: int) -> tuple[int, int]:
    """Rows and columns of the map that a picture of `img_size` has at stride `reduction`."""
    sides = tuple(img_size) if isinstance(img_size, list | tuple) else (img_size, img_size)
    if len(sides) != 2:
        raise WeftError(f"img_size={img_size!r} is neither a number nor a height and a width.")
    height, width = sides
    for side in (height, width):
        check_positive(img_size=side)
    return -(-height // reduction), -(-width // reduction)


def image_to_map(image: Tensor) -> Tensor:
    """(B, C, H, W) picture to (B, H, W, C) map. Free if the picture already is channels-last."""
    return image.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)


def to_nchw(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2)  # (B, H, W, C) -> (B, C, H, W), a channels-last view


def to_nhwc(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1)  # (B, C, H, W) -> (B, H, W, C)


def join(cls: Optional[Tensor], x: Tensor) -> Tensor:
    """The class token and the (B, H, W, C) map as (B, 1 + H*W, C) tokens; without a class token a view of the map."""
    tokens = x.flatten(1, 2)
    return tokens if cls is None else torch.cat([cls, tokens], dim=1)


def part(tokens: Tensor, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
    """Undoes `join`: views of `tokens` as a map shaped like `x` and, where there is a `cls`, a class token."""
    if cls is None:
        return tokens.view(tokens.shape[0], x.shape[1], x.shape[2], tokens.shape[2]), None
    first, rest = tokens.split([1, tokens.shape[1] - 1], dim=1)  # the gradient of a split is one pass, of slices four
    return rest.view(tokens.shape[0], x.shape[1], x.shape[2], tokens.shape[2]), first


def present(x: Optional[Tensor]) -> Tensor:
    """Tells TorchScript and the type checker what the reader knows: here a class token came out, as one went in."""
    assert x is not None
    return x


def sizes_are_fixed(height: int, width: int) -> bool:
    """False where torch.export or torch.compile make a graph for every size, in which no shortcut may be taken."""
    if torch.jit.is_scripting():
        return True
    else:  # not compiled by TorchScript
        return not (isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt))


@register_notrace_function
def fix_size(x: Tensor) -> Tensor:
    """Makes torch.compile write one graph per size of a (B, H, W, C) map: windows of unknown number take it minutes."""
    if torch.jit.is_scripting():
        return x
    else:  # not compiled by TorchScript
        if torch.compiler.is_dynamo_compiling():
            _ = (*range(x.shape[1]), *range(x.shape[2]))  # to write it out, dynamo must know the size
        return x


@register_notrace_function
def pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Zeros at the bottom and right of a (B, H, W, C) map until `multiple` divides both sides."""
    _, height, width, _ = x.shape
    bottom = ((height - 1) // multiple + 1) * multiple - height  # in this form torch.export can tell it is positive
    right = ((width - 1) // multiple + 1) * multiple - width
    if sizes_are_fixed(height, width) and bottom == 0 and right == 0:
        return x
    return F.pad(x, (0, 0, 0, right, 0, bottom))


@register_notrace_function
def resize_grid(grid: Tensor, height: int, width: int) -> Tensor:
    """Bicubic resize of an (H, W, C) grid of positions, as DeiT does it (no anti-aliasing)."""
    if sizes_are_fixed(height, width) and grid.shape[0] == height and grid.shape[1] == width:
        return grid
    wide = grid.float() if grid.dtype in (torch.float16, torch.bfloat16) else grid
    nchw = to_nchw(wide.unsqueeze(0))
    resized = F.interpolate(nchw, size=(height, width), mode="bicubic", align_corners=False)
    return to_nhwc(resized).squeeze(0).to(grid.dtype)


class MaxPool(nn.Module):
    """3x3 max-pooling of a (B, H, W, C) map."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        x = to_nchw(x)
        if sizes_are_fixed(x.shape[2], x.shape[3]):
            return to_nhwc(F.max_pool2d(x, 3, self.stride, padding=1))
        # The same numbers. torch 2.11 cannot export a strided pooling for every size, a slice it can.
        return to_nhwc(F.max_pool2d(x, 3, 1, padding=1))[:, :: self.stride, :: self.stride].contiguous()


def activate(x: Tensor, act: str) -> Tensor:
    """The activation called `act`; "none" leaves x as it is."""
    if act == "gelu":
        return F.gelu(x)
    if act == "silu":
        return F.silu(x)
    if act == "quick_gelu":
        return F.silu(1.702 * x) / 1.702
    if act == "relu":
        return F.relu(x)
    return x


class QuickGELU(timm_layers.QuickGELU):
    """x sigmoid(1.702 x), as SiLU(1.702 x) / 1.702: training then keeps one map less."""

    def forward(self, input: Tensor) -> Tensor:
        return activate(input, "quick_gelu")


class LayerNorm(nn.LayerNorm):
    """LayerNorm in front of convolutions and linear layers.

    Under autocast torch's gives float32, which every layer behind it would convert for itself, and keep.
    """

    def forward(self, input: Tensor) -> Tensor:
        return to_autocast(F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps))


@register_notrace_function
def to_autocast(x: Tensor) -> Tensor:
    """x in the type in which autocast multiplies."""
    if torch.jit.is_scripting():
        return x
    else:  # not compiled by TorchScript
        device = x.device.type
        has_autocast = device != "meta" and torch.is_autocast_enabled(device)
        return x.to(torch.get_autocast_dtype(device)) if has_autocast else x


class MapConv(nn.Conv2d):
    """Convolution on a (B, H, W, C) map."""

    def forward(self, input: Tensor) -> Tensor:
        return to_nhwc(self._conv_forward(to_nchw(input), self.weight, self.bias))


class PatchConv(nn.Conv2d):
    """Convolution of patches of a (B, H, W, C) map that do not overlap: its kernel is its stride, and divides the map.

    It is one matrix product, behind a copy of the map. Libraries for convolutions may not know that: for the gradient
    of a map of 64 channels cudnn takes many times as long.
    """

    def __init__(self, in_chs: int, out_chs: int, size: int, **dd: Any):
        super().__init__(in_chs, out_chs, size, stride=size, **dd)

    def forward(self, input: Tensor) -> Tensor:
        batch, height, width, channels = input.shape
        size = self.stride[0]
        if not sizes_are_fixed(height, width):  # torch.export cannot tell that whole patches fill the map
            return to_nhwc(self._conv_forward(to_nchw(input), self.weight, self.bias))
        x = input.view(batch, height // size, size, width // size, size, channels)
        x = x.transpose(2, 3).flatten(3)  # (B, H / size, W / size, size * size * C_in)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)  # (C, size * size * C_in)
        return F.linear(x, weight, self.bias)


class ConvNorm(nn.Module):
    """Convolution, BatchNorm and activation on a (B, H, W, C) map; `norm=False` leaves the BatchNorm out."""

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        groups: int = 1,
        bias: bool = False,
        norm: bool = True,
        act: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.conv = nn.Conv2d(
            in_chs, out_chs, kernel_size, stride, padding, groups=groups, bias=bias, device=device, dtype=dtype
        )
        self.bn = nn.BatchNorm2d(out_chs, device=device, dtype=dtype) if norm else nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return activate(to_nhwc(self.bn(self.conv(to_nchw(x)))), self.act)


class PointwiseConv(nn.Linear):
    """A 1x1 convolution on a (B, H, W, C) map. A type of its own because it is initialised as a convolution."""


class LinearNorm(nn.Module):
    """Linear layer, BatchNorm and activation on a (B, H, W, C) map; `norm=False` leaves the BatchNorm out."""

    def __init__(
        self,
        linear: nn.Linear,
        norm: bool = True,
        act: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.linear = linear
        self.bn = nn.BatchNorm2d(linear.out_features, device=device, dtype=dtype) if norm else nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return activate(to_nhwc(self.bn(to_nchw(self.linear(x)))), self.act)


class ConvEmbed(nn.Module):
    """Token embedding: a strided convolution and LayerNorm, (B, H, W, C_in) -> (B, h, w, C).

    "conv", the overlapping one of CvT and CSWin, has a 7x7 kernel at the picture and 3x3 kernels behind it. At stride 4
    it has the padding 2 of the released codes, and no token for a last row or column that is less than half a patch.
    The kernel of "patch", that of Swin and PVT, is its stride; it pads, so that no pixel is lost.
    """

    def __init__(self, kind: str, in_chs: int, dim: int, stride: int, stem: bool, **dd: Any):
        super().__init__()
        kernel = stride if kind == "patch" else 7 if stem else 3
        padding = 0 if kind == "patch" else 2 if stride == 4 else kernel // 2
        self.multiple = stride if kind == "patch" else 1
        self.proj = MapConv(in_chs, dim, kernel, stride, padding, **dd)
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(pad_to_multiple(x, self.multiple)))


def sinusoid_table(length: int, dim: int) -> Tensor:
    """(length, C) fixed positions: position p, channel j has the angle p / 10000 ** (2 (j // 2) / C).

    Even channels hold its sine, odd ones its cosine.
    """
    position = torch.arange(length, device="cpu", dtype=torch.float64)[:, None]
    channel = torch.arange(dim, device="cpu", dtype=torch.float64)
    angle = position / 10000 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())


class PositionEmbedding(nn.Module):
    """A grid of positions that is resized to the map at hand, and one more for the class token.

    Learned; or, with `sinusoid`, fixed: then they are buffers and number the tokens row by row, the class token first.
    """

    def __init__(
        self,
        grid_size: tuple[int, int],
        dim: int,
        class_token: bool,
        sinusoid: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.sinusoid = sinusoid
        kind = nn.Buffer if sinusoid else nn.Parameter
        self.grid = kind(torch.empty(*grid_size, dim, device=device, dtype=dtype))
        self.cls = kind(torch.empty(1, 1, dim, device=device, dtype=dtype)) if class_token else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.sinusoid:
            height, width, dim = self.grid.shape
            first = 0 if self.cls is None else 1
            table = sinusoid_table(first + height * width, dim)
            self.grid.copy_(table[first:].view(height, width, dim))
            if self.cls is not None:
                self.cls.copy_(table[:1])
        for parameter in self.parameters():
            trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor, cls: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
        _, height, width, _ = x.shape
        x = x + resize_grid(self.grid, height, width)
        if cls is not None and self.cls is not None:
            cls = cls + self.cls
        return x, cls


class StochasticDepth(nn.Module):
    """Draws the pictures of a batch that skip a branch of a block; map and class token skip it together."""

    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Optional[Tensor]:
        """(B,) factors of a branch that gave x, 0 or 1 / (1 - drop_prob); None where nothing is dropped."""
        if self.drop_prob > 0 and self.training:
            return x.new_empty(x.shape[0]).bernoulli_(1 - self.drop_prob).div_(1 - self.drop_prob)
        return None


@register_notrace_function
def add_branch(x: Tensor, y: Tensor, keep: Optional[Tensor]) -> Tensor:
    """x + keep y for the (B, N, C) tokens or the (B, H, W, C) map of a branch; `keep`, (B,), of StochasticDepth."""
    if keep is None:
        return x + y
    return x + y * keep.view([-1] + [1] * (y.dim() - 1))
