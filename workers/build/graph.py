"""The source of a build as a graph: read with its weights, its constants folded, its nodes named.

Weights may be stored in another form behind Cast and Mul. A converter sees no weight there, so what
does not depend on an input is computed first. Nothing is fused: a node keeps the name that its user
knows it by.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from producer.contract.errors import ConfigError
from workers.build.store import digest
from workers.error_text import one_line

_STANDARD: Final = ("", "ai.onnx")

#: Different at every run, or a quantisation that is there on purpose.
_NEVER_FOLDED: Final = frozenset(
    {
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
        *("Bernoulli", "Multinomial", "DequantizeLinear", "QuantizeLinear"),
    }
)

#: Constants that would grow beyond this and by more than this factor stay computed.
_LARGE_BYTES: Final = 64 << 20
_LARGEST_GROWTH: Final = 8

_SUBGRAPHS: Final = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def read_source(path: Path) -> onnx.ModelProto:
    """Return the model of ``path`` with its external data, whole by the rules of ONNX."""
    check(path)
    return onnx.load(str(path))


def check(path: Path) -> None:
    """Raise ConfigError when the rules of ONNX are broken."""
    try:
        onnx.checker.check_model(str(path))
    except Exception as error:
        raise ConfigError(f"{path}: is not a sound ONNX model: {one_line(error)}") from error


def external_files(path: Path) -> list[Path]:
    """Return the files beside ``path`` that hold its weights."""
    model = onnx.load(str(path), load_external_data=False)
    names = {
        entry.value
        for tensor in _tensors(model.graph)
        for entry in tensor.external_data
        if entry.key == "location"
    }
    return [path.parent / name for name in sorted(names)]


def digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file and of those that hold its weights, by where they lie from its
    folder.
    """
    files = (path, *external_files(path))
    return {os.path.relpath(file, path.parent): digest(file) for file in files}


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every constant, those of nodes and inside of loops and branches included."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose constants are folded and whose nodes all have a name of their own."""
    copy = copied(model)
    _keep_weights_from_inputs(copy)
    _shorten_domain(copy)
    _fold(copy)
    _name_nodes(copy.graph)
    return copy


def standard_opset(model: onnx.ModelProto) -> int:
    """Return the version of the standard operators that ``model`` is written in."""
    return next((opset.version for opset in model.opset_import if opset.domain in _STANDARD), 1)


def at_opset(model: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """Return a copy of ``model`` in an opset of at least ``least``."""
    if standard_opset(model) >= least:
        return copied(model)
    try:
        return onnx.version_converter.convert_version(model, least)
    except Exception as error:
        raise ConfigError(
            f"the model is of opset {standard_opset(model)}, and cannot be converted to {least}: "
            f"export it anew with opset {least} or later. {one_line(error)}"
        ) from error


def copied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that can be changed while ``model`` stays as it is."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def kinds(model: onnx.ModelProto) -> dict[str, int]:
    """Return the element type of every tensor that has a known one."""
    try:
        typed = onnx.shape_inference.infer_shapes(model).graph
    except Exception as error:
        raise ConfigError(f"its tensors contradict each other: {one_line(error)}") from error
    found = {
        value.name: value.type.tensor_type.elem_type
        for value in (*typed.input, *typed.value_info, *typed.output)
        if value.type.tensor_type.elem_type
    }
    return found | {tensor.name: tensor.data_type for tensor in typed.initializer}


def floats(model: onnx.ModelProto) -> list[str]:
    """Return the float32 tensors that a run is given or computes, in the order of the graph."""
    known = kinds(model)
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [value.name for value in model.graph.input if value.name not in weights]
    computed = [name for node in model.graph.node for name in node.output]
    return [name for name in (*given, *computed) if known.get(name) == onnx.TensorProto.FLOAT]


def has_subgraph(node: onnx.NodeProto) -> bool:
    """Return whether ``node`` is a branch or a loop."""
    return any(attribute.type in _SUBGRAPHS for attribute in node.attribute)


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Let ``graph`` consist of ``nodes``, some of which may be its own."""
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _keep_weights_from_inputs(model: onnx.ModelProto) -> None:
    """Remove the inputs that are weights: old exporters list them, and no job may replace them."""
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in weights]
    if len(given) == len(model.graph.input):
        return
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in given]
    del model.graph.input[:]
    model.graph.input.extend(copies)
    # Before this version every weight had to be an input.
    model.ir_version = max(model.ir_version, 4)


def _shorten_domain(model: onnx.ModelProto) -> None:
    """Call the domain of the standard operators by one of its two names."""
    for part in (*model.opset_import, *model.graph.node):
        if part.domain in _STANDARD:
            part.domain = ""


def _fold(model: onnx.ModelProto) -> None:
    graph = model.graph
    opsets = {opset.domain: opset.version for opset in model.opset_import}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    folded: dict[str, np.ndarray[Any, Any]] = {}
    kept = []
    for node in graph.node:
        values = _constant_inputs(node, weights, folded)
        outputs = None if values is None else _computed(node, values, opsets)
        if outputs is None:
            kept.append(node)
        else:
            folded.update(zip(node.output, outputs, strict=True))
    if len(kept) == len(graph.node):
        return
    replace_nodes(graph, kept)
    graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in folded.items()
    )
    keep_used_weights(graph)


def _constant_inputs(
    node: onnx.NodeProto, weights: dict[str, Any], folded: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the values that ``node`` is computed from, ``None`` when it is not to be."""
    if node.domain not in _STANDARD or node.op_type in _NEVER_FOLDED or has_subgraph(node):
        return None
    values = {}
    for name in filter(None, node.input):
        if name in folded:
            values[name] = folded[name]
        elif name in weights:
            values[name] = numpy_helper.to_array(weights[name])
        else:
            return None
    return values


def _computed(
    node: onnx.NodeProto, values: dict[str, Any], opsets: dict[str, int]
) -> list[Any] | None:
    """Return the outputs of ``node``, ``None`` where it cannot or should not be computed now."""
    try:
        with np.errstate(all="ignore"):
            outputs = ReferenceEvaluator(node, opsets=opsets).run(None, values)
    except Exception:  # noqa: BLE001 - what the reference cannot do stays as it is
        return None
    if not all(isinstance(value, np.ndarray | np.generic) for value in outputs):
        return None
    arrays = [np.asarray(value) for value in outputs]
    grown = sum(value.nbytes for value in arrays)
    given = sum(value.nbytes for value in values.values())
    if grown > max(_LARGE_BYTES, _LARGEST_GROWTH * given):
        return None
    return arrays


def keep_used_weights(graph: onnx.GraphProto) -> None:
    """Remove the weights that nothing reads any more."""
    used = {value.name for value in graph.output} | _names_used(graph)
    kept = [
        onnx.TensorProto.FromString(tensor.SerializeToString())
        for tensor in graph.initializer
        if tensor.name in used
    ]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _names_used(graph: onnx.GraphProto) -> set[str]:
    """Return every name that a node reads, those inside of loops and branches included."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                names |= _names_used(inner) | {value.name for value in inner.output}
    return names


def _name_nodes(graph: onnx.GraphProto) -> None:
    taken = {node.name for node in graph.node}
    for number, node in enumerate(graph.node):
        if not node.name:
            name = f"{node.op_type}_{number}"
            while name in taken:
                name += "_"
            node.name = name
            taken.add(name)
