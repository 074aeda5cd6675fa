"""Whether a file is a whole ONNX model, told from its outermost fields alone.

The parent must refuse a broken file in one line before any process starts, and must not
import a runtime for it. Truncated, empty and foreign files are caught here; what is wrong
inside the graph is for the runtime to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

#: ModelProto.graph.
_GRAPH: Final = 7
#: The largest field number of ModelProto, with room for later versions.
_LARGEST_FIELD: Final = 64

#: How the file begins that Git has where the model itself is kept elsewhere.
_LFS_POINTER: Final = b"version https://git-lfs."

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def why_not_onnx(path: Path) -> str | None:
    """Return in words why ``path`` holds no whole ONNX model, or ``None`` when it does."""
    size = path.stat().st_size
    if size == 0:
        return "is empty"
    fields: set[int] = set()
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "is a pointer of Git LFS in place of the model; `git lfs pull` fetches it"
        file.seek(0)
        while file.tell() < size:
            field = _skip_field(file)
            if field is None or file.tell() > size:
                return "is not an ONNX model, or only a part of one"
            fields.add(field)
    if _GRAPH not in fields:
        return "is not an ONNX model: it holds no graph"
    return None


def _skip_field(file: BinaryIO) -> int | None:
    """Move past one protobuf field; return its number, ``None`` when it cannot be one."""
    tag = _varint(file)
    if tag is None:
        return None
    number, kind = tag >> 3, tag & 7
    if not 1 <= number <= _LARGEST_FIELD:
        return None
    if kind == _VARINT:
        return None if _varint(file) is None else number
    if kind == _LENGTH:
        length = _varint(file)
        if length is None:
            return None
    elif kind in (_FIXED64, _FIXED32):
        length = 8 if kind == _FIXED64 else 4
    else:
        return None
    file.seek(length, 1)
    return number


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None
