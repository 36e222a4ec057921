"""Means over parts of a map, in ONNX."""

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from weft.export.graph import _translated, to_graph


class Pools(nn.Module):
    def forward(self, x):
        return tuple(F.adaptive_avg_pool2d(x, bins) for bins in ((1, 1), (2, 2), (3, 3), (6, 6), (2, 3)))


def test_means_over_parts_hold_for_maps_of_any_size():
    """The exporter's own decomposition is that of the example, here of sizes that parts divide, or do not."""
    free = torch.export.Dim.DYNAMIC
    names = ["one", "two", "three", "six", "mixed"]
    model = _translated(to_graph(Pools(), {torch.rand(2, 4, 6, 12): {0: free, 2: free, 3: free}}), ["x"], names)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for height, width in [(3, 3), (6, 12), (7, 5), (2, 8), (13, 11)]:
        x = torch.rand(3, 4, height, width)
        for found, wanted in zip(session.run(names, {"x": x.numpy()}), Pools()(x), strict=True):
            assert found.shape == wanted.shape
            assert found == pytest.approx(wanted.numpy(), abs=1e-6)
