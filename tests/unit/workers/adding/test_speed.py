"""Which batch is large enough."""

from __future__ import annotations

import time

import pytest

from workers.adding.speed import Timing, best_batch, time_batches


def timings(**rates: float) -> list[Timing]:
    return [Timing(rows=int(name[1:]), run_s=int(name[1:]) / rate) for name, rate in rates.items()]


def test_the_smallest_batch_within_a_tenth_of_the_best_is_enough() -> None:
    assert best_batch(timings(r1=100, r2=150, r4=181, r8=200, r16=199)) == 4


def test_where_larger_batches_gain_nothing_one_row_is_enough() -> None:
    assert best_batch(timings(r1=100, r2=101, r4=80)) == 1


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
