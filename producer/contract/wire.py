"""How a job's arguments and a reply become bytes: one version byte, then msgpack with arrays in it.

An array is an extension of its own: element type, shape, raw little-endian elements. Another says
of a large one where its elements lie (`producer.contract.blobs`); a message that has one is of
version 2, so that a reader that knows nothing of it says so. Nothing here can run code, nothing is
allocated from a size that a message merely claims, and what a small value costs once it is decoded
is bounded by how many there may be.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import math
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import numpy as np
from kombu.serialization import registry

from producer.contract.errors import BadMessage, BadRequest
from producer.contract.sendable import refuse_unreadable

#: Name of the serializer in kombu, and what messages say they hold.
SERIALIZER: Final = "fleet"
CONTENT_TYPE: Final = "application/x-fleet-msgpack"
CONTENT_ENCODING: Final = "binary"

#: What we write: the version before where no array is elsewhere, which older readers know too.
VERSION: Final = 1
VERSION_WITH_REFERENCES: Final = 2
READABLE_VERSIONS: Final = frozenset({VERSION, VERSION_WITH_REFERENCES})

MAX_RANK: Final = 8
#: The largest extent of one axis.
MAX_EXTENT: Final = 2**31 - 1
#: The most values in one message: each number, text, array, list and map counts, at any depth. One
#: byte on the wire can be an empty map, which takes 72 bytes here, so the limit on a body's size
#: alone would allow 70 times as much memory; this many take at most about 0.3 GB. A message with
#: fewer bytes than this need not be counted. Numbers beyond it belong in arrays: one value each.
MAX_VALUES: Final = 2**21

_ARRAY: Final = 1
_REFERENCE: Final = 2
#: The id of a blob, as its reference holds it.
_ID_BYTES: Final = 16
_DTYPES: Final = {
    np.dtype(name).newbyteorder("<").str.encode(): np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64"),
    )
}
_DTYPE_BYTES: Final = 3
#: By rank: element type, rank, extents.
_HEADERS: Final = tuple(struct.Struct(f"<3sB{rank}Q") for rank in range(MAX_RANK + 1))
_VERSION_BYTE: Final = bytes([VERSION])
_REFERENCES_BYTE: Final = bytes([VERSION_WITH_REFERENCES])
#: An array of more than 65,535 bytes begins with this byte, its length, and our type.
_LARGE: Final = 0xC9
_LARGE_HEAD_BYTES: Final = 6
#: What a class derived from one that msgpack knows is packed as. msgpack would do so itself, and
#: trust its len(): a group of Celery's is a dict whose length is that of its tasks.
_DERIVED: Final[tuple[tuple[type, Callable[[Any], object]], ...]] = (
    (dict, dict),
    (list, list),
    (tuple, list),
    (str, str.__str__),
    (bytes, bytes),
    (int, int),
    (float, float),
)

#: By the first byte of a value, the bytes it takes; of a list or a map those of its head, for its
#: members follow like any other values.
_SIZES: Final = bytearray(b"\x01" * 256)
_SIZES[0xA0:0xC0] = range(1, 33)  # short texts
_SIZES[0xCA:0xD4] = bytes((5, 9, 2, 3, 5, 9, 2, 3, 5, 9))  # floats and integers
_SIZES[0xD4:0xD9] = bytes((3, 4, 6, 10, 18))  # extensions of a fixed size
_SIZES[0xDC:0xE0] = bytes((3, 5, 3, 5))  # long lists and maps
#: Those that say their length after the first byte: in how many bytes, and how many follow it more.
_LENGTHS: Final[Mapping[int, tuple[int, int]]] = {
    first + power: (2**power, more)
    for first, more in ((0xC4, 0), (0xC7, 1), (0xD9, 0))  # bytes; extensions, with a type; texts
    for power in range(3)
}
for _first in _LENGTHS:
    _SIZES[_first] = 0


class Where(enum.IntEnum):
    """Where the elements of an array lie that is not in the message."""

    REDIS = 0
    #: A folder or bucket: FLEET_BLOB_URL.
    STORE = 1


_PLACES: Final = frozenset(Where)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An array that is elsewhere."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    where: Where
    #: Of the blob that holds its elements; names no place, which is a setting of whoever reads it.
    blob_id: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spill:
    """The large arrays of one message, which are to lie elsewhere."""

    #: Of at least 65,535: larger arrays are taken out.
    over_bytes: int
    where: Where
    #: By id: the elements.
    blobs: dict[str, bytes | memoryview] = dataclasses.field(default_factory=dict)

    def take(self, header: bytes, elements: bytes | memoryview) -> msgpack.ExtType:
        """Keep the elements of an array and return what stands for it."""
        blob_id = uuid.uuid4()
        self.blobs[blob_id.hex] = elements
        return msgpack.ExtType(_REFERENCE, header + bytes([self.where]) + blob_id.bytes)


def dumps(obj: object, spill: Spill | None = None) -> bytes:
    """Pack ``obj``; raises BadRequest for what has no place on the wire, or could not be read.

    With ``spill`` its large arrays go there.
    """
    pack = _pack if spill is None else functools.partial(_pack, spill=spill)
    try:
        refuse_unreadable(obj)
        packed: bytes = msgpack.packb(obj, default=pack, use_bin_type=True, strict_types=True)
    except BadRequest:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(
            f"The arguments cannot be packed: {error}. Arrays, numbers, text, bytes, "
            "lists and maps of these can be sent."
        ) from None
    if _too_many(packed):
        raise BadRequest(
            f"The arguments hold more than {MAX_VALUES:,} values. "
            "Send numbers as arrays, not lists."
        )
    return (_REFERENCES_BYTE if spill and spill.blobs else _VERSION_BYTE) + packed


def loads(
    data: bytes | bytearray | memoryview, blobs: Mapping[str, bytes | None] | None = None
) -> Any:
    """Unpack what ``dumps`` wrote; raises BadMessage for anything else.

    ``blobs`` are the elements of arrays that are elsewhere, by their ids; where one is None, the
    array's `Reference` is returned in its place.
    """
    view = memoryview(data)
    if len(view) == 0 or view[0] not in READABLE_VERSIONS:
        raise BadMessage(
            f"The message has wire version {view[0] if view else '(none)'}; "
            f"readable here: {', '.join(map(str, sorted(READABLE_VERSIONS)))}. "
            "Upgrade the older side."
        )
    packed = view[1:]
    if _too_many(packed):
        raise BadMessage(
            f"The message holds more than {MAX_VALUES:,} values. Send numbers as arrays, not lists."
        )
    return _unpacked(packed, functools.partial(_unpack, {} if blobs is None else blobs))


def _unpacked(packed: memoryview, ext_hook: Callable[[int, bytes], object]) -> Any:
    # What a list may claim to hold is bounded as well: by this and by the bytes that are there.
    longest = min(len(packed), MAX_VALUES)
    try:
        return msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=False,
            ext_hook=ext_hook,
            max_array_len=longest,
            max_map_len=longest,
        )
    except BadMessage:
        raise
    except Exception as error:  # noqa: BLE001  whatever hostile bytes make msgpack or numpy raise
        raise BadMessage(f"The message cannot be unpacked: {type(error).__name__}.") from None


def register() -> None:
    """Make the serializer known to kombu, and so to Celery."""
    registry.register(
        SERIALIZER,
        dumps,
        loads,
        content_type=CONTENT_TYPE,
        content_encoding=CONTENT_ENCODING,
    )


def spill_packed(data: bytes, spill: Spill) -> bytes:
    """Do to what ``dumps`` packed what it does with ``spill``."""
    pieces: list[bytes] = []
    view = memoryview(data)
    at = copied = 1
    # As long as there is room for a large array behind.
    while len(data) - at > spill.over_bytes:
        end = at + _size_at(data, at)
        start = at + _LARGE_HEAD_BYTES
        if data[at] == _LARGE and data[start - 1] == _ARRAY:
            elements = start + _HEADERS[data[start + _DTYPE_BYTES]].size
            if end - elements > spill.over_bytes:
                reference = spill.take(data[start:elements], view[elements:end])
                pieces += [data[copied:at], msgpack.packb(reference)]
                copied = end
        at = end
    return b"".join([_REFERENCES_BYTE, *pieces, data[copied:]]) if pieces else data


def references(data: bytes) -> list[Reference]:
    """Return the arrays of a message that are elsewhere; raises BadMessage as `loads` does."""
    if data[:1] != _REFERENCES_BYTE:
        return []
    found: list[Reference] = []

    def note(code: int, packed: bytes) -> None:
        if code == _REFERENCE:
            found.append(_reference(packed))

    _unpacked(memoryview(data)[1:], note)
    return found


def _too_many(packed: bytes | memoryview) -> bool:
    """Return whether there are more than MAX_VALUES values in packed bytes; whole or not."""
    end = len(packed)
    if end <= MAX_VALUES:
        # A value has at least one byte.
        return False
    at = 0
    for _ in range(MAX_VALUES):
        at += _size_at(packed, at)
        if at >= end:
            return False
    return True


def _size_at(packed: bytes | memoryview, at: int) -> int:
    """Return the bytes of the value that begins there; of a list or a map those of its head."""
    first = packed[at]
    size = _SIZES[first]
    if size:
        return size
    width, more = _LENGTHS[first]
    length = int.from_bytes(packed[at + 1 : at + 1 + width], "big")
    return 1 + width + more + length


def _pack(value: object, *, spill: Spill | None = None) -> object:
    """Pack what msgpack does not know: arrays, and what Celery's own options may hold."""
    if type(value) is np.ndarray:
        return _pack_array(value, spill)
    for kind, plain in _DERIVED:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise BadRequest("Masked values of an array cannot be sent. Send array.filled(value).")
    if isinstance(value, np.ndarray | np.generic):
        return _pack_array(np.asarray(value), spill)
    if isinstance(value, datetime.datetime | datetime.date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent")


def _pack_array(array: np.ndarray[Any, Any], spill: Spill | None) -> msgpack.ExtType:
    dtype = array.dtype.newbyteorder("<")
    name = dtype.str.encode()
    if name not in _DTYPES:
        raise BadRequest(
            f"Arrays of dtype {array.dtype} cannot be sent. "
            "Use bool, integers, or float16, float32, float64."
        )
    if array.ndim > MAX_RANK:
        raise BadRequest(f"The array has {array.ndim} axes. At most {MAX_RANK} can be sent.")
    if max(array.shape, default=0) > MAX_EXTENT:
        raise BadRequest(f"An axis of the array is longer than {MAX_EXTENT:,}. Send it in parts.")
    header = _HEADERS[array.ndim].pack(name, array.ndim, *array.shape)
    # A copy: its owner may change the array before it is sent.
    elements = array.astype(dtype, copy=False).tobytes()
    if spill is not None and len(elements) > spill.over_bytes:
        return spill.take(header, elements)
    return msgpack.ExtType(_ARRAY, header + elements)


def _unpack(
    blobs: Mapping[str, bytes | None], code: int, data: bytes
) -> np.ndarray[Any, Any] | Reference:
    """Return the array in an extension, once its claims match the bytes that are there."""
    if code == _REFERENCE:
        return _from_blob(_reference(data), blobs)
    if code != _ARRAY:
        raise BadMessage(f"The message has an extension {code} that is not ours.")
    dtype, shape, at = _read_header(data)
    return _array(dtype, shape, data, at)


def _from_blob(
    reference: Reference, blobs: Mapping[str, bytes | None]
) -> np.ndarray[Any, Any] | Reference:
    if reference.blob_id not in blobs:
        raise BadMessage("The message has an array by reference, which is not read here.")
    data = blobs[reference.blob_id]
    return reference if data is None else _array(reference.dtype, reference.shape, data, 0)


def _array(
    dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes, at: int
) -> np.ndarray[Any, Any]:
    if math.prod(shape) * dtype.itemsize != len(data) - at:
        raise BadMessage("The message has an array whose shape does not match its bytes.")
    # A copy of its own: aligned, writable, and the message's bytes can be freed.
    return np.frombuffer(data, dtype=dtype, offset=at).reshape(shape).copy()


def _reference(data: bytes) -> Reference:
    dtype, shape, at = _read_header(data)
    if len(data) != at + 1 + _ID_BYTES or data[at] not in _PLACES:
        raise BadMessage("The message has a reference to an array that cannot be read.")
    return Reference(dtype=dtype, shape=shape, where=Where(data[at]), blob_id=data[at + 1 :].hex())


def _read_header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return element type and shape of an array, and where what follows them begins."""
    if len(data) <= _DTYPE_BYTES or data[_DTYPE_BYTES] > MAX_RANK:
        raise BadMessage(f"The message has an array of more than {MAX_RANK} axes, or half a one.")
    layout = _HEADERS[data[_DTYPE_BYTES]]
    if len(data) < layout.size:
        raise BadMessage("The message has an array whose shape is cut off.")
    name, _, *shape = layout.unpack_from(data)
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise BadMessage("The message has an array of a dtype that cannot be sent.")
    if max(shape, default=0) > MAX_EXTENT:
        raise BadMessage("The message has an array whose shape does not match its bytes.")
    return dtype, tuple(shape), layout.size
