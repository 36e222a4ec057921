"""Values as colours, by themselves or over a picture. Arrays in, (H, W, 3) uint8 out, large enough to be looked at."""

import numpy as np

SIDE = 224  # of the longer side of a panel
COLOURS = "inferno"  # brighter is more, for all kinds of eyes, and in print without colours
VEIL = 0.85  # how much of the picture the brightest colour hides
INK = np.array((60, 220, 255), np.uint8)  # of marks, which no value has


def as_panel(picture: np.ndarray) -> np.ndarray:
    """(H, W, 1 or 3) uint8 as a panel."""
    from PIL import Image

    height, width = picture.shape[:2]
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    image = Image.fromarray(np.ascontiguousarray(np.broadcast_to(picture, (height, width, 3))))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))


def heat_panel(values: np.ndarray) -> np.ndarray:
    """(h, w) from 0 to its largest as a panel of colours, value by value."""
    from PIL import Image

    height, width = values.shape
    scale = SIDE / max(height, width)
    painted = Image.fromarray((255 * colours(_to_one(values))).round().astype(np.uint8))
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return np.asarray(painted.resize(size, Image.Resampling.NEAREST))


def heat_over(picture: np.ndarray, values: np.ndarray, lowest: float = 0.0, highest: float = 0.0) -> np.ndarray:
    """(h, w) values, smoothed to the size of a panel, over the picture, which is grey and dark where they are low.

    Colours reach from `lowest` to the largest value, or to `highest` where none is as large.
    """
    from PIL import Image

    panel = as_panel(picture).astype(np.float64) / 255
    size = panel.shape[1], panel.shape[0]
    share = _to_one(values - lowest) * min(1.0, (values.max() - lowest) / max(highest - lowest, 1e-30))
    smooth = Image.fromarray(share.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    share = np.asarray(smooth).clip(0, 1)[..., None]
    grey = 0.75 * (panel @ np.array((0.299, 0.587, 0.114)))[..., None]
    below = grey + share * (panel - grey)  # colour comes back where the values are high
    mixed = below + VEIL * (0.25 + 0.5 * share) * (colours(share[..., 0]) - below)
    return (255 * mixed.clip(0, 1)).round().astype(np.uint8)


def draw_cross(panel: np.ndarray, point: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """A cross at a pixel of the picture of `size` that the panel shows."""
    panel, arm = panel.copy(), max(4, SIDE // 28)
    row = round((point[0] + 0.5) * panel.shape[0] / size[0])
    column = round((point[1] + 0.5) * panel.shape[1] / size[1])
    panel[max(0, row - 1) : row + 2, max(0, column - arm) : column + arm + 1] = INK
    panel[max(0, row - arm) : row + arm + 1, max(0, column - 1) : column + 2] = INK
    return panel


def draw_squares(
    panel: np.ndarray, size: tuple[int, ...], centre: tuple[float, float], sides: list[float]
) -> np.ndarray:
    """Outlines of squares around `centre`, whose sides are pixels of the picture of `size`."""
    panel, scale = panel.copy(), panel.shape[0] / size[0]
    for side in sides:
        ends = [[round(scale * (c + way * side / 2)) for way in (-1, 1)] for c in centre]
        (top, bottom), (left, right) = ([max(0, a), min(n, b)] for (a, b), n in zip(ends, panel.shape, strict=False))
        part = panel[top:bottom, left:right]
        part[:2] = part[-2:] = part[:, :2] = part[:, -2:] = INK
    return panel


def _to_one(values: np.ndarray) -> np.ndarray:
    values = np.nan_to_num(values.astype(np.float64)).clip(min=0)
    return values / max(values.max(), 1e-30)


def colours(share: np.ndarray) -> np.ndarray:
    """Values from 0 to 1 as (..., 3) red, green and blue from 0 to 1."""
    from matplotlib import colormaps

    return colormaps[COLOURS](share)[..., :3]
