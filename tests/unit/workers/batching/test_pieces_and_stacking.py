"""However jobs are cut and stacked: no run exceeds its limit, and every row comes back once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batching.pieces import (
    Batch,
    Piece,
    halves,
    jobs_in,
    rows_of,
    take,
    whole_jobs,
)
from workers.batching.shapes import groups, shape_key, sizes_of
from workers.batching.stacking import Array, join, split, stack

ROWS = st.lists(st.integers(1, 70), min_size=1, max_size=12)


def runs_of(rows: list[int], limit: int) -> list[Batch]:
    runs, rest = [], whole_jobs(rows)
    while rest:
        run, rest = take(rest, limit)
        runs.append(run)
    return runs


@given(rows=ROWS, limit=st.integers(1, 40))
def test_runs_hold_every_row_once_in_order_and_never_too_many(rows: list[int], limit: int) -> None:
    runs = runs_of(rows, limit)

    assert all(0 < rows_of(run) <= limit for run in runs)
    taken = [(p.job, row) for run in runs for p in run for row in range(p.start, p.stop)]
    assert taken == [(job, row) for job, count in enumerate(rows) for row in range(count)]


@given(rows=ROWS, limit=st.integers(1, 40))
def test_only_jobs_larger_than_a_run_are_cut(rows: list[int], limit: int) -> None:
    pieces = [piece for run in runs_of(rows, limit) for piece in run]

    for job, count in enumerate(rows):
        if count <= limit:
            assert Piece(job=job, start=0, stop=count) in pieces


def test_a_large_job_fills_runs_and_shares_only_the_ends() -> None:
    runs = runs_of([2, 10, 3], 4)

    assert [[(p.job, p.start, p.stop) for p in run] for run in runs] == [
        [(0, 0, 2), (1, 0, 2)],
        [(1, 2, 6)],
        [(1, 6, 10)],
        [(2, 0, 3)],
    ]


@given(count=st.integers(2, 40))
def test_halves_lose_nothing_and_are_never_empty(count: int) -> None:
    batch = whole_jobs([1] * count)

    first, second = halves(batch)

    assert first + second == batch
    assert first
    assert second
    assert jobs_in(first) == tuple(range(len(first)))


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    limit=st.integers(1, 8),
    axis=st.integers(0, 2),
)
def test_what_was_stacked_and_split_joins_to_the_same_rows(
    rows: list[int], limit: int, axis: int
) -> None:
    axes = {"x": axis, "shared": None}
    rng = np.random.default_rng(0)
    shared = np.array(3.0)
    jobs: list[dict[str, Array]] = [
        {"x": np.moveaxis(rng.random((count, 2, 3)), 0, axis), "shared": shared} for count in rows
    ]
    parts: dict[int, list[dict[str, Array]]] = {job: [] for job in range(len(jobs))}

    for run in runs_of(rows, limit):
        for piece, answer in zip(run, split(stack(jobs, run, axes), run, axes), strict=True):
            parts[piece.job].append(answer)

    for job, given_rows in enumerate(jobs):
        joined = join(parts[job], axes)
        np.testing.assert_array_equal(joined["x"], given_rows["x"])
        assert joined["shared"] is shared


def test_an_output_with_other_rows_than_went_in_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"'y' has shape \(3, 2\) for 2 rows on axis 0"):
        split({"y": np.ones((3, 2))}, whole_jobs([1, 1]), {"y": 0})


def test_jobs_share_a_batch_by_dtype_shape_and_the_value_of_what_is_not_stacked() -> None:
    axes = {"x": 0, "rate": None}

    def key(rows: int, width: int, rate: int, dtype: str = "float32") -> object:
        return shape_key({"x": np.ones((rows, width), dtype), "rate": np.array(rate)}, axes)

    keys = [key(1, 2, 8), key(5, 2, 8), key(1, 3, 8), key(1, 2, 16), key(1, 2, 8, "float64")]

    assert groups(keys) == [[0, 1], [2], [3], [4]]


def test_sizes_do_not_depend_on_values() -> None:
    axes = {"rate": None}
    first, second = (shape_key({"rate": np.array(rate)}, axes) for rate in (8, 16))

    assert first != second
    assert sizes_of(first) == sizes_of(second)
