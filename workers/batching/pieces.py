"""How jobs are cut into runs of at most N rows, and a run into halves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some rows of one job."""

    #: The job's position among the jobs that run together.
    job: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


Batch: TypeAlias = tuple[Piece, ...]


def rows_of(batch: Sequence[Piece]) -> int:
    return sum(piece.rows for piece in batch)


def whole_jobs(rows: Sequence[int]) -> Batch:
    """Return one uncut piece for each job."""
    return tuple(Piece(job=job, start=0, stop=count) for job, count in enumerate(rows))


def take(pieces: Sequence[Piece], limit: int) -> tuple[Batch, Batch]:
    """Return the first run of at most ``limit`` rows, and what is left.

    A job is cut only when it is larger than a run; it then fills the run it starts in.
    """
    batch: list[Piece] = []
    room = limit
    for position, piece in enumerate(pieces):
        if piece.rows <= room:
            batch.append(piece)
            room -= piece.rows
            continue
        rest = tuple(pieces[position:])
        if piece.rows > limit and room > 0:
            cut = piece.start + room
            batch.append(dataclasses.replace(piece, stop=cut))
            rest = (dataclasses.replace(piece, start=cut), *rest[1:])
        return tuple(batch), rest
    return tuple(batch), ()


def halves(batch: Sequence[Piece]) -> tuple[Batch, Batch]:
    """Return a batch of several pieces as two, neither empty; pieces stay whole."""
    middle = len(batch) // 2
    return tuple(batch[:middle]), tuple(batch[middle:])


def jobs_in(batch: Sequence[Piece]) -> tuple[int, ...]:
    """Return the jobs that have rows in ``batch``, each once, in order."""
    return tuple(dict.fromkeys(piece.job for piece in batch))
