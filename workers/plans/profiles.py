"""Optimization profiles: which shapes a plan is made for. Pure arithmetic on sizes.

Where every row stands for itself a profile has one number of rows: its kernels are chosen for
exactly that, and a smaller batch is padded to it. Where rows may belong together, padding would
change answers, so one profile takes any number of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from producer.contract.errors import ConfigError
from workers.models import ModelSpec
from workers.plans.options import ShapeRange
from workers.tables import nearest

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """The shapes that a profile takes for one input: the least, the usual and the largest."""

    least: Shape
    usual: Shape
    largest: Shape


#: The range of each input by name.
Profile = Mapping[str, Range]

#: An input's shape in the ONNX file; ``None`` where it is free.
Inputs = Mapping[str, tuple[int | None, ...]]


def profiles(spec: ModelSpec, inputs: Inputs, outputs: Sequence[str]) -> list[Profile]:
    """Return the profiles of one model, smallest first; none where no size is free.

    ConfigError for an axis that is free and that the model's file says nothing of.
    """
    _check_names(spec, inputs)
    if all(None not in shape for shape in inputs.values()):
        return []
    counts = [(rows, rows) for rows in row_counts(spec)]
    if not rows_are_apart(spec, inputs, outputs):
        counts = [(1, spec.max_batch_size)]
    made = [
        {name: _range(spec, name, shape, least=least, most=most) for name, shape in inputs.items()}
        for least, most in counts
    ]
    # A batch axis that the file fixes makes the same profile for every number of rows.
    return [profile for place, profile in enumerate(made) if profile not in made[:place]]


def _check_names(spec: ModelSpec, inputs: Inputs) -> None:
    """Refuse a name that the file has no input of: TensorRT takes a profile for it in silence."""
    for name in (*spec.shape_ranges, *spec.batch_axes_in, *spec.probe_hints):
        if name not in inputs:
            raise ConfigError(
                f"{spec.name}: the model has no input {name!r}.{nearest(name, inputs)}"
            )


def row_counts(spec: ModelSpec) -> tuple[int, ...]:
    """Return the batch sizes that have kernels of their own: one row, and the upper quarters."""
    most = spec.max_batch_size
    return spec.plans.rows or tuple(sorted({1, max(1, most // 4), max(1, most // 2), most}))


def rows_are_apart(spec: ModelSpec, inputs: Inputs, outputs: Sequence[str]) -> bool:
    """Return whether the model's file says of every tensor what its rows are.

    The load-time probe then holds it to that, so a padded row cannot reach another's answer.
    """
    declared = all(name in spec.batch_axes_in for name, shape in inputs.items() if shape)
    return declared and all(spec.batch_axes_out.get(name) is not None for name in outputs)


def _range(
    spec: ModelSpec, name: str, shape: tuple[int | None, ...], *, least: int, most: int
) -> Range:
    axis = batch_axis(spec, name, shape)
    small, usual, large = _row_shapes(spec, name, shape, axis)
    if axis is None or shape[axis] is not None:
        return Range(small, usual, large)
    return Range(
        _with_rows(small, axis, least), _with_rows(usual, axis, most), _with_rows(large, axis, most)
    )


def batch_axis(spec: ModelSpec, name: str, shape: tuple[int | None, ...]) -> int | None:
    """Return the axis of an input that counts rows, declared or assumed to be the first."""
    axis = spec.batch_axes_in.get(name, 0 if shape else None)
    if axis is not None and axis >= len(shape):
        raise ConfigError(
            f"{spec.name}: input {name!r} has {len(shape)} axes; batch_axis {axis} is not among "
            "them."
        )
    return axis


def _row_shapes(
    spec: ModelSpec, name: str, shape: tuple[int | None, ...], axis: int | None
) -> tuple[Shape, Shape, Shape]:
    """Return the least, the usual and the largest shape of one row."""
    hint = spec.probe_hints.get(name)
    probed = hint.shape if hint is not None else None
    sizes = spec.shape_ranges.get(name) or _padded_sizes(spec, name, shape, probed)
    if sizes is None:
        free = [place for place, size in enumerate(shape) if size is None and place != axis]
        if free and probed is None:
            raise ConfigError(
                f"{spec.name}: axis {free[0]} of input {name!r} may have any size, and TensorRT "
                f"makes plans for a range of them: write min_shape and max_shape below "
                f"[inputs.{name}], each the whole shape of one row; or serve it with runtime = "
                '"onnxruntime-cuda".'
            )
        fixed = probed or tuple(1 if size is None else size for size in shape)
        rows = (fixed, fixed, fixed)
    else:
        usual = probed if probed and _lies_in(probed, sizes.least, sizes.largest) else sizes.largest
        rows = (sizes.least, usual, sizes.largest)
    for row in rows:
        _check_fits(spec, name, shape, row, axis)
    return rows


def _padded_sizes(
    spec: ModelSpec, name: str, shape: tuple[int | None, ...], probed: Shape | None
) -> ShapeRange | None:
    """Return the sizes of an input whose one free axis is padded: up to the largest of them."""
    pad = spec.pads.get(name)
    axis = batch_axis(spec, name, shape)
    free = [place for place, size in enumerate(shape) if size is None and place != axis]
    if pad is None or not pad.to or (probed is None and free != [pad.axis]):
        return None
    fixed = probed or tuple(1 if size is None else size for size in shape)
    least, largest = (
        (*fixed[: pad.axis], size, *fixed[pad.axis + 1 :]) for size in (1, pad.to[-1])
    )
    return ShapeRange(least=least, largest=largest)


def _lies_in(shape: Shape, least: Shape, largest: Shape) -> bool:
    return len(shape) == len(least) and all(
        low <= size <= high for low, size, high in zip(least, shape, largest, strict=True)
    )


def _check_fits(
    spec: ModelSpec, name: str, shape: tuple[int | None, ...], row: Shape, axis: int | None
) -> None:
    fits = len(row) == len(shape) and all(
        known is None or place == axis or known == size
        for place, (known, size) in enumerate(zip(shape, row, strict=True))
    )
    if not fits:
        known = ["any" if size is None else size for size in shape]
        raise ConfigError(
            f"{spec.name}: input {name!r} has shape {known}; a row of {list(row)} does not fit it."
        )


def _with_rows(row: Shape, axis: int, rows: int) -> Shape:
    return (*row[:axis], rows, *row[axis + 1 :])
