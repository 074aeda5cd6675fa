"""Which jobs may share a batch: the key of a job's arrays, and jobs grouped by it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt


class TensorKey(NamedTuple):
    """What two jobs must have in common in one input."""

    name: str
    dtype: str
    #: Without the batch axis.
    shape: tuple[int, ...]
    #: The value itself, as a digest, for an input that has no batch axis.
    value: bytes


ShapeKey: TypeAlias = tuple[TensorKey, ...]


def shape_key(
    arrays: Mapping[str, npt.NDArray[Any]], batch_axes: Mapping[str, int | None]
) -> ShapeKey:
    """Return what the arrays of all jobs in one batch have in common."""
    return tuple(_tensor_key(name, arrays[name], batch_axes[name]) for name in sorted(arrays))


def sizes_of(key: ShapeKey) -> ShapeKey:
    """Return ``key`` without values: what decides how much memory a row takes."""
    return tuple(tensor._replace(value=b"") for tensor in key)


def groups(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the positions of equal keys, groups and positions in the order they came."""
    found: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        found.setdefault(key, []).append(position)
    return list(found.values())


def _tensor_key(name: str, array: npt.NDArray[Any], batch_axis: int | None) -> TensorKey:
    if batch_axis is None:
        digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()
        return TensorKey(name, array.dtype.str, array.shape, digest)
    return TensorKey(name, array.dtype.str, _without(array.shape, batch_axis), b"")


def _without(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])
