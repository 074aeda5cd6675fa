"""FP16: weights and arithmetic in half precision; inputs and outputs stay as they were."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import onnx
from onnxconverter_common import float16

from producer.contract.errors import ConfigError
from workers.build.quantize import QUANTISED
from workers.engines.base import one_line


def halved(
    model: onnx.ModelProto, *, keep: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return ``model`` in FP16, and how many nodes of each kind compute in it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    try:
        with warnings.catch_warnings():
            # One for every constant beyond FP16, such as a mask's "minus infinity"; what they
            # change is measured.
            warnings.simplefilter("ignore")
            half = float16.convert_float_to_float16(
                copy, keep_io_types=True, node_block_list=sorted(keep)
            )
            typed = onnx.shape_inference.infer_shapes(half)
    except Exception as error:
        raise ConfigError(f"cannot be converted to fp16: {one_line(error)}") from error
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in (*typed.graph.value_info, *typed.graph.output)
    }
    counts = {
        kind: sum(
            node.op_type == kind and kinds.get(node.output[0]) == onnx.TensorProto.FLOAT16
            for node in half.graph.node
        )
        for kind in QUANTISED
    }
    return half, {kind: count for kind, count in counts.items() if count}
