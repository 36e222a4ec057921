"""Weights and activations in eight bits, by onnxruntime: ranges are measured on pictures of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.export.graph import PREPROCESSING, onnx_library, quiet

QUANTISED = ("Conv", "MatMul", "Gemm")
# A norm, a GELU or a sum follows these, in floats: onnxruntime has a product from eight bits to floats for them, while
# one to eight bits is slower by itself, and what it gives would have to be converted back.
GIVE_FLOATS = ("MatMul", "Gemm")


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
            extra_options={
                "ActivationSymmetric": False,
                "WeightSymmetric": True,
                "OpTypesToExcludeOutputQuantization": list(GIVE_FLOATS),
            },
        )
    ready.unlink()
    model = onnx.load(out)
    onnx.helper.set_model_props(model, {entry.key: entry.value for entry in onnx.load(path).metadata_props})
    onnx.save(model, out)


def _left_alone(graph: Any) -> list[str]:
    """Nodes that gain nothing: the preprocessing, products of two activations (attention), convolutions in groups."""
    weights = {tensor.name for tensor in graph.initializer}

    def gains(node: Any) -> bool:
        in_groups = any(one.name == "group" and one.i > 1 for one in node.attribute)
        return any(name in weights for name in node.input) and not in_groups and not node.name.startswith(PREPROCESSING)

    return [node.name for node in graph.node if node.op_type in QUANTISED and not gains(node)]
