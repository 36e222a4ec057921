"""Attention inside windows of a map of any size, shifted or not: what CETNet and Swin share."""

from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor, nn

from weft.models.layers import pad_to_multiple, sizes_are_fixed


@register_notrace_function
def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    index: Tensor,
    num_heads: int,
    window: int,
    shifted: bool,
    dropout: float,
    mask: Optional[Tensor] = None,
    grid: tuple[int, int] = (0, 0),
) -> Tensor:
    """Multi-head attention of (B, H, W, C) maps inside windows of `window` x `window` pixels.

    `table`, ((2 window - 1) ** 2, heads), has a bias for every step from one pixel of a window to another, and `index`,
    (N * N,) with N = window ** 2, says where each pair of pixels finds its own: timm's, as in Swin. Maps that the
    windows do not fit are padded, and nothing sees the padding. `shifted` windows start half a window further, except
    along an axis that one window covers. `mask` is the `window_mask` of maps that have `grid` rows and
    columns; that of others is made here.
    """
    _, height, width, _ = q.shape
    area = window * window
    # The gradient of an embedding is one sum; that of an index sorts.
    bias = F.embedding(index, table).view(area, area, -1).permute(2, 0, 1).unsqueeze(0)  # (1, heads, N, N)
    known = sizes_are_fixed(height, width) and height == grid[0] and width == grid[1]
    bias = window_bias(bias, window, shifted, height, width, mask if known else None).to(q.dtype)
    maps = torch.cat([q, k, v])  # (3 B, H, W, C), which are padded, shifted and cut together
    q, k, v = cut_windows(maps, window, shifted, num_heads).unflatten(0, (3, -1)).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
    return join_windows(y, window, shifted, height, width)


def _shift(size: int, window: int) -> int:
    """Half a window, but nothing where one window covers the axis: written so that torch.export need not know which."""
    if torch.jit.is_scripting():
        return window // 2 * min(1, (size - 1) // window)
    else:  # not compiled by TorchScript
        if sizes_are_fixed(size, size):
            return window // 2 * min(1, (size - 1) // window)
        return window // 2 * torch.sym_min(1, (size - 1) // window)  # pyright: ignore[reportReturnType]


def _shifts(height: int, width: int, window: int, shifted: bool) -> tuple[int, int]:
    """How far windows lie further down and to the right."""
    return (_shift(height, window), _shift(width, window)) if shifted else (0, 0)


def _fit(height: int, width: int, window: int, shifted: bool) -> bool:
    """Whether the windows of a map hold neighbours alone, without padding."""
    down, right = _shifts(height, width, window, shifted)
    return height % window == 0 and width % window == 0 and down == 0 and right == 0


def to_windows(x: Tensor, height: int, width: int, num_heads: int) -> Tensor:
    """Cuts a (B, H, W, C) map, which the window must divide, into windows and heads in one copy.

    (B, H, W, heads * d) -> (B, windows * heads, height * width, d): what attention takes, with a bias per window and
    head that is the same for all pictures.
    """
    batch, rows, columns, dim = x.shape
    x = x.view(batch, rows // height, height, columns // width, width, num_heads, dim // num_heads)
    return x.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, -1, height * width, dim // num_heads)


def from_windows(x: Tensor, height: int, width: int, rows: int, columns: int) -> Tensor:
    """Undoes `to_windows`: the (B, rows, columns, C) map."""
    batch, _, _, head_dim = x.shape
    x = x.view(batch, rows // height, columns // width, -1, height, width, head_dim)
    return x.permute(0, 1, 4, 2, 5, 3, 6).reshape(batch, rows, columns, -1)


def _pixels(
    height: int, width: int, window: int, shifted: bool, device: Optional[torch.device]
) -> tuple[Tensor, Tensor]:
    """Row and column that each place of each window holds, both (windows, window ** 2).

    Places at or behind `height` or `width` are padding. In torch.export, which tells one window from several, there is
    one window more than needed, so that there always are several.
    """
    rows, columns = (height - 1) // window + 1, (width - 1) // window + 1
    down, right = _shifts(height, width, window, shifted)
    count = rows * columns if sizes_are_fixed(height, width) else rows * columns + 1
    windows, places = torch.arange(count, device=device)[:, None], torch.arange(window**2, device=device)
    y = windows // columns * window + places // window + down
    x = windows % columns * window + places % window + right
    return y % (rows * window), x % (columns * window)


def cut_windows(x: Tensor, window: int, shifted: bool, num_heads: int) -> Tensor:
    """(B, H, W, C) -> (B, windows * heads, window ** 2, C / heads), padded, and shifted if told to.

    torch.export cannot follow the views of `to_windows` for every size. It gets the same windows by gathering, as
    (B, windows, heads, window ** 2, C / heads).
    """
    _, height, width, _ = x.shape
    if not sizes_are_fixed(height, width):
        rows, columns = _pixels(height, width, window, shifted, x.device)
        index = rows.clamp(max=height - 1) * width + columns.clamp(max=width - 1)
        return x.flatten(1, 2)[:, index].unflatten(3, (num_heads, -1)).transpose(2, 3)
    x = pad_to_multiple(x, window)
    down, right = _shifts(height, width, window, shifted)
    if down > 0 or right > 0:
        x = torch.roll(x, (-down, -right), (1, 2))
    return to_windows(x, window, window, num_heads)


def join_windows(x: Tensor, window: int, shifted: bool, height: int, width: int) -> Tensor:
    """Undoes `cut_windows`: the (B, height, width, C) map."""
    rows, columns = (height - 1) // window + 1, (width - 1) // window + 1
    down, right = _shifts(height, width, window, shifted)
    if not sizes_are_fixed(height, width):
        y = (torch.arange(height, device=x.device) - down) % (rows * window)
        z = (torch.arange(width, device=x.device) - right) % (columns * window)
        index = ((y // window * columns)[:, None] + z // window) * window * window  # of the window's first pixel
        index = index + (y % window * window)[:, None] + z % window
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, index]
    x = from_windows(x, window, window, rows * window, columns * window)
    if down > 0 or right > 0:
        x = torch.roll(x, (down, right), (1, 2))
    if rows * window == height and columns * window == width:
        return x
    return x[:, :height, :width]


def window_mask(height: int, width: int, window: int, shifted: bool, device: Optional[torch.device]) -> Tensor:
    """(windows, 1, N, N): 0 where one pixel of a window sees another, minus infinity where it does not.

    A shifted window at the border holds the two ends of the map, which do not see each other; no pixel sees padding.
    """
    y, x = _pixels(height, width, window, shifted, device)
    down, right = _shifts(height, width, window, shifted)
    end = 2 * (y < down).int() + (x < right).int()  # what the shift moved here from the other end of the map
    real = (y < height) & (x < width)
    seen = (end[:, :, None] == end[:, None, :]) & real[:, None, :]
    seen = seen | ~real[:, :, None]  # what padding sees is thrown away, but must not be NaN
    return torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf")).unsqueeze(1)


class WindowMask(nn.Module):
    """The `window_mask` of the maps that a model has by default, made once."""

    def __init__(
        self,
        grid: tuple[int, int],
        window: int,
        shifted: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.grid, self.window, self.shifted = grid, window, shifted
        mask = None if _fit(*grid, window, shifted) else window_mask(*grid, window, shifted, device).to(dtype)
        self.mask = None if mask is None else nn.Buffer(mask, persistent=False)

    def reset_parameters(self) -> None:
        if self.mask is not None:
            self.mask.copy_(window_mask(*self.grid, self.window, self.shifted, self.mask.device))


def window_bias(
    bias: Tensor, window: int, shifted: bool, height: int, width: int, mask: Optional[Tensor] = None
) -> Tensor:
    """The position bias (1, heads, N, N) for every window, with the `window_mask` where one is needed.

    Returns (1, windows * heads, N, N), in torch.export (1, windows, heads, N, N).
    """
    if not sizes_are_fixed(height, width):
        return (bias + window_mask(height, width, window, shifted, bias.device)).unsqueeze(0)
    if _fit(height, width, window, shifted):
        bias = bias.expand(height // window * (width // window), -1, -1, -1)
    else:
        bias = bias + (window_mask(height, width, window, shifted, bias.device) if mask is None else mask)
    return bias.flatten(0, 1).unsqueeze(0)
