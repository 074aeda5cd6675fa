"""The load-time probe: whether rows of different jobs may share a run of an engine.

A dynamic first axis is not always the batch, and it can lie. So one row is run twice, another
one once, then both together; only if shapes and values agree may rows share a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias
from zlib import crc32

import numpy as np

from producer.contract.errors import ConfigError, EngineFailed, OutOfMemory
from workers.batching.pieces import Piece
from workers.batching.stacking import Array, split, stack
from workers.error_text import one_line
from workers.models import ModelSpec, TensorSpec
from workers.tables import nearest
from workers.tensor_tables import ProbeHint

#: Tried in turn for axes of any size, until one row runs.
_FREE_SIZES: Final = (16, 8, 32, 64, 224, 1)

#: Rows differ in range as well, which shows what scales by the largest value of a batch.
_ROW_SCALES: Final = (1.0, 0.25)

#: How much coarser answers below single precision may be between batch sizes.
_COARSE_FACTOR: Final = 10

#: Answers smaller than this are compared as if they were this large.
_SMALLEST_SCALE: Final = 1e-3

_ONE: Final = (Piece(job=0, start=0, stop=1),)
_TWO: Final = (Piece(job=0, start=0, stop=1), Piece(job=1, start=0, stop=1))


#: Runs an engine once.
Run: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How rows may share a run."""

    max_rows: int
    #: Why that is less than the model's file asks for; empty when it is not.
    why: str = ""
    #: A job runs alone and uncut, because its rows may belong together.
    whole: bool = False
    #: The made-up row that ran.
    row: Mapping[str, Array] = dataclasses.field(default_factory=dict, repr=False, compare=False)


def declared(
    tensors: Sequence[TensorSpec], axes: Mapping[str, int | None], *, side: str, model: str
) -> tuple[TensorSpec, ...]:
    """Return ``tensors`` with the batch axes that the model's file declares."""
    known = [tensor.name for tensor in tensors]
    for name, axis in axes.items():
        if name not in known:
            raise ConfigError(f"{model}: the model has no {side} {name!r}.{nearest(name, known)}")
        rank = len(tensors[known.index(name)].shape)
        if axis is not None and axis >= rank:
            raise ConfigError(
                f"{model}: {side} {name!r} has {rank} axes; batch_axis {axis} is not among them."
            )
    return tuple(
        dataclasses.replace(tensor, batch_axis=axes.get(tensor.name, tensor.batch_axis))
        for tensor in tensors
    )


def probe(
    run: Run,
    spec: ModelSpec,
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    precision: str,
) -> Batching:
    """Return how rows may share a run of an engine, found out by running it.

    ``EngineFailed`` when not even one row runs: such a model would fail every job.
    """
    rows, first = _first_answer(run, spec, inputs, precision)
    found = _batching(run, spec, rows, first, inputs=inputs, outputs=outputs, precision=precision)
    return dataclasses.replace(found, row=rows[0])


def _batching(
    run: Run,
    spec: ModelSpec,
    rows: Sequence[Mapping[str, Array]],
    first: Mapping[str, Array],
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    precision: str,
) -> Batching:
    """Return how rows may share a run, given two and the answer to the first."""
    axes_in = {tensor.name: tensor.batch_axis for tensor in inputs}
    axes_out = {tensor.name: tensor.batch_axis for tensor in outputs}
    unsure = _why_one_job(inputs, axes_in) or _why_not_rows(
        first, run(rows[0]), axes_out, tolerance=_tolerance(spec, precision)
    )
    if unsure:
        return Batching(max_rows=1, why=unsure, whole=True)
    if fixed := [tensor.name for tensor in inputs if _batch_size(tensor) == 1]:
        return Batching(max_rows=1, why=f"input {fixed[0]!r} takes exactly one row")
    try:
        alone = (first, run(rows[1]))
        both = run(stack(rows, _TWO, axes_in))
    except OutOfMemory:
        return Batching(max_rows=1, why="two rows do not fit in memory")
    except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
        return Batching(max_rows=1, why=f"two rows are refused: {one_line(error)}")
    if why := _why_not_together(alone, both, axes_out, tolerance=_tolerance(spec, precision)):
        # Without a declaration this axis may be time or nodes, so a job is not cut.
        sure = all(name in spec.batch_axes_in for name in axes_in)
        return Batching(max_rows=1, why=why, whole=not sure)
    return Batching(max_rows=spec.max_batch_size)


def strictest(found: Sequence[Batching]) -> Batching:
    """Return what holds for all engines of a model, since any of them may answer a batch."""
    least = min(found, key=lambda batching: (not batching.whole, batching.max_rows))
    return dataclasses.replace(least, max_rows=min(batching.max_rows for batching in found))


def _tolerance(spec: ModelSpec, precision: str) -> float:
    return spec.tolerance * (1 if precision == "fp32" else _COARSE_FACTOR)


def _why_one_job(inputs: Sequence[TensorSpec], axes: Mapping[str, int | None]) -> str:
    """Return why a run holds one job, as far as the inputs' shapes tell."""
    if all(axis is None for axis in axes.values()):
        return "no input has a batch axis"
    for tensor in inputs:
        size = _batch_size(tensor)
        if size is not None and size > 1:
            return (
                f"axis {tensor.batch_axis} of input {tensor.name!r} is fixed at {size}; if another "
                "axis counts rows, declare it as batch_axis"
            )
    return ""


def _why_not_rows(
    answer: Mapping[str, Array],
    again: Mapping[str, Array],
    axes: Mapping[str, int | None],
    *,
    tolerance: float,
) -> str:
    """Return why answers to one row, given twice, cannot be compared or cut."""
    if differs := _difference(answer, again, tolerance=tolerance):
        return f"the same row is answered differently each time: {differs}"
    try:
        split(answer, _ONE, axes)
    except ValueError as error:
        return str(error)
    return ""


def _why_not_together(
    alone: Sequence[Mapping[str, Array]],
    both: Mapping[str, Array],
    axes: Mapping[str, int | None],
    *,
    tolerance: float,
) -> str:
    """Return why the answer to two rows is not the two answers to one row each."""
    try:
        parts = split(both, _TWO, axes)
    except ValueError as error:
        return str(error)
    for expected, part in zip(alone, parts, strict=True):
        if differs := _difference(expected, part, tolerance=tolerance):
            return f"rows influence each other: {differs}"
    return ""


def _difference(
    alone: Mapping[str, Array], shared: Mapping[str, Array], *, tolerance: float
) -> str:
    """Return in words how an answer changed, or nothing when it did not."""
    for name, expected in alone.items():
        found = shared[name]
        if found.shape != expected.shape:
            return f"output {name!r} has shape {list(found.shape)}, not {list(expected.shape)}"
        if expected.dtype.kind != "f":
            if not np.array_equal(found, expected):
                return f"output {name!r} changes"
            continue
        finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
        scale = max(_SMALLEST_SCALE, float(finite.max(initial=0.0)))
        if not np.allclose(found, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
            return f"output {name!r} changes by more than {tolerance:g} of its largest value"
    return ""


def _first_answer(
    run: Run, spec: ModelSpec, inputs: Sequence[TensorSpec], precision: str
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Return two probe rows and the answer to the first, in the first size that runs."""
    refusal: Exception | None = None
    for rows in _rows_to_try(inputs, spec.probe_hints):
        try:
            return rows, run(rows[0])
        except (OutOfMemory, MemoryError) as error:
            raise EngineFailed(
                f"{spec.name}: one row does not fit in memory in {precision}: {one_line(error)}"
            ) from error
        except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
            refusal = refusal or error
    assert refusal is not None
    raise EngineFailed(
        f"{spec.name}: {precision} refuses one row of made-up values; give probe_shape and "
        f"probe_max below [inputs.<name>] if it needs others. {one_line(refusal)}"
    ) from refusal


def _rows_to_try(
    inputs: Sequence[TensorSpec], hints: Mapping[str, ProbeHint]
) -> Iterator[list[dict[str, Array]]]:
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
        return (rng.random(shape) * hint.largest * _ROW_SCALES[row]).astype(dtype)
    values = rng.integers(0, max(1, int(hint.largest)), shape, endpoint=True)
    values.flat[0] = row
    return values.astype(dtype)


def _batch_size(tensor: TensorSpec) -> int | None:
    """Return the size that the engine fixes for the batch axis, if it does."""
    return None if tensor.batch_axis is None else tensor.shape[tensor.batch_axis]
