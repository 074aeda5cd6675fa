"""FP16: weights and arithmetic in half precision; inputs and outputs stay as they were."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper
from onnxconverter_common import float16

from producer.contract.errors import ConfigError
from workers.batching.stacking import Array
from workers.build.calibration import LIKE_INFINITY
from workers.build.quantize import QUANTISED
from workers.engines.base import one_line

#: The largest value of FP16.
_LARGEST: Final = 65504


def beyond(model: onnx.ModelProto, ranges: Mapping[str, float]) -> list[str]:
    """Return the nodes that make or read values which FP16 cannot hold.

    A CPU computes FP16 through casts and leaves out those in between, so that it would not show.
    """
    large = {name for name, largest in ranges.items() if largest > _LARGEST}
    large |= {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and _is_large(numpy_helper.to_array(tensor))
    }
    return [
        node.name for node in model.graph.node if not large.isdisjoint((*node.input, *node.output))
    ]


def _is_large(values: Array) -> bool:
    sizes = np.abs(values)
    return bool(((sizes > _LARGEST) & (sizes < LIKE_INFINITY)).any())


def halved(
    model: onnx.ModelProto, *, keep: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return ``model`` in FP16, and how many nodes of each kind compute in it."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    casts = {node.name for node in copy.graph.node if node.op_type == "Cast"} - set(keep)
    try:
        with warnings.catch_warnings():
            # One for every constant beyond FP16, such as a mask's "minus infinity"; what they
            # change is measured.
            warnings.simplefilter("ignore")
            half = float16.convert_float_to_float16(
                copy, keep_io_types=True, node_block_list=sorted(keep)
            )
            _retarget(half.graph, casts)
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


def _retarget(graph: onnx.GraphProto, names: Collection[str]) -> None:
    """Let the model's own casts to fp32 end in fp16, which is what is read behind them now.

    The converter leaves them as they are (onnxconverter-common 1.16).
    """
    for node in graph.node:
        if node.name in names:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                    attribute.i = onnx.TensorProto.FLOAT16
