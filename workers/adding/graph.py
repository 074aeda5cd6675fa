"""What an ONNX file says of itself, read without a runtime; what is in the way of serving it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import onnx
from onnx import helper

from producer.contract.errors import ConfigError
from workers.build.graph import external_files
from workers.error_text import one_line
from workers.half_precision import is_half_precision
from workers.onnx_file import why_not_onnx

#: A fixed size, or the name of one that is free; empty where the exporter gave it none.
Size: TypeAlias = int | str

#: Nodes that compute in integers, or round what they are given to them.
_INTEGER_NODES: Final = frozenset(
    {"ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QuantizeLinear"}
)
_INTEGER_PREFIX: Final = "QLinear"

_HALVES: Final = frozenset((onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16))

_NO_SHAPE: Final = (
    "has no shape, and nobody knows how many axes a job is to send. Export it with one; sizes that "
    "are free have a name in it."
)

#: A value of a key in Redis takes no more, and trying such a model takes minutes.
_MOST_ROW_BYTES: Final = 512 << 20

#: What a file of another kind is, by its suffix, and how to get an ONNX file of it.
_OTHER_KINDS: Final = {
    **dict.fromkeys((".pt", ".pth", ".ckpt"), "PyTorch: export it with torch.onnx.export"),
    ".safetensors": "weights alone: export the model with torch.onnx.export",
    **dict.fromkeys((".h5", ".keras", ".pb"), "TensorFlow: convert it with tf2onnx"),
    ".tflite": "TensorFlow Lite: convert it with tf2onnx --tflite",
    **dict.fromkeys((".pkl", ".joblib"), "a pickle: convert the estimator with skl2onnx"),
    **dict.fromkeys((".engine", ".plan"), "a TensorRT plan: give the ONNX file it was made of"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model file that may be tried."""

    path: Path
    #: The sizes of each input and output by name, in the file's order.
    inputs: dict[str, tuple[Size, ...]]
    outputs: dict[str, tuple[Size, ...]]
    precision: str
    #: The files beside it that hold its weights.
    external: tuple[Path, ...]
    #: Operators that ONNX does not define, such as ``com.acme:Fancy``; the runtime may know them.
    foreign: tuple[str, ...]


def read_graph(path: Path) -> Graph:
    """Return what the file says; ConfigError names the first thing that is in the way."""
    if not path.is_file():
        raise ConfigError(f"{path}: {'is a folder' if path.is_dir() else 'there is no such file'}.")
    if problem := why_not_onnx(path):
        kind = _OTHER_KINDS.get(path.suffix.lower())
        raise ConfigError(f"{path} {problem}.{f' It looks like {kind}.' if kind else ''}")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:
        raise ConfigError(f"{path} is not an ONNX model: {one_line(error)}") from error
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in weights]
    if not given:
        raise ConfigError(
            f"{path}: the model has no inputs: it gives the same answer to every job. Export it so "
            "that what a job sends is an input of the graph."
        )
    nodes = list(_nodes(model.graph))
    has_zipmap = any(node.op_type == "ZipMap" for node in nodes)
    for side, values in (("input", given), ("output", model.graph.output)):
        for value in values:
            why = _why_not(value, has_zipmap=has_zipmap)
            if not why and side == "input":
                why = _why_not_sent(value)
            if why:
                raise ConfigError(f"{path}: {side} {value.name!r} {why}")
    return Graph(
        path=path,
        inputs={value.name: _sizes(value) for value in given},
        outputs={value.name: _sizes(value) for value in model.graph.output},
        precision=_precision(path, model.graph, nodes),
        external=_external(path),
        foreign=tuple(sorted({name for node in nodes if (name := _foreign(node, model))})),
    )


def _why_not(value: onnx.ValueInfoProto, *, has_zipmap: bool) -> str:
    """Return why jobs cannot carry a tensor, or nothing."""
    kind = value.type.WhichOneof("value")
    if kind == "sequence_type" and has_zipmap:
        return (
            "is a sequence of maps, not a tensor, and cannot be split between jobs: the model ends "
            "in a ZipMap. Export it without: "
            "skl2onnx.to_onnx(..., options={'zipmap': False})."
        )
    if kind != "tensor_type":
        called = (kind or "value of no known kind").removesuffix("_type")
        article = "an" if called.startswith("o") else "a"
        return (
            f"is {article} {called}, not a tensor, and cannot be split between jobs. Leave it out."
        )
    if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
        return (
            "is text; jobs carry numbers to an engine. Move the text step (tokenizer, labels) out "
            "of the model."
        )
    return ""


def _why_not_sent(value: onnx.ValueInfoProto) -> str:
    """Return why no job can hold an input, or nothing."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return _NO_SHAPE
    sizes = [size for size in _sizes(value) if isinstance(size, int)]
    if 0 in sizes:
        return (
            "has an axis of size 0, so that no job can send any of it. Export it with a size "
            "there, or with a name, which makes it free."
        )
    if tensor.elem_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return "has complex numbers; export the model with real and imaginary parts as two inputs."
    row_bytes = math.prod(sizes) * helper.tensor_dtype_to_np_dtype(tensor.elem_type).itemsize
    if row_bytes > _MOST_ROW_BYTES:
        return (
            f"takes {row_bytes:,} bytes or more; a job carries {_MOST_ROW_BYTES:,} at most. Export "
            "the model for less at a time."
        )
    return ""


def _sizes(value: onnx.ValueInfoProto) -> tuple[Size, ...]:
    return tuple(
        size.dim_value if size.HasField("dim_value") else size.dim_param
        for size in value.type.tensor_type.shape.dim
    )


def _precision(path: Path, graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> str:
    if any(n.op_type in _INTEGER_NODES or n.op_type.startswith(_INTEGER_PREFIX) for n in nodes):
        return "int8"
    given = {value.type.tensor_type.elem_type for value in graph.input}
    if not graph.initializer and given.isdisjoint(_HALVES):
        # Without weights nothing in the file is float32, and nothing is half.
        return "fp32"
    return "fp16" if is_half_precision(path) else "fp32"


def _external(path: Path) -> tuple[Path, ...]:
    files = external_files(path)
    for file in files:
        # By its name, not by where links lead: caches of downloads consist of links.
        if os.path.relpath(file, path.parent).startswith(os.pardir):
            raise ConfigError(
                f"{path}: its weights lie outside its folder, or are named by an absolute path: "
                f"{file}. Save them beside it: "
                "onnx.save(..., save_as_external_data=True)."
            )
        if not file.is_file():
            raise ConfigError(
                f"{path}: its weights are in {file}, which is not there. Put it beside the model."
            )
    return tuple(files)


def _foreign(node: onnx.NodeProto, model: onnx.ModelProto) -> str:
    """Return the name of an operator that neither ONNX nor the file itself defines."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    own = {(function.domain, function.name) for function in model.functions}
    if onnx.defs.has(node.op_type, domain) or (node.domain, node.op_type) in own:
        return ""
    return f"{domain}:{node.op_type}" if domain else str(node.op_type)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, those inside of loops and branches included."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)
