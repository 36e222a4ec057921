"""Weights and activations in eight bits, by onnxruntime: ranges are measured on pictures of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.export.graph import PREPROCESSING, onnx_library, quiet

QUANTISED = ("Conv", "MatMul", "Gemm")


def quantise(path: Path, out: Path, pictures: Sequence[np.ndarray]) -> None:
    """Writes an ONNX file that computes products with weights in eight bits; all else stays as it is.

    `pictures`: (B, H, W, C) each, as the graph takes them.
    """
    onnx = onnx_library()
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Pictures(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(pictures)

        def get_next(self) -> Any:
            some = next(self.left, None)
            return None if some is None else {"pictures": some}

    ready = out.with_suffix(".ready.onnx")
    with quiet():
        quant_pre_process(path, ready, skip_symbolic_shape=True)
        kept = _left_alone(onnx.load(ready).graph)
        quantize_static(
            ready,
            out,
            Pictures(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=kept,
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )
    ready.unlink()
    model = onnx.load(out)
    onnx.helper.set_model_props(model, {entry.key: entry.value for entry in onnx.load(path).metadata_props})
    onnx.save(model, out)


def _left_alone(graph: Any) -> list[str]:
    """Nodes that gain nothing: the preprocessing, products of two activations (attention), depthwise convolutions."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}

    def gains(node: Any) -> bool:
        weights = [shapes[name] for name in node.input if name in shapes]
        depthwise = node.op_type == "Conv" and weights and weights[0][1] == 1
        return bool(weights) and not depthwise and not node.name.startswith(PREPROCESSING)

    return [node.name for node in graph.node if node.op_type in QUANTISED and not gains(node)]
