"""Rows made up to tell whether padding changes answers: on both sides of the padding's value, near
it and far from it, since what a model makes of a number may depend on where the others are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Final, TypeAlias

import numpy as np

from workers.batching.padding import Pad
from workers.batching.stacking import Array
from workers.models import TensorSpec
from workers.probing.made_up_rows import values_of
from workers.tensor_tables import ProbeHint

Rows: TypeAlias = list[dict[str, Array]]

#: How many times as large as the largest of the probe some numbers are.
_FAR: Final = 10

#: The largest integers that are tried beside the probe's; small tables take the first alone.
_WIDER: Final = (3, 255)

#: Integers of at most so many bytes may be samples of sound. Larger ones are numbers of words,
#: masks and counts, which are not negative.
_SAMPLE_BYTES: Final = 2

#: What leaves a number where it is: what is added, and what it is multiplied by before.
_STAYS: Final = (0.0, 1.0)


def rows_unlike_padding(
    inputs: Sequence[TensorSpec],
    hints: Mapping[str, ProbeHint],
    like: Mapping[str, Array],
    pads: Mapping[str, Pad],
    *,
    count: int,
) -> Rows:
    """Return rows shaped as ``like`` without any value that padding has."""
    rows: Rows = []
    for number in range(count):
        row = {t.name: values_of(t, _of(hints, t), like[t.name].shape, number) for t in inputs}
        rows.append({name: _unlike(array, pads.get(name)) for name, array in row.items()})
    return rows


def rows_elsewhere(
    inputs: Sequence[TensorSpec],
    hints: Mapping[str, ProbeHint],
    rows: Rows,
    pads: Mapping[str, Pad],
    *,
    wider_integers: bool,
) -> Iterator[Rows]:
    """Yield ``rows`` with the numbers of padded inputs in other places: all that may be fractions
    together, and each that is whole by itself, which an engine may refuse.

    A person who says what the least number is means that nothing else is sent.
    """
    open_ended = [t for t in inputs if t.name in pads and _of(hints, t).least is None]
    moves = {
        t.name: _moves(pads[t.name].value, _of(hints, t).largest)
        for t in open_ended
        if np.dtype(t.dtype).kind == "f"
    }
    for several in zip_longest(*moves.values(), fillvalue=_STAYS):
        places = dict(zip(moves, several, strict=True))
        yield [
            {**row, **{name: _moved(row[name], *to, pads[name]) for name, to in places.items()}}
            for row in rows
        ]
    for tensor in open_ended if wider_integers else ():
        if np.dtype(tensor.dtype).kind in "iu":
            yield from _wider(tensor, _of(hints, tensor), rows, pads[tensor.name])


def _of(hints: Mapping[str, ProbeHint], tensor: TensorSpec) -> ProbeHint:
    return hints.get(tensor.name, ProbeHint())


def _moves(value: float, largest: float) -> list[tuple[float, float]]:
    """Return where numbers between 0 and ``largest`` are moved: below 0, then to both sides of the
    padding's value, next to it and far away, and last around it.
    """
    # Nothing is beyond the least number and the largest, and nobody sends what is near them.
    most = float(np.finfo(np.float32).max)
    base = value if -most < value < most else 0.0
    far = _FAR + abs(base) / (largest or 1)
    beside, away = [(base, 1.0), (base, -1.0)], far * largest / 2
    moves = [(0.0, -1.0), *beside, (base + away, far / 2), (base - away, -far / 2)]
    moves.append((base - away, far))
    return [move for move in dict.fromkeys(moves) if move != _STAYS]


def _moved(array: Array, offset: float, factor: float, pad: Pad) -> Array:
    limits = np.finfo(array.dtype)
    moved = array.astype(np.float64) * factor + offset
    return _unlike(moved.clip(float(limits.min), float(limits.max)).astype(array.dtype), pad)


def _wider(tensor: TensorSpec, hint: ProbeHint, rows: Rows, pad: Pad) -> Iterator[Rows]:
    """Yield ``rows`` with larger integers in one input, and with negative ones in samples."""
    dtype = np.dtype(tensor.dtype)
    tried = (*_WIDER, 2 * pad.value + 1)
    wider = [float(n) for n in tried if hint.largest < n <= np.iinfo(dtype).max]
    signed = dtype.kind == "i" and dtype.itemsize <= _SAMPLE_BYTES
    negative = [(-1, largest) for largest in (hint.largest, *wider)] if signed else []
    for sign, largest in (*((1, largest) for largest in wider), *negative):
        moved = dataclasses.replace(hint, largest=largest)
        values = (
            sign * _unlike(values_of(tensor, moved, row[tensor.name].shape, number), pad)
            for number, row in enumerate(rows)
        )
        yield [
            {**row, tensor.name: _unlike(array, pad)}
            for row, array in zip(rows, values, strict=True)
        ]


def _unlike(array: Array, pad: Pad | None) -> Array:
    """Return ``array`` with the least number that is not the padding's in the place of that."""
    if pad is None:
        return array
    other = array.dtype.type(1 if pad.value == 0 else 0)
    return np.where(array == pad.value, other, array)
