"""How fast a model answers in batches of each size, and which size is enough."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from workers.error_text import one_line

SIZES: Final = (1, 2, 4, 8, 16, 32)

#: A batch is large enough when its rate is so near the best one.
_NEAR_BEST: Final = 0.9

#: How long each size is timed, and how often at least: the fastest run counts, and in this time a
#: small model has hundreds of them.
_TIMED_S: Final = 0.1
_TIMES: Final = 3

#: Larger batches are not tried once a run took so long: nobody waits for minutes.
_LONGEST_S: Final = 2.0


#: What a worker does around a run and for each job of it: claim, decode, answer. Measured on two
#: cores with Redis on the same machine; a server that is further away makes larger batches better.
AROUND_RUN_S: Final = 1.5e-3
AROUND_JOB_S: Final = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one run with so many rows takes."""

    rows: int
    run_s: float

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.run_s

    @property
    def jobs_per_s(self) -> float:
        """Return about how many jobs of one row a worker answers in runs of this size."""
        return self.rows / (self.run_s + AROUND_RUN_S + self.rows * AROUND_JOB_S)


def best_batch(timings: Sequence[Timing]) -> int:
    """Return the smallest batch in which a worker answers within a tenth of the most jobs/s."""
    enough = _NEAR_BEST * max(timing.jobs_per_s for timing in timings)
    return min(timing.rows for timing in timings if timing.jobs_per_s >= enough)


def time_batches(run: Callable[[int], object], *, most_rows: int) -> tuple[tuple[Timing, ...], str]:
    """Return what ``run`` takes with 1, 2, 4, ... rows, and why larger ones were not tried."""
    timings: list[Timing] = []
    for rows in (size for size in SIZES if size <= most_rows):
        if timings and timings[-1].run_s > _LONGEST_S:
            last = timings[-1]
            return tuple(timings), f"a run of {last.rows} rows took {last.run_s:.1f} s"
        try:
            run(rows)
            timings.append(Timing(rows=rows, run_s=min(_times(run, rows))))
        except Exception as error:
            if not timings:
                raise
            return tuple(timings), f"{rows} rows are refused: {one_line(error)}"
    return tuple(timings), ""


def _times(run: Callable[[int], object], rows: int) -> Iterator[float]:
    count, deadline = 0, time.perf_counter() + _TIMED_S
    while count < _TIMES or time.perf_counter() < deadline:
        began = time.perf_counter()
        run(rows)
        yield time.perf_counter() - began
        count += 1
