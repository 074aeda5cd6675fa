"""Why a batch takes no more jobs."""

from __future__ import annotations

from typing import Any

import pytest

from workers.batching.closing import Closed, Limits, why_closed

AT_ONCE = Limits(max_rows=32, max_bytes=1000, max_queue_delay_s=0.0)
PATIENT = Limits(max_rows=32, max_bytes=1000, max_queue_delay_s=0.01)


@pytest.mark.parametrize(
    ("limits", "batch", "reason"),
    [
        (AT_ONCE, {"rows": 32}, Closed.FULL),
        (AT_ONCE, {"rows": 1000, "nbytes": 10**6}, Closed.FULL),
        (AT_ONCE, {"nbytes": 1000, "waiting": 9}, Closed.BYTES),
        (AT_ONCE, {"alone": True, "waiting": 9}, Closed.ALONE),
        (AT_ONCE, {}, Closed.EMPTY),
        (AT_ONCE, {"waiting": 1}, None),
        (AT_ONCE, {"rows": 0}, None),
        (PATIENT, {"oldest_age_s": 0.009}, None),
        (PATIENT, {"oldest_age_s": 0.01}, Closed.DELAY),
        (PATIENT, {"oldest_age_s": 0.01, "waiting": 1}, None),
    ],
)
def test_a_batch_closes_for_one_reason(
    limits: Limits, batch: dict[str, Any], reason: Closed | None
) -> None:
    given = {"rows": 1, "nbytes": 10, "waiting": 0, "oldest_age_s": 0.0, "alone": False} | batch

    assert why_closed(limits, **given) is reason
