"""What reaches a log of what Redis said."""

from __future__ import annotations

import redis

from workers.telemetry.logs import said


def test_the_command_that_was_refused_is_left_out_for_it_may_hold_a_payload() -> None:
    error = redis.ResponseError(
        "Command # 2 (SET celery-task-meta-1 secret) of pipeline caused error: (x) OOM not allowed"
    )

    assert said(error) == "ResponseError: (x) OOM not allowed"


def test_a_payload_that_looks_like_the_end_of_a_command_is_left_out_too() -> None:
    error = redis.ResponseError(
        "Command # 1 (SET a ) of pipeline caused error: secret) of pipeline caused error: full"
    )

    assert said(error) == "ResponseError: full"
