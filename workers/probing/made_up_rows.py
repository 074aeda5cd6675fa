"""Rows made up to try a model with, before any job has sent it one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from zlib import crc32

import numpy as np

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
                tensor.name: values_of(tensor, hints.get(tensor.name, ProbeHint()), shape, row)
                for tensor, shape in zip(inputs, shapes, strict=True)
            }
            for row in range(len(_ROW_SCALES))
        ]


def _shape(tensor: TensorSpec, hint: ProbeHint, free: int) -> tuple[int, ...]:
    """Return the shape of one row: given, or with ``free`` for every axis of any size."""
    if hint.shape is not None:
        return hint.shape
    return tuple(
        size if size is not None else 1 if axis == tensor.batch_axis else free
        for axis, size in enumerate(tensor.shape)
    )


def values_of(tensor: TensorSpec, hint: ProbeHint, shape: tuple[int, ...], row: int) -> Array:
    """Return values an engine is likely to take: small, the same each time, unlike other rows'."""
    dtype, least = np.dtype(tensor.dtype), hint.least or 0
    if tensor.batch_axis is None:
        return np.full(shape, hint.largest, dtype)
    rng = np.random.default_rng((crc32(tensor.name.encode()), row))
    if dtype.kind == "f":
        span = (hint.largest - least) * _ROW_SCALES[row % 2]
        return (least + rng.random(shape) * span).astype(dtype)
    most = max(1, int(hint.largest)) if hint.least is None else int(hint.largest)
    least = min(math.ceil(least if dtype.kind == "i" else max(0, least)), most)
    values = rng.integers(least, most, shape, endpoint=True)
    values.flat[0] = min(least + row % 2, most)
    return values.astype(dtype)
