"""Which jobs run together: every job once, in a shape that holds it, within the limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batching.grouping import grouped
from workers.batching.limits import RunLimits, row_bytes, row_elements
from workers.batching.padding import Pad, Padding
from workers.batching.shapes import ShapeKey, shape_key

AXES = {"ids": 0, "mask": 0, "scale": None}
LIMITS = RunLimits(max_rows=8, max_bytes=1 << 20, max_elements=64)
NONE = RunLimits(max_rows=1000, max_bytes=1 << 40, max_elements=None)


def key(length: int, scale: float = 1.0) -> ShapeKey:
    ids = np.zeros((1, length), np.int64)
    return shape_key({"ids": ids, "mask": ids, "scale": np.array(scale)}, AXES)


def padding(*to: int) -> Padding:
    pads = {"ids": Pad(axis=1, to=to), "mask": Pad(axis=1, to=to)}
    return Padding(pads=pads, batch_axes=AXES)


@given(
    jobs=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), max_size=30),
    to=st.sampled_from([(), (8, 16, 32)]),
)
def test_every_job_is_in_one_group_that_holds_it_within_the_limits(
    jobs: list[tuple[int, int]], to: tuple[int, ...]
) -> None:
    keys, rows = [key(length) for length, _ in jobs], [count for _, count in jobs]

    found = list(grouped(keys, rows, limits=LIMITS, padding=padding(*to)))

    assert sorted(job for group in found for job in group.jobs) == list(range(len(jobs)))
    for group in found:
        assert all(row_elements(keys[job]) <= row_elements(group.key) for job in group.jobs)
        if not to and len(group.jobs) > 1:
            count = sum(rows[job] for job in group.jobs)
            own = sum(rows[job] * row_elements(keys[job]) for job in group.jobs)
            assert count * row_elements(group.key) <= 2 * own
            assert count <= 8 or len({keys[job] for job in group.jobs}) == 1


def test_without_padding_jobs_share_by_shape_and_value() -> None:
    keys = [key(3), key(4), key(3), key(3, scale=2.0)]

    found = grouped(keys, [1] * 4, limits=NONE, padding=Padding())

    assert [group.jobs for group in found] == [(0, 2), (1,), (3,)]


def test_jobs_that_differ_in_what_is_not_padded_share_no_run() -> None:
    keys = [key(3), key(4, scale=2.0), key(4)]

    for to in ((), (8,)):
        found = grouped(keys, [1] * 3, limits=NONE, padding=padding(*to))
        assert sorted(sorted(group.jobs) for group in found) == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        (NONE, 1000),
        (RunLimits(max_rows=32, max_bytes=1 << 20, max_elements=39), 3),
        (RunLimits(max_rows=32, max_bytes=1 << 20, max_elements=5), 1),
        (RunLimits(max_rows=32, max_bytes=400, max_elements=None), 2),
        (RunLimits(max_rows=32, max_bytes=10, max_elements=None), 1),
    ],
)
def test_one_row_always_runs_and_more_as_far_as_every_limit_goes(
    limits: RunLimits, rows: int
) -> None:
    shape = key(12)

    # Of the largest input for elements, of all that have rows for bytes.
    assert (row_elements(shape), row_bytes(shape)) == (12, 192)
    assert limits.rows(shape) == rows
