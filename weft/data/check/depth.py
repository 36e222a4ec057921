"""Deep pictures that use only the lower part of their bits: what cameras of 12 bits leave in files of 16."""

from collections.abc import Iterable

import numpy as np

from weft.data.check.findings import Problem
from weft.data.check.scan import Scan
from weft.data.read import BadPicture, decode
from weft.data.sources.source import Source
from weft.words import many

LOOKED_AT = 16  # pictures that are decoded, at most: one that is bright enough ends the search
DARK = 2**13  # whole numbers of 16 bits are divided by 65535, so all below this is less than an eighth


def dark_pictures(source: Source, scan: Scan, max_pixels: int) -> Iterable[Problem]:
    """A warning where the pictures of 16 bits are so dark that their values are likely to be of fewer bits."""
    deep = scan.read[scan.records["depth"][scan.read] == 16]
    chosen = deep[np.unique(np.linspace(0, len(deep) - 1, min(LOOKED_AT, len(deep))).round().astype(int))]
    highest, seen = 0, []
    for index in chosen.tolist():
        try:
            pixels = decode(source.open(index), channels=int(scan.records["channels"][index]), max_pixels=max_pixels)
        except (BadPicture, OSError):
            continue
        highest = max(highest, int(pixels.max()))
        if highest >= DARK:
            return
        seen.append(index)
    if highest:
        bits = highest.bit_length()
        text = (
            f"{many(len(deep), 'picture')} of 16 bits with values of {bits} bits, up to {highest} in"
            f" {len(seen)} that were looked at: nearly black to the model, which takes 65535 for white."
            f" Multiply them by {2 ** (16 - bits)}, or save them as .npy of floating point from 0 to 1."
        )
        yield Problem.at(source.names, seen, "warning", "dark", text)
