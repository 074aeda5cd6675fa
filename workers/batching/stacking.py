"""Putting rows of several jobs into one array, and an output back into rows of each job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from workers.batching.pieces import Piece

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, Array]

_AS_THEY_ARE: Final[Mapping[str, Callable[[Array], Array]]] = MappingProxyType({})


def rows_between(array: Array, axis: int, start: int, stop: int) -> Array:
    """Return rows ``start`` to ``stop`` as a view."""
    return array[(*[slice(None)] * axis, slice(start, stop))]


def stack(
    jobs: Sequence[Arrays],
    pieces: Sequence[Piece],
    batch_axes: Mapping[str, int | None],
    widen: Mapping[str, Callable[[Array], Array]] = _AS_THEY_ARE,
) -> dict[str, Array]:
    """Return the inputs of one run. Inputs without a batch axis are equal in all its jobs.

    ``widen``: what makes the rows of an input as long as those of other jobs.
    """
    feeds: dict[str, Array] = {}
    for name, axis in batch_axes.items():
        if axis is None:
            feeds[name] = jobs[pieces[0].job][name]
            continue
        rows = [rows_between(jobs[p.job][name], axis, p.start, p.stop) for p in pieces]
        if name in widen:
            rows = [widen[name](part) for part in rows]
        feeds[name] = rows[0] if len(rows) == 1 else np.concatenate(rows, axis=axis)
    return feeds


def split(
    outputs: Arrays, pieces: Sequence[Piece], batch_axes: Mapping[str, int | None]
) -> list[dict[str, Array]]:
    """Return the outputs of each piece; an output without a batch axis goes to all of them.

    ``ValueError`` when an output does not hold one row for each row that went in.
    """
    rows = sum(piece.rows for piece in pieces)
    answers: list[dict[str, Array]] = [{} for _ in pieces]
    for name, array in outputs.items():
        axis = batch_axes[name]
        if axis is not None and (array.ndim <= axis or array.shape[axis] != rows):
            raise ValueError(
                f"output {name!r} has shape {array.shape} for {rows} rows on axis {axis}"
            )
        start = 0
        for piece, answer in zip(pieces, answers, strict=True):
            stop = start + piece.rows
            answer[name] = array if axis is None else rows_between(array, axis, start, stop)
            start = stop
    return answers


def join(parts: Sequence[Arrays], batch_axes: Mapping[str, int | None]) -> dict[str, Array]:
    """Return the answers to the parts of one job as the answer to the job."""
    if len(parts) == 1:
        return dict(parts[0])
    return {
        name: array
        if (axis := batch_axes[name]) is None
        else np.concatenate([part[name] for part in parts], axis=axis)
        for name, array in parts[0].items()
    }
