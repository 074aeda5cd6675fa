"""How ceilings fall at once, grow back slowly, and are made one between instances."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.batching.ceiling import (
    GROW_AFTER_RUNS,
    GROW_AFTER_S,
    LONGEST_GROW_AFTER_S,
    Ceiling,
    grown_rows,
    lowered,
    may_grow,
    merged,
    raised,
)

CEILINGS = st.builds(
    Ceiling,
    rows=st.integers(0, 64),
    since_unix_s=st.floats(0, 1e9),
    raised=st.integers(0, 3),
    failed=st.integers(0, 3),
)


def test_what_did_not_fit_is_halved() -> None:
    first = lowered(None, failed_rows=32, now_unix_s=10)
    second = lowered(first, failed_rows=16, now_unix_s=20)

    assert (first.rows, second.rows) == (16, 8)
    assert second.since_unix_s == 20


def test_a_try_of_more_that_fails_leaves_the_ceiling_and_doubles_the_wait() -> None:
    known = Ceiling(rows=8, since_unix_s=0)

    after = lowered(known, failed_rows=10, now_unix_s=1000)

    assert (after.rows, after.failed) == (8, 1)
    assert not may_grow(after, full_runs=10**6, now_unix_s=1000 + 2 * GROW_AFTER_S - 1)
    assert may_grow(after, full_runs=10**6, now_unix_s=1000 + 2 * GROW_AFTER_S)


def test_a_ceiling_grows_by_a_quarter_only_after_many_full_runs_and_minutes() -> None:
    known = Ceiling(rows=8, since_unix_s=0)

    assert not may_grow(known, full_runs=GROW_AFTER_RUNS - 1, now_unix_s=10**6)
    assert not may_grow(known, full_runs=GROW_AFTER_RUNS, now_unix_s=GROW_AFTER_S - 1)
    assert may_grow(known, full_runs=GROW_AFTER_RUNS, now_unix_s=GROW_AFTER_S)
    assert grown_rows(known) == 10
    assert grown_rows(Ceiling(rows=1, since_unix_s=0)) == 2


def test_a_precision_in_which_no_row_fitted_is_tried_again_after_the_time_alone() -> None:
    known = Ceiling(rows=0, since_unix_s=0)

    assert may_grow(known, full_runs=0, now_unix_s=GROW_AFTER_S)
    assert grown_rows(known) == 1


def test_the_wait_never_grows_beyond_a_day() -> None:
    known = Ceiling(rows=8, since_unix_s=0, failed=10_000)

    assert may_grow(known, full_runs=GROW_AFTER_RUNS, now_unix_s=LONGEST_GROW_AFTER_S)


def test_of_two_instances_the_one_that_found_less_room_is_believed() -> None:
    large, small = Ceiling(rows=16, since_unix_s=50), Ceiling(rows=8, since_unix_s=40)

    assert merged(large, small) == Ceiling(rows=8, since_unix_s=50)


def test_of_two_instances_the_one_that_raised_it_last_knows_better() -> None:
    before = Ceiling(rows=8, since_unix_s=900)
    after = raised(before, rows=10, now_unix_s=800)

    assert merged(before, after) == merged(after, before) == after
    assert lowered(after, failed_rows=10, now_unix_s=950).rows == 5


@given(mine=CEILINGS, theirs=CEILINGS, others=CEILINGS)
def test_in_whatever_order_instances_meet_they_know_the_same(
    mine: Ceiling, theirs: Ceiling, others: Ceiling
) -> None:
    assert merged(mine, theirs) == merged(theirs, mine)
    assert merged(mine, mine) == mine
    assert merged(merged(mine, theirs), others) == merged(mine, merged(theirs, others))
