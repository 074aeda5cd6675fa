"""Which jobs of a claim run together: those of one shape, and those that padding makes alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

from workers.batching.limits import RunLimits, row_elements
from workers.batching.padding import Padding
from workers.batching.shapes import ShapeKey, groups

#: Where the longest job of a run decides, it may make a run so many times as large as it was.
_MOST_GROWN: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs that run in one shape."""

    #: Their positions.
    jobs: tuple[int, ...]
    #: The shape they run in.
    key: ShapeKey


def grouped(
    keys: Sequence[ShapeKey], rows: Sequence[int], *, limits: RunLimits, padding: Padding
) -> Iterator[Group]:
    """Yield every job once, with those it may share a run with.

    Without padding, and where the model's file lists the sizes to pad to, that is by shape. Else
    long jobs go with long ones, as far as one run goes and no more than half of it is padding.
    """
    padded = [padding.rounded(key) for key in keys]
    for alike in groups(padding.opened(key) for key in padded):
        if len({padded[job] for job in alike}) == 1:
            yield Group(jobs=tuple(alike), key=padded[alike[0]])
        else:
            yield from _by_length(alike, padded, rows, limits=limits, padding=padding)


def _by_length(
    alike: Sequence[int],
    keys: Sequence[ShapeKey],
    rows: Sequence[int],
    *,
    limits: RunLimits,
    padding: Padding,
) -> Iterator[Group]:
    """Yield jobs that differ in length alone, the longest first, a run at a time."""
    jobs: list[int] = []
    shape, count, own = keys[alike[0]], 0, 0
    for job in sorted(alike, key=lambda job: -row_elements(keys[job])):
        wider = padding.longest(shape, keys[job]) if jobs else keys[job]
        more, owns = count + rows[job], own + rows[job] * row_elements(keys[job])
        fits = more <= limits.rows(wider) and more * row_elements(wider) <= _MOST_GROWN * owns
        if jobs and not fits:
            yield Group(jobs=tuple(jobs), key=shape)
            jobs, wider = [], keys[job]
            more, owns = rows[job], rows[job] * row_elements(wider)
        jobs.append(job)
        shape, count, own = wider, more, owns
    yield Group(jobs=tuple(jobs), key=shape)
