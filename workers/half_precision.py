"""Whether an ONNX file that is said to compute in half precision really does.

A conversion can quietly change nothing: the file is then as large, and takes as much memory, as the
one it should stand in for. Told from the tensors' types in the file; no runtime is asked, and no
weights are read.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

#: Numbers of fields in onnx.proto.
_MODEL_GRAPH: Final = 7
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT = 1, 5, 11
_TENSOR_TYPE: Final = 2
_NODE_OPERATOR, _NODE_ATTRIBUTE = 4, 5
_ATTRIBUTE_INT, _ATTRIBUTE_TENSOR, _ATTRIBUTE_GRAPH = 3, 5, 6
_VALUE_TYPE, _TYPE_TENSOR, _TENSOR_ELEMENT = 2, 1, 1

#: Element types in onnx.proto.
_FLOAT: Final = 1
_HALVES: Final = frozenset((10, 16))  # float16, bfloat16

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

#: A number, or where a part of the file lies.
Value: TypeAlias = "int | tuple[int, int]"


def is_half_precision(path: Path) -> bool:
    """Return whether anything in the file is float16 or bfloat16, or nothing of it is float32.

    Single nodes may stay float32 on purpose; so one half tensor or cast is enough.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        types: set[int] = set()
        for graph in _parts(data, (0, len(data)), _MODEL_GRAPH):
            for found in _types(data, graph):
                if found in _HALVES:
                    return True
                types.add(found)
    return _FLOAT not in types


def _types(data: mmap.mmap, graph: tuple[int, int]) -> Iterator[int]:
    """Yield the types of a graph's weights, then of what its nodes hold, make and are given."""
    for tensor in _parts(data, graph, _GRAPH_INITIALIZER):
        yield from _numbers(data, tensor, _TENSOR_TYPE)
    for value in _parts(data, graph, _GRAPH_INPUT):
        for kind in _parts(data, value, _VALUE_TYPE):
            for tensor in _parts(data, kind, _TYPE_TENSOR):
                # What a graph is given as float32 may be cast at once.
                yield from _HALVES.intersection(_numbers(data, tensor, _TENSOR_ELEMENT))
    for node in _parts(data, graph, _GRAPH_NODE):
        operator = [data[start:end] for start, end in _parts(data, node, _NODE_OPERATOR)]
        for attribute in _parts(data, node, _NODE_ATTRIBUTE):
            if operator == [b"Cast"]:
                yield from _HALVES.intersection(_numbers(data, attribute, _ATTRIBUTE_INT))
            for tensor in _parts(data, attribute, _ATTRIBUTE_TENSOR):
                yield from _numbers(data, tensor, _TENSOR_TYPE)
            for inner in _parts(data, attribute, _ATTRIBUTE_GRAPH):
                yield from _types(data, inner)


def _parts(data: mmap.mmap, within: tuple[int, int], number: int) -> Iterator[tuple[int, int]]:
    for field, value in _fields(data, within):
        if field == number and isinstance(value, tuple):
            yield value


def _numbers(data: mmap.mmap, within: tuple[int, int], number: int) -> Iterator[int]:
    for field, value in _fields(data, within):
        if field == number and isinstance(value, int):
            yield value


def _fields(data: mmap.mmap, within: tuple[int, int]) -> Iterator[tuple[int, Value]]:
    """Yield the fields of one message; it ends where something is not as it should be."""
    position, end = within
    while position < end:
        tag, position = _varint(data, position)
        field, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            number, position = _varint(data, position)
            yield field, number
        elif kind == _LENGTH:
            length, position = _varint(data, position)
            if position + length > end:
                return
            yield field, (position, position + length)
            position += length
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            return


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Return a number and where it ends; a broken one ends the file."""
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return 0, len(data)
