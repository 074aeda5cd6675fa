"""Rows made up to try a model with, before any job has sent it one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from zlib import crc32

import numpy as np

from workers.batching.padding import Pad
from workers.batching.stacking import Array
from workers.models import TensorSpec
from workers.tensor_tables import ProbeHint

#: Tried in turn for axes of any size, until one row runs.
_FREE_SIZES: Final = (16, 8, 32, 64, 224, 1)

#: Rows differ in range as well, which shows what scales by the largest value of a batch.
_ROW_SCALES: Final = (1.0, 0.25)


def rows_to_try(
    inputs: Sequence[TensorSpec], hints: Mapping[str, ProbeHint]
) -> Iterator[list[dict[str, Array]]]:
    """Yield two rows of each shape that may be one of the model's."""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for free in _FREE_SIZES:
        shapes = tuple(_shape(t, hints.get(t.name, ProbeHint()), free) for t in inputs)
        if shapes in seen:
            continue
        seen.add(shapes)
        yield [
            {
                tensor.name: _values(tensor, hints.get(tensor.name, ProbeHint()), shape, row)
                for tensor, shape in zip(inputs, shapes, strict=True)
            }
            for row in range(len(_ROW_SCALES))
        ]


def rows_unlike_padding(
    inputs: Sequence[TensorSpec],
    hints: Mapping[str, ProbeHint],
    like: Mapping[str, Array],
    pads: Mapping[str, Pad],
    *,
    count: int,
) -> Iterator[list[dict[str, Array]]]:
    """Yield rows shaped as ``like`` without any value that padding has; then, where numbers may be
    negative, some that are: a largest value that is positive would hide a padding of zeros.
    """
    rows = [
        {
            tensor.name: _values(
                tensor, hints.get(tensor.name, ProbeHint()), like[tensor.name].shape, row
            )
            for tensor in inputs
        }
        for row in range(count)
    ]
    for name, pad in pads.items():
        for row in rows:
            row[name] = _unlike(row[name], pad.value)
    yield rows
    signed = [name for name in pads if like[name].dtype.kind == "f"]
    if signed:
        yield [{**row, **{name: -row[name] for name in signed}} for row in rows]


def _unlike(array: Array, value: float) -> Array:
    """Return ``array`` with the least number that is not ``value`` in its place."""
    other = array.dtype.type(1 if value == 0 else 0)
    return np.where(array == value, other, array)


def _shape(tensor: TensorSpec, hint: ProbeHint, free: int) -> tuple[int, ...]:
    """Return the shape of one row: given, or with ``free`` for every axis of any size."""
    if hint.shape is not None:
        return hint.shape
    return tuple(
        size if size is not None else 1 if axis == tensor.batch_axis else free
        for axis, size in enumerate(tensor.shape)
    )


def _values(tensor: TensorSpec, hint: ProbeHint, shape: tuple[int, ...], row: int) -> Array:
    """Return values an engine is likely to take: small, the same each time, unlike other rows'."""
    dtype = np.dtype(tensor.dtype)
    if tensor.batch_axis is None:
        return np.full(shape, hint.largest, dtype)
    rng = np.random.default_rng((crc32(tensor.name.encode()), row))
    if dtype.kind == "f":
        return (rng.random(shape) * hint.largest * _ROW_SCALES[row % 2]).astype(dtype)
    values = rng.integers(0, max(1, int(hint.largest)), shape, endpoint=True)
    values.flat[0] = row % 2
    return values.astype(dtype)
