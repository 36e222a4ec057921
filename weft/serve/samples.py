"""Pictures to try the demo's model with."""

import io
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from weft.data.demo import fashion_mnist

ENLARGED = 8  # times, so that there is something to look at


@dataclass(frozen=True)
class Samples:
    """Names and PNG files; none where the demo is not served."""

    names: list[str] = field(default_factory=list)
    pictures: list[bytes] = field(default_factory=list)


def fashion_samples() -> Samples:
    """A picture of each class of the embedded test pictures."""
    pictures, labels, classes = fashion_mnist("test")
    found = Samples()
    for label, name in enumerate(classes):
        pixels = pictures[np.flatnonzero(labels == label)[3]]
        file = io.BytesIO()
        side = ENLARGED * pixels.shape[0]
        Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, "PNG", optimize=True)
        found.names.append(name)
        found.pictures.append(file.getvalue())
    return found
