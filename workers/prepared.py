"""One job's inputs, checked against the model before they share a batch with others.

Arrays must have the model's dtype; JSON lists and numbers have none and are cast, as long as
nothing is lost. Messages name inputs, dtypes and shapes, never values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from producer.contract.errors import BadRequest
from workers.batching.padding import Padding
from workers.batching.shapes import ShapeKey, shape_key
from workers.batching.stacking import Array
from workers.models import TensorSpec
from workers.tables import nearest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The inputs of one job that fit the model."""

    arrays: Mapping[str, Array] = dataclasses.field(repr=False)
    rows: int
    #: Equal for jobs that may share a batch.
    shape_key: ShapeKey


def prepare(
    inputs: Mapping[str, object], tensors: Sequence[TensorSpec], *, exact: bool
) -> Prepared:
    """Return ``inputs`` as arrays for ``tensors``; ``BadRequest`` says what does not fit.

    A batch axis may have any size, since jobs are cut and stacked along it; unless ``exact``,
    for a model whose jobs run as they are.
    """
    if not isinstance(inputs, Mapping):
        raise BadRequest(f"inputs must map names to arrays, not be a {type(inputs).__name__}.")
    _check_names(inputs, [tensor.name for tensor in tensors])
    arrays = {tensor.name: _array(inputs[tensor.name], tensor, exact=exact) for tensor in tensors}
    axes = {tensor.name: tensor.batch_axis for tensor in tensors}
    return Prepared(
        arrays=arrays,
        rows=_rows(arrays, axes, exact=exact),
        shape_key=shape_key(arrays, axes),
    )


def check_lengths(arrays: Mapping[str, Array], padding: Padding) -> None:
    """Refuse inputs that belong together and differ in length: padded, nobody would notice."""
    lengths = padding.lengths(arrays)
    for names in padding.together:
        if len({lengths[name] for name in names}) > 1:
            told = ", ".join(f"{name} {lengths[name]}" for name in names)
            raise BadRequest(f"inputs that are padded together must be equally long: {told}.")


def _check_names(inputs: Mapping[str, object], known: Sequence[str]) -> None:
    for name in inputs:
        if name not in known:
            raise BadRequest(f"the model has no input {name!r:.80}.{nearest(str(name), known)}")
    for name in known:
        if name not in inputs:
            raise BadRequest(f"input {name!r} is missing; the model needs {', '.join(known)}.")


def _array(value: object, tensor: TensorSpec, *, exact: bool) -> Array:
    array = value if isinstance(value, np.ndarray | np.generic) else _cast(value, tensor)
    if array.dtype != np.dtype(tensor.dtype):
        raise BadRequest(
            f"input {tensor.name!r} must be {tensor.dtype}, not {array.dtype}; "
            f'convert it with .astype("{tensor.dtype}").'
        )
    _check_shape(array.shape, tensor, exact=exact)
    return np.asarray(array)


def _cast(value: object, tensor: TensorSpec) -> Array:
    """Return numbers as they come from JSON in the model's dtype."""
    wanted = np.dtype(tensor.dtype)
    if not isinstance(value, list | tuple | int | float):
        raise BadRequest(
            f"input {tensor.name!r} must be an array or nested lists of numbers, "
            f"not {type(value).__name__}."
        )
    try:
        given = np.asarray(value)
    except (ValueError, OverflowError):
        raise BadRequest(
            f"input {tensor.name!r} is no array: its nested lists differ in length, "
            "or hold numbers that are too large."
        ) from None
    if given.size and not _may_become(given, wanted):
        raise BadRequest(
            f"input {tensor.name!r} must hold numbers that fit {tensor.dtype}; "
            f"the lists hold {given.dtype}."
        )
    with np.errstate(over="ignore"):
        return given.astype(wanted)


def _may_become(given: Array, wanted: np.dtype[Any]) -> bool:
    """Return whether no number changes: neither a fraction nor a sign nor high bits are lost."""
    if wanted.kind == "b":
        return given.dtype.kind == "b"
    if wanted.kind == "f":
        return given.dtype.kind in "iuf"
    if given.dtype.kind not in "iu":
        return False
    limits = np.iinfo(wanted)
    return int(given.min()) >= limits.min and int(given.max()) <= limits.max


def _check_shape(shape: tuple[int, ...], tensor: TensorSpec, *, exact: bool) -> None:
    fits = len(shape) == len(tensor.shape) and all(
        wanted is None or size == wanted or (axis == tensor.batch_axis and not exact)
        for axis, (size, wanted) in enumerate(zip(shape, tensor.shape, strict=True))
    )
    if not fits:
        wanted = shape_text(tensor, exact=exact)
        raise BadRequest(f"input {tensor.name!r} must have shape {wanted}, not {list(shape)}.")
    # Some runtimes abort the process on arrays that hold nothing.
    if 0 in shape:
        raise BadRequest(f"input {tensor.name!r} holds no rows or no elements: {list(shape)}.")


def _rows(arrays: Mapping[str, Array], axes: Mapping[str, int | None], *, exact: bool) -> int:
    rows = {name: arrays[name].shape[axis] for name, axis in axes.items() if axis is not None}
    if len(set(rows.values())) > 1 and not exact:
        raise BadRequest(f"inputs must have equally many rows; they have {rows}.")
    return next(iter(rows.values()), 1)


def shape_text(tensor: TensorSpec, *, exact: bool = False) -> str:
    """Return a shape for people: ``[rows, 1, 8, 8]``; ``exact`` where the engine fixes the rows."""
    sizes = (
        "rows"
        if axis == tensor.batch_axis and (size is None or not exact)
        else "any"
        if size is None
        else str(size)
        for axis, size in enumerate(tensor.shape)
    )
    return f"[{', '.join(sizes)}]"
