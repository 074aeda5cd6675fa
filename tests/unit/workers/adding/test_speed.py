"""Which batch is large enough."""

from __future__ import annotations

import time

import pytest

from workers.adding.speed import Timing, best_batch, time_batches


def timings(**rates: float) -> list[Timing]:
    return [Timing(rows=int(name[1:]), run_s=int(name[1:]) / rate) for name, rate in rates.items()]


def test_the_smallest_batch_within_a_tenth_of_the_best_is_enough() -> None:
    assert best_batch(timings(r1=10, r2=15, r4=18.1, r8=20, r16=19.9)) == 4


def test_what_a_worker_does_around_a_run_is_shared_by_the_rows_of_it() -> None:
    # The engine alone gains nothing; but a run of 0.05 ms is little beside what is around it.
    assert best_batch(timings(r1=20_000, r8=20_000, r16=20_000, r32=20_000)) == 32


def test_where_larger_batches_gain_nothing_one_row_is_enough() -> None:
    assert best_batch(timings(r1=10, r2=10.1, r4=8)) == 1


def test_sizes_up_to_the_most_are_timed_by_their_fastest_run() -> None:
    found, untimed = time_batches(lambda rows: time.sleep(0.001 * rows), most_rows=4)

    assert [timing.rows for timing in found] == [1, 2, 4]
    assert all(timing.run_s >= 0.001 * timing.rows for timing in found)
    assert untimed == ""


def test_a_size_that_is_refused_ends_the_timing_and_says_why() -> None:
    def run(rows: int) -> None:
        if rows > 2:
            raise ValueError("two at most")

    found, untimed = time_batches(run, most_rows=32)

    assert [timing.rows for timing in found] == [1, 2]
    assert untimed == "4 rows are refused: ValueError: two at most"


def test_one_row_that_is_refused_is_no_timing_at_all() -> None:
    def run(rows: int) -> None:
        raise ValueError(f"{rows}")

    with pytest.raises(ValueError, match="1"):
        time_batches(run, most_rows=32)
