"""How the largest batch known to fit is learned, and how slowly it grows back: pure decisions.

A batch that ran out of memory halves its ceiling at once. What was too much may fit later, when
others on the same device are gone; that is tried rarely, because each try that fails costs a run:
after `GROW_AFTER_RUNS` full runs and `GROW_AFTER_S`, by a quarter, and after each try that failed
only when twice as much time has passed.
"""

from __future__ import annotations

import dataclasses
from typing import Final

#: Runs of as many rows as the ceiling allows that must fit before more is tried.
GROW_AFTER_RUNS: Final = 100

#: How long a ceiling must have stood before more is tried.
GROW_AFTER_S: Final = 600.0

#: The same after many tries that failed.
LONGEST_GROW_AFTER_S: Final = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most rows of one shape that are known to fit in one precision."""

    #: 0: not even one row fits.
    rows: int
    #: When this was found out, or when more was last tried.
    since_unix_s: float
    #: How often it was raised: whoever knows of more raises knows better.
    raised: int = 0
    #: Tries of more that failed since it was last raised.
    failed: int = 0


def lowered(before: Ceiling | None, *, failed_rows: int, now_unix_s: float) -> Ceiling:
    """Return the ceiling after ``failed_rows`` did not fit.

    Half of them are expected to. Where fewer than those were known to fit, more was only tried,
    and the ceiling stays what it was.
    """
    if before is None:
        return Ceiling(rows=failed_rows // 2, since_unix_s=now_unix_s)
    if failed_rows > before.rows:
        return dataclasses.replace(before, since_unix_s=now_unix_s, failed=before.failed + 1)
    return dataclasses.replace(before, rows=failed_rows // 2, since_unix_s=now_unix_s)


def raised(before: Ceiling | None, *, rows: int, now_unix_s: float) -> Ceiling:
    """Return the ceiling after ``rows``, more than were known to, did fit."""
    times = before.raised + 1 if before is not None else 0
    return Ceiling(rows=rows, since_unix_s=now_unix_s, raised=times)


def may_grow(ceiling: Ceiling, *, full_runs: int, now_unix_s: float) -> bool:
    """Return whether more than the ceiling should be tried, after so many runs that filled it."""
    waits_s = min(LONGEST_GROW_AFTER_S, GROW_AFTER_S * 2.0 ** min(ceiling.failed, 16))
    stood = now_unix_s - ceiling.since_unix_s >= waits_s
    return stood and (full_runs >= GROW_AFTER_RUNS or ceiling.rows == 0)


def grown_rows(ceiling: Ceiling) -> int:
    """Return how many rows are tried next: a quarter more, at least one."""
    return ceiling.rows + max(1, ceiling.rows // 4)


def merged(mine: Ceiling, theirs: Ceiling) -> Ceiling:
    """Return what two instances of one kind know together: the last raise, else the fewer rows."""
    if mine.raised != theirs.raised:
        return max(mine, theirs, key=lambda ceiling: ceiling.raised)
    fewer = min(mine, theirs, key=lambda ceiling: ceiling.rows)
    return dataclasses.replace(
        fewer,
        since_unix_s=max(mine.since_unix_s, theirs.since_unix_s),
        failed=max(mine.failed, theirs.failed),
    )
