"""INT8 and FP8: a quantize and a dequantize before every Conv, MatMul and Gemm, from calibrated
ranges.

Exactly what TensorRT's parser takes: symmetric, zero points of 0, weights by output channel,
activations as a whole, no quantised bias. A range is the largest value that the calibration saw:
clipping outliers, as percentiles and least errors do, costs transformers their answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import onnx
from ml_dtypes import float8_e4m3fn
from onnx import helper, numpy_helper

from workers.batching.stacking import Array
from workers.build.graph import at_opset, keep_used_weights, replace_nodes

QUANTISED: Final = ("Conv", "MatMul", "Gemm")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One 8-bit number format."""

    kind: int
    dtype: np.dtype[Any]
    largest: float
    #: The first opset in which QuantizeLinear knows it, by channel too.
    opset: int


FORMATS: Final[Mapping[str, Format]] = {
    "int8": Format(kind=onnx.TensorProto.INT8, dtype=np.dtype(np.int8), largest=127, opset=13),
    "fp8": Format(
        kind=onnx.TensorProto.FLOAT8E4M3FN, dtype=np.dtype(float8_e4m3fn), largest=448, opset=19
    ),
}


def quantized(
    model: onnx.ModelProto, ranges: Mapping[str, float], precision: str, *, keep: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return ``model`` quantised, and how many nodes of each kind were.

    ``ranges`` holds the largest magnitude of every float32 tensor; a node with an input that is
    missing there stays as it is.
    """
    form = FORMATS[precision]
    model = at_opset(model, form.opset)
    weights = _weights(model.graph)
    writer = _Writer(form, weights, ranges)
    counts = dict.fromkeys(QUANTISED, 0)
    for node in _candidates(model.graph, keep):
        if all(name in ranges or _axis(node, name, weights) is not None for name in node.input[:2]):
            for place, name in enumerate(node.input[:2]):
                node.input[place] = writer.dequantized(name, _axis(node, name, weights))
            counts[node.op_type] += 1
    writer.write(model.graph)
    keep_used_weights(model.graph)
    return model, {kind: count for kind, count in counts.items() if count}


def candidates(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many nodes of each kind could be quantised."""
    kinds = [node.op_type for node in _candidates(model.graph, ())]
    return {kind: kinds.count(kind) for kind in QUANTISED if kind in kinds}


class _Writer:
    """Collects the nodes and constants of a quantisation, each tensor's once."""

    def __init__(
        self,
        form: Format,
        weights: Mapping[str, onnx.TensorProto],
        ranges: Mapping[str, float],
    ) -> None:
        self._form, self._weights, self._ranges = form, weights, ranges
        self._names: dict[tuple[str, int | None], str] = {}
        self._constants: list[onnx.TensorProto] = []
        #: By the tensor after which they can be computed.
        self._nodes: dict[str, list[onnx.NodeProto]] = {}

    def dequantized(self, name: str, axis: int | None) -> str:
        """Return the name of ``name`` after it was quantised and dequantised."""
        key = (name, axis)
        if key not in self._names:
            stem = name if axis is None else f"{name}_axis{axis}"
            self._names[key] = f"{stem}_dequantized"
            if axis is None:
                self._activation(name)
            else:
                self._weight(name, stem, axis)
        return self._names[key]

    def write(self, graph: onnx.GraphProto) -> None:
        """Put everything into ``graph``, behind what it is computed from."""
        graph.initializer.extend(self._constants)
        given = [value.name for value in (*graph.input, *graph.initializer)]
        nodes = [node for name in given for node in self._nodes.get(name, ())]
        for node in graph.node:
            nodes.append(node)
            nodes += [new for name in node.output for new in self._nodes.get(name, ())]
        replace_nodes(graph, nodes)

    def _activation(self, name: str) -> None:
        scale = np.float32((self._ranges[name] or 1.0) / self._form.largest)
        parameters = self._parameters(name, np.asarray(scale))
        quantize = helper.make_node(
            "QuantizeLinear", [name, *parameters], [f"{name}_quantized"], name=f"{name}_quantize"
        )
        self._nodes[name] = [quantize, self._dequantize(name, parameters)]

    def _weight(self, name: str, stem: str, axis: int) -> None:
        values = numpy_helper.to_array(self._weights[name])
        others = tuple(other for other in range(values.ndim) if other != axis)
        largest = np.abs(values).max(axis=others, keepdims=True)
        scale = (np.where(largest > 0, largest, 1) / self._form.largest).astype(np.float32)
        scaled = np.clip(values / scale, -self._form.largest, self._form.largest)
        if self._form.dtype.kind == "i":
            scaled = np.rint(scaled)
        quantised = f"{stem}_quantized"
        self._constants.append(numpy_helper.from_array(scaled.astype(self._form.dtype), quantised))
        parameters = self._parameters(stem, scale.ravel())
        self._nodes[quantised] = [self._dequantize(stem, parameters, axis=axis)]

    def _parameters(self, stem: str, scale: Array) -> list[str]:
        """Return the names of a scale and of its zero points."""
        zeros = np.zeros(scale.shape, self._form.dtype)
        names = [f"{stem}_scale", f"{stem}_zero"]
        self._constants += [
            numpy_helper.from_array(value, name)
            for name, value in zip(names, (scale, zeros), strict=True)
        ]
        return names

    def _dequantize(self, stem: str, parameters: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(
            "DequantizeLinear",
            [f"{stem}_quantized", *parameters],
            [f"{stem}_dequantized"],
            name=f"{stem}_dequantize",
            **attributes,
        )


def _candidates(graph: onnx.GraphProto, keep: Collection[str]) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type in QUANTISED and node.name not in keep]


def _weights(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    inputs = {value.name for value in graph.input}
    return {tensor.name: tensor for tensor in graph.initializer if tensor.name not in inputs}


def _axis(node: onnx.NodeProto, name: str, weights: Mapping[str, onnx.TensorProto]) -> int | None:
    """Return the axis of a weight that counts output channels, ``None`` for anything else."""
    tensor = weights.get(name)
    if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
        return None
    first = name == node.input[0]
    if node.op_type == "Conv":
        return None if first else 0
    if node.op_type == "Gemm":
        transposed = any(
            attribute.name == ("transA" if first else "transB") and attribute.i
            for attribute in node.attribute
        )
        return int(transposed == first)
    return len(tensor.dims) - (2 if first else 1)
