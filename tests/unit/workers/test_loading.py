"""How long a model that could not be loaded is left alone."""

from __future__ import annotations

import pytest

from workers.loading import load_gap_s, retry_gap_s


@pytest.mark.parametrize(("failures", "gap_s"), [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (7, 60)])
def test_the_gap_doubles_up_to_a_minute(failures: int, gap_s: float) -> None:
    assert retry_gap_s(failures) == gap_s


def test_a_model_that_fails_for_weeks_is_still_tried_every_minute() -> None:
    assert retry_gap_s(100_000) == 60


@pytest.mark.parametrize("took_s", [0.01, 3, 60, 900])
def test_a_model_that_stays_broken_costs_the_others_a_few_percent_of_the_time(
    took_s: float,
) -> None:
    gaps_s = [load_gap_s(failures, took_s=took_s, others_wait=True) for failures in range(1, 200)]

    assert gaps_s == sorted(gaps_s)
    assert all(took_s / (took_s + gap_s) <= 0.05 for gap_s in gaps_s[4:])
    assert gaps_s[0] == max(2, 2 * took_s)


def test_a_model_that_nobody_waits_for_is_tried_every_minute_however_long_it_loads() -> None:
    assert load_gap_s(9, took_s=900, others_wait=False) == 60
