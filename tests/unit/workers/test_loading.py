"""How long a model that could not be loaded is left alone."""

from __future__ import annotations

import pytest

from workers.loading import retry_gap_s


@pytest.mark.parametrize(("failures", "gap_s"), [(1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (7, 60)])
def test_the_gap_doubles_up_to_a_minute(failures: int, gap_s: float) -> None:
    assert retry_gap_s(failures) == gap_s


def test_a_model_that_fails_for_weeks_is_still_tried_every_minute() -> None:
    assert retry_gap_s(100_000) == 60
