"""Boxes cut out of pictures of any size and resized, as torch's antialiased `interpolate` does it for bytes.

Pictures lie one behind the other in a flat buffer of bytes. The kernels, like torch on the CPU, go along the rows
first, round, and then go down the columns, so that results differ by one of 255 at most.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.ops.op import define

MODES = ("bilinear", "bicubic")


def reference_crop(
    pixels: Tensor, starts: Tensor, sizes: Tensor, rows: Tensor, channels: int, height: int, width: int, most: int
) -> Tensor:
    """The reference: (B, channels, height, width) uint8.

    `pixels` (bytes,) holds pictures as (channels, h, w); picture b begins at `starts[b]` and has the height and width
    `sizes[b]`. `rows` (B, 9) float32: top, left, height and width of the box, 1 to mirror left and right, 1 to mirror
    top and bottom, the place of the interpolation in `MODES`, and the height and width that the box gets, in the upper
    left corner of zeros. No box is higher than `most`.
    """
    made = pixels.new_zeros(len(rows), channels, height, width)
    for to, start, (h, w), row in zip(made, starts.tolist(), sizes.tolist(), rows.tolist(), strict=True):
        top, left, box_height, box_width, flip, vflip, mode, *shown = (int(value) for value in row)
        picture = pixels[start : start + channels * h * w].view(channels, h, w)
        box = picture[:, top : top + box_height, left : left + box_width]
        cut = _resize(box[None], shown, MODES[mode])[0]
        to[:, : shown[0], : shown[1]] = cut.flip([axis for axis, mirror in ((2, flip), (1, vflip)) if mirror])
    return made


def _resize(x: Tensor, size: list[int], mode: str) -> Tensor:
    """Bytes, which torch resizes on a CPU; elsewhere in floating point, rounded between rows and columns as it does.

    At a width of 1 torch repeats the first row.
    """
    if x.device.type == "cpu" and size[1] > 1:
        return F.interpolate(x, size, mode=mode, antialias=True)
    return resize_in_float(x, size, mode)


def resize_in_float(x: Tensor, size: list[int], mode: str) -> Tensor:
    values = x.float()
    for side in reversed(size):  # along the rows, then along the columns, which are rows by then
        values = F.interpolate(values, [values.shape[2], side], mode=mode, antialias=True)
        values = values.round().clamp(0, 255).mT.contiguous()
    return values.to(torch.uint8)


crop_resize = define("crop_resize", reference_crop, "crop.crop_resize")
