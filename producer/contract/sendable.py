"""What may be sent: msgpack packs some things that nobody can read again, or reads as others."""

from __future__ import annotations

from collections.abc import Collection
from types import NoneType
from typing import Any, Final

import msgpack
import numpy as np

from producer.contract.errors import BadRequest

#: What a map's keys may be, with what is derived from them. A list, which a tuple becomes, or an
#: array, which a number of numpy's becomes, is none that Python takes; and what becomes text might
#: be the text of another key.
_KEYS: Final = (str, bytes, int, float, NoneType)

#: What holds nothing and is read as it was.
_LEAVES: Final = frozenset({str, bytes, bytearray, int, float, bool, NoneType, np.ndarray})

#: msgpack's own: one could be read as an array that it is not, the other as nothing that we know.
_OF_MSGPACK: Final = (msgpack.ExtType, msgpack.Timestamp)

#: The formats of a view whose elements are bytes.
_BYTES: Final = ("B", "b", "c")


def refuse_unreadable(value: object) -> None:
    """Raise BadRequest for what can be packed, and not be read as what it was."""
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str and not isinstance(key, _KEYS):
                raise BadRequest(_bad_key(type(key)))
        _refuse_any(value.values())
    elif type(value) in _OF_MSGPACK:
        kind = type(value).__name__
        raise BadRequest(f"A {kind} of msgpack cannot be sent. Send bytes, or text.")
    elif isinstance(value, (list, tuple)):
        _refuse_any(value)
    elif isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise BadRequest("Masked values of an array cannot be sent. Send array.filled(value).")
    elif isinstance(value, memoryview) and value.format not in _BYTES:
        raise BadRequest(
            f"A memoryview of {value.format!r} would be read as bytes. Send numpy.asarray(view)."
        )


def _refuse_any(values: Collection[Any]) -> None:
    for value in values:
        if type(value) not in _LEAVES:
            refuse_unreadable(value)


def _bad_key(kind: type) -> str:
    use = "key.item()" if issubclass(kind, np.generic) else "str(key)"
    return (
        f"A map has a key of type {kind.__name__}, and nobody could read it again. "
        f"Keys are text, bytes, or Python's own numbers: use {use}."
    )
