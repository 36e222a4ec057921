"""Targets counted in the classes of another source."""

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.made_masks import INDEX, tree
from weft.data.masks.folders import open_masks
from weft.data.sources.renamed import in_classes
from weft.errors import WeftError


def test_renumbered(tmp_path: Path) -> None:
    source = open_masks(str(tree(tmp_path, "images/a.jpg masks/a.png")))
    targets = in_classes(source, ["class 2", "other", "class 0", "class 1"]).targets
    np.testing.assert_array_equal(targets(0), np.select([v == INDEX for v in range(3)], [2, 3, 0], 255))
    with pytest.raises(WeftError, match="'class 0'"):
        in_classes(source, ["class 1", "class 2"])
