"""What is known of jobs while they are answered together, and how each of them ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from producer.contract.errors import EngineFailed, FleetError, OutOfMemory
from workers.batching.grouping import grouped
from workers.batching.ladder import Rung
from workers.batching.limits import RunLimits
from workers.batching.padding import Fill, Padding
from workers.batching.pieces import Batch
from workers.batching.shapes import ShapeKey, sizes_of
from workers.batching.stacking import Array, join
from workers.prepared import Prepared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one job ended: with outputs or with an error."""

    #: By name; behind a `postprocess` whatever it returned. None where `error` says why.
    outputs: Any = dataclasses.field(repr=False)
    error: FleetError | None
    #: The precision that answered; for a cut job the last one that the ladder led to.
    precision: str
    #: Rows in the run that answered; for a cut job the largest of its runs.
    batch_size: int
    #: Runs with rows of this job that ran out of memory.
    out_of_memory: int
    #: Time in the engine, of all runs with rows of this job.
    compute_s: float
    #: Answers with rows of this job that were not finite, in a lower precision.
    non_finite: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Progress:
    """What is known so far about one job."""

    precision: str
    parts: dict[int, dict[str, Array]] = dataclasses.field(default_factory=dict)
    error: FleetError | None = None
    batch_size: int = 0
    out_of_memory: int = 0
    compute_s: float = 0.0
    non_finite: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Jobs that are being answered together, in one shape."""

    jobs: Sequence[Prepared]
    progress: Sequence[Progress]
    #: In how many parts each may be cut.
    units: Sequence[int]
    #: What decides how much memory a row takes, the same for all jobs here.
    sizes: ShapeKey
    #: Rows that one run may hold.
    limit: int
    #: What makes inputs as long as that shape wants them.
    fills: Mapping[str, Fill]

    def unfailed(self, pieces: Batch) -> Batch:
        """Return the pieces whose jobs can still be answered."""
        return tuple(piece for piece in pieces if self.progress[piece.job].error is None)


def works(
    jobs: Sequence[Prepared],
    progress: Sequence[Progress],
    *,
    limits: RunLimits,
    padding: Padding,
    whole: bool,
) -> Iterator[Work]:
    """Yield every job once, with those it may share a run with. ``whole``: no job is cut."""
    keys, units = [job.shape_key for job in jobs], [1 if whole else job.rows for job in jobs]
    for group in grouped(keys, units, limits=limits, padding=padding):
        yield Work(
            jobs=[jobs[position] for position in group.jobs],
            progress=[progress[position] for position in group.jobs],
            units=[units[position] for position in group.jobs],
            sizes=sizes_of(group.key),
            limit=limits.rows(group.key),
            fills=padding.fills(group.key),
        )


def outcome(model: str, done: Progress, batch_axes: Mapping[str, int | None]) -> Outcome:
    """Return how a job ended, its parts joined."""
    outputs, error = None, done.error
    if error is None:
        try:
            outputs = join([done.parts[start] for start in sorted(done.parts)], batch_axes)
        except MemoryError:
            error = OutOfMemory(f"{model}: the joined answer does not fit in memory.")
        except ValueError as problem:
            error = EngineFailed(f"{model}: the parts do not join: {problem}")
    return Outcome(
        outputs=outputs,
        error=error,
        precision=done.precision,
        batch_size=done.batch_size,
        out_of_memory=done.out_of_memory,
        compute_s=done.compute_s,
        non_finite=done.non_finite,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run that failed, and what was to follow it."""

    run: Batch
    rest: Batch
    rung: Rung
    error: Exception
