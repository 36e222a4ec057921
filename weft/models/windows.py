"""Attention inside windows of a map of any size, shifted or not: what CETNet and Swin share."""

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_function
from torch import Tensor

from weft.kernels.switch import amp_dtype, usable
from weft.kernels.window_attention import fits, window_attention
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
) -> Tensor:
    """Multi-head attention of (B, H, W, C) maps inside windows of `window` x `window` pixels.

    `table`, ((2 window - 1) ** 2, heads), has a bias for every step from one pixel of a window to another, and `index`,
    (N * N,) with N = window ** 2, says where each pair of pixels finds its own: timm's, as in Swin. Maps that the
    windows do not fit are padded, and nothing sees the padding. `shifted` windows start half a window further, except
    along an axis that one window covers.
    """
    if torch.jit.is_scripting():
        return plain_windowed_attention(q, k, v, table, index, num_heads, window, shifted, dropout)
    else:  # not compiled by TorchScript
        _, height, width, _ = q.shape
        known = dropout == 0.0 and sizes_are_fixed(height, width) and fits(q, num_heads, window)
        if not known or not usable(q):
            return plain_windowed_attention(q, k, v, table, index, num_heads, window, shifted, dropout)
        dtype = amp_dtype(q)
        return window_attention(q.to(dtype), k.to(dtype), v.to(dtype), table, window, shifted)


def plain_windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    index: Tensor,
    num_heads: int,
    window: int,
    shifted: bool,
    dropout: float,
) -> Tensor:
    """`windowed_attention` by cutting windows out of the maps: what defines the kernel, and where none is used."""
    _, height, width, _ = q.shape
    area = window * window
    bias = table[index].to(q.dtype).view(area, area, -1).permute(2, 0, 1).unsqueeze(0)  # (1, heads, N, N)
    q = cut_windows(q, window, shifted, num_heads)
    k = cut_windows(k, window, shifted, num_heads)
    v = cut_windows(v, window, shifted, num_heads)
    mask = window_bias(bias, window, shifted, height, width)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    return join_windows(y, window, shifted, height, width)


def _shift(size: int, window: int) -> int:
    """Half a window, but nothing where one window covers the axis: written so that torch.export need not know which."""
    if torch.jit.is_scripting():
        return window // 2 * min(1, (size - 1) // window)
    else:  # not compiled by TorchScript
        if sizes_are_fixed(size, size):
            return window // 2 * min(1, (size - 1) // window)
        return window // 2 * torch.sym_min(1, (size - 1) // window)  # pyright: ignore[reportReturnType]


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


def _pixels(height: int, width: int, window: int, shifted: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column that each place of each window holds, both (windows, window ** 2).

    Places at or behind `height` or `width` are padding. In torch.export, which tells one window from several, there is
    one window more than needed, so that there always are several.
    """
    rows, columns = (height - 1) // window + 1, (width - 1) // window + 1
    down, right = (_shift(height, window), _shift(width, window)) if shifted else (0, 0)
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
    if shifted:
        x = torch.roll(x, (-_shift(height, window), -_shift(width, window)), (1, 2))
    return to_windows(x, window, window, num_heads)


def join_windows(x: Tensor, window: int, shifted: bool, height: int, width: int) -> Tensor:
    """Undoes `cut_windows`: the (B, height, width, C) map."""
    rows, columns = (height - 1) // window + 1, (width - 1) // window + 1
    down, right = (_shift(height, window), _shift(width, window)) if shifted else (0, 0)
    if not sizes_are_fixed(height, width):
        y = (torch.arange(height, device=x.device) - down) % (rows * window)
        z = (torch.arange(width, device=x.device) - right) % (columns * window)
        index = ((y // window * columns)[:, None] + z // window) * window * window  # of the window's first pixel
        index = index + (y % window * window)[:, None] + z % window
        return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, index]
    x = from_windows(x, window, window, rows * window, columns * window)
    if shifted:
        x = torch.roll(x, (down, right), (1, 2))
    if rows * window == height and columns * window == width:
        return x
    return x[:, :height, :width]


def window_bias(bias: Tensor, window: int, shifted: bool, height: int, width: int) -> Tensor:
    """The position bias (1, heads, N, N) for every window, masked where that is needed.

    A shifted window at the border holds the two ends of the map, which do not see each other; no pixel sees padding.
    Returns (1, windows * heads, N, N), in torch.export (1, windows, heads, N, N).
    """
    if sizes_are_fixed(height, width) and not shifted and height % window == 0 and width % window == 0:
        windows = height // window * (width // window)
        return bias.expand(windows, -1, -1, -1).flatten(0, 1).unsqueeze(0)
    y, x = _pixels(height, width, window, shifted, bias.device)
    down, right = (_shift(height, window), _shift(width, window)) if shifted else (0, 0)
    end = 2 * (y < down).int() + (x < right).int()  # what the shift moved here from the other end of the map
    real = (y < height) & (x < width)
    seen = (end[:, :, None] == end[:, None, :]) & real[:, None, :]
    seen = seen | ~real[:, :, None]  # what padding sees is thrown away, but must not be NaN
    mask = torch.zeros(seen.shape, device=bias.device, dtype=bias.dtype).masked_fill(~seen, float("-inf"))
    bias = bias + mask.unsqueeze(1)  # (windows, heads, N, N)
    return (bias.flatten(0, 1) if sizes_are_fixed(height, width) else bias).unsqueeze(0)
