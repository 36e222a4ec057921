"""Pictures and a preprocessing to compare with timm's, for tests."""

import numpy as np
from PIL import Image

from weft.data.preprocessing import Preprocessing
from weft.data.read import MAX_PIXELS

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


RNG = np.random.default_rng(0)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise on a few scales, so that every way to resize and to round shows."""
    rng = np.random.default_rng(seed)
    layers = [Image.fromarray(rng.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((width, height)) for n in (4, 40)]
    return Image.blend(*layers, 0.5)


def preprocessing(**changes: object) -> Preprocessing:
    usual = dict(size=(32, 32), channels=3, depth=8, mean=MEAN, std=STD, interpolation="bicubic", crop_pct=0.875)
    return Preprocessing(**{**usual, "crop_mode": "center", "max_pixels": MAX_PIXELS, **changes})  # type: ignore[arg-type]
