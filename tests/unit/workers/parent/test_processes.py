"""When an instance is taken for hung, and how totals of instances add up."""

from __future__ import annotations

from typing import Any

import pytest

from producer.contract.counters import add_counters
from workers.parent.processes import why_hung, why_too_long


def hung(said: dict[str, Any], *, age_s: float = 0.5) -> str:
    return why_hung(said, age_s=age_s, silent_limit_s=15, still_limit_s=45)


def ready(*, silent_s: float = 0.1, batch_s: float = 0.0) -> dict[str, Any]:
    batch = {"batch_s": batch_s, "batch_limit_s": 60.0, "batch_model": "digits"}
    return {"state": "ready", "silent_s": silent_s, **batch}


@pytest.mark.parametrize("said", [ready(), ready(silent_s=45, batch_s=60)])
def test_an_instance_within_its_limits_is_left_alone(said: dict[str, Any]) -> None:
    assert hung(said, age_s=15) == ""
    assert why_too_long(said) == ""


def test_one_that_reports_nothing_is_hung_whatever_its_state() -> None:
    assert "reported nothing for 16 s" in hung({"state": "loading"}, age_s=16)


def test_one_that_never_spoke_may_take_its_time() -> None:
    assert hung({}, age_s=1000) == ""
    assert why_too_long({}) == ""


@pytest.mark.parametrize("state", ["starting", "loading"])
def test_a_load_may_take_as_long_as_it_likes(state: str) -> None:
    assert hung({"state": state, "silent_s": 1000, "batch_s": 0.0}) == ""


def test_a_batch_beyond_its_limit_runs_too_long() -> None:
    said = why_too_long(ready(batch_s=60.1))

    assert said == "its batch of digits ran for more than 60 s"


@pytest.mark.parametrize("state", ["ready", "draining", "broken"])
def test_a_loop_that_stands_still_is_hung(state: str) -> None:
    assert "stood still for 46 s" in hung({**ready(silent_s=46), "state": state})


def test_counters_are_summed_key_by_key_and_the_given_ones_stay() -> None:
    left = {"jobs": 1, "closed": {"full": 1}}
    right = {"jobs": 2, "rows": 5, "closed": {"full": 2, "empty": 3}}

    total = add_counters(left, right)

    assert total == {"jobs": 3, "rows": 5, "closed": {"full": 3, "empty": 3}}
    assert left == {"jobs": 1, "closed": {"full": 1}}


def test_nothing_added_to_counters_is_the_counters() -> None:
    counters = {"jobs": 1, "closed": {"full": 1}}

    assert add_counters({}, counters) == add_counters(counters, {}) == counters
