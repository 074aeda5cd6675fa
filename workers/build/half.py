"""FP16: weights and arithmetic in half precision; inputs and outputs stay as they were.

A tensor keeps its name in fp32; in fp16 it is called ``<name>_fp16``. Casts stand where a node that
computes in one reads what a node in the other made. A node stays in fp32 when its user says so,
when its operator knows no fp16, and when it makes or reads values that fp16 cannot hold. The last
is told from ranges that were seen: a CPU computes fp16 through casts, leaves out those between two
nodes, and so would not show what a GPU answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from workers.batching.stacking import Array
from workers.build.calibration import LIKE_INFINITY
from workers.build.graph import copied, has_subgraph, keep_used_weights, kinds, replace_nodes
from workers.build.quantize import QUANTISED

#: The largest value of FP16.
_LARGEST: Final = 65504
#: As good as minus infinity in a mask, and no infinity: a row that is masked as a whole stays a
#: number.
_MASKED: Final = 1e4

_HALF: Final = "{}_fp16"
_FLOAT16: Final = "tensor(float16)"
#: Their numbers are exact on purpose.
_LEFT_ALONE: Final = ("QuantizeLinear", "DequantizeLinear")


def beyond(model: onnx.ModelProto, ranges: Mapping[str, float]) -> list[str]:
    """Return the nodes that make or read values which fp16 cannot hold."""
    large = {name for name, largest in ranges.items() if largest > _LARGEST}
    large |= {
        tensor.name
        for tensor in model.graph.initializer
        if tensor.data_type == TensorProto.FLOAT and _is_large(numpy_helper.to_array(tensor))
    }
    return [
        node.name for node in model.graph.node if not large.isdisjoint((*node.input, *node.output))
    ]


def halved(
    model: onnx.ModelProto, *, keep: Collection[str]
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """Return ``model`` in fp16, and how many Conv, MatMul and Gemm compute in it."""
    half = copied(model)
    writer = _Writer(half, keep)
    counts = dict.fromkeys(QUANTISED, 0)
    for node in half.graph.node:
        if writer.convert(node) and node.op_type in counts:
            counts[node.op_type] += 1
    writer.finish()
    return half, {kind: count for kind, count in counts.items() if count}


class _Writer:
    """Converts the nodes of one graph, in their order, and puts casts between them."""

    def __init__(self, model: onnx.ModelProto, keep: Collection[str]) -> None:
        self._graph, self._keep = model.graph, keep
        self._kinds = kinds(model)
        self._opsets = {opset.domain: opset.version for opset in model.opset_import}
        self._weights = {tensor.name: tensor for tensor in model.graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        #: Tensors that there are in fp16, and those that there are in fp32.
        self._half: set[str] = set()
        self._full = {value.name for value in model.graph.input} | set(self._weights)

    def convert(self, node: onnx.NodeProto) -> bool:
        """Take ``node`` over, in fp16 where that can be; return whether it is."""
        takes = None if node.name in self._keep else self._in_half(node)
        if takes is None:
            for name in _read_by(node):
                self._need_full(name)
            self._full.update(node.output)
            self._nodes.append(node)
            return False
        inputs, outputs = takes
        for place in inputs:
            self._need_half(node.input[place])
            node.input[place] = _HALF.format(node.input[place])
        for place, name in enumerate(node.input):
            if place not in inputs:
                self._need_full(name)
        for place, name in enumerate(node.output):
            if place in outputs:
                self._half.add(name)
                node.output[place] = _HALF.format(name)
            else:
                self._full.add(name)
        _retarget(node)
        self._nodes.append(node)
        return True

    def finish(self) -> None:
        """Write the graph, whose outputs stay what they were."""
        for value in self._graph.output:
            self._need_full(value.name)
        replace_nodes(self._graph, self._nodes)
        keep_used_weights(self._graph)

    def _in_half(self, node: onnx.NodeProto) -> tuple[set[int], set[int]] | None:
        """Return which inputs and outputs of ``node`` become fp16, ``None`` where none can."""
        names = [*filter(None, node.input), *filter(None, node.output)]
        if has_subgraph(node) or node.op_type in _LEFT_ALONE:
            return None
        if any(name not in self._kinds for name in names):
            return None
        try:
            schema = onnx.defs.get_schema(
                node.op_type, self._opsets[node.domain or ""], node.domain
            )
        except (onnx.defs.SchemaError, KeyError):
            return None
        allowed = {
            constraint.type_param_str: constraint.allowed_type_strs
            for constraint in schema.type_constraints
        }
        places = []
        for side, formals in ((node.input, schema.inputs), (node.output, schema.outputs)):
            floats = [
                place
                for place, name in enumerate(side)
                if name and self._kinds[name] == TensorProto.FLOAT
            ]
            # An operator with any number of inputs names the last of them only once.
            types = {place: formals[min(place, len(formals) - 1)].type_str for place in floats}
            if any(_FLOAT16 not in allowed.get(kind, (_FLOAT16,)) for kind in types.values()):
                return None
            places.append({place for place, kind in types.items() if kind in allowed})
        inputs, outputs = places
        return (inputs, outputs) if inputs or outputs else None

    def _need_half(self, name: str) -> None:
        if name in self._half:
            return
        self._half.add(name)
        if name in self._weights:
            values = numpy_helper.to_array(self._weights[name])
            self._graph.initializer.append(
                numpy_helper.from_array(_as_half(values), _HALF.format(name))
            )
        else:
            self._cast(name, _HALF.format(name), TensorProto.FLOAT16)

    def _need_full(self, name: str) -> None:
        if name in self._half and name not in self._full:
            self._full.add(name)
            self._cast(_HALF.format(name), name, TensorProto.FLOAT)

    def _cast(self, name: str, into: str, kind: int) -> None:
        self._nodes.append(helper.make_node("Cast", [name], [into], name=f"{into}_cast", to=kind))


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, from inside its branches and loops too."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in (attribute.g, *attribute.graphs):
            for below in inner.node:
                yield from _read_by(below)
            yield from (value.name for value in inner.output)


def _retarget(node: onnx.NodeProto) -> None:
    """Let what ``node`` is told to make as fp32 be made as fp16."""
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype") and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16
        if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
            values = _as_half(numpy_helper.to_array(attribute.t))
            attribute.t.CopyFrom(numpy_helper.from_array(values))


def _is_large(values: Array) -> bool:
    sizes = np.abs(values)
    return bool(((sizes > _LARGEST) & (sizes < LIKE_INFINITY)).any())


def _as_half(values: Array) -> Array:
    masked = np.where(np.abs(values) >= LIKE_INFINITY, np.sign(values) * _MASKED, values)
    half: Array = masked.astype(np.float16)
    return half
