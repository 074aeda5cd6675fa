"""What is known of jobs while they are answered together, and how each of them ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from producer.contract.errors import FleetError
from workers.batching.ladder import Rung
from workers.batching.pieces import Batch
from workers.batching.shapes import ShapeKey
from workers.batching.stacking import Array
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
    """Jobs of one shape that are being answered together."""

    jobs: Sequence[Prepared]
    progress: Sequence[Progress]
    #: What decides how much memory a row takes, the same for all jobs here.
    sizes: ShapeKey

    def unfailed(self, pieces: Batch) -> Batch:
        """Return the pieces whose jobs can still be answered."""
        return tuple(piece for piece in pieces if self.progress[piece.job].error is None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One run that failed, and what was to follow it."""

    run: Batch
    rest: Batch
    rung: Rung
    error: Exception
