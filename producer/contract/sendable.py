"""What may be sent: msgpack packs some things that nobody can read again, or reads as others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import chain
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

#: Of so many values it is asked first whether all are numbers.
_MANY: Final = 16

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
    elif isinstance(value, memoryview) and value.format not in _BYTES:
        raise BadRequest(
            f"A memoryview of {value.format!r} would be read as bytes. Send numpy.asarray(view)."
        )


def _refuse_any(values: Collection[Any]) -> None:
    if len(values) >= _MANY and (_are_numbers(values) or _are_rows(values)):
        return
    for value in values:
        if type(value) not in _LEAVES:
            refuse_unreadable(value)


def _are_rows(values: Collection[Any]) -> bool:
    """Return whether ``values`` are lists of numbers; not where that is uncertain."""
    return set(map(type, values)) == {list} and _are_numbers(chain.from_iterable(values))


def _are_numbers(values: Iterable[Any]) -> bool:
    """Return whether ``values`` are numbers, or can be; not where that is uncertain.

    What is refused here can be none. A loop of ours takes longer than packing them; C does not.
    """
    try:
        math.fsum(values)
    except (TypeError, ValueError, ArithmeticError, Warning):
        return False
    return True


def _bad_key(kind: type) -> str:
    use = "key.item()" if issubclass(kind, np.generic) else "str(key)"
    return (
        f"A map has a key of type {kind.__name__}, and nobody could read it again. "
        f"Keys are text, bytes, or Python's own numbers: use {use}."
    )
