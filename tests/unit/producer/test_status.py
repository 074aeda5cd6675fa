"""Adding up what instances say."""

from __future__ import annotations

from typing import Any

import pytest

from producer.contract.counters import add_counters
from producer.status import Fleet, state_of


def instance(slot: int, **counters: Any) -> dict[str, Any]:
    return {"slot": slot, "models": {"digits": {"runtime": "r"}}, "counters": counters}


def test_counters_are_summed_over_instances_and_workers() -> None:
    fleet = Fleet(
        workers=(
            {"instances": [instance(0, digits={"jobs": 1, "closed": {"full": 1}}), instance(1)]},
            {"instances": [instance(0, digits={"jobs": 2, "closed": {"full": 3, "alone": 1}})]},
        ),
        queued={"digits": 5, "idle": 0},
    )

    assert fleet.totals() == {
        "digits": {"jobs": 3, "closed": {"full": 4, "alone": 1}},
        "idle": {},
    }
    assert {name: len(engines) for name, engines in fleet.engines().items()} == {
        "digits": 3,
        "idle": 0,
    }


def test_adding_leaves_both_sides_as_they_were() -> None:
    left, right = {"closed": {"full": 1}}, {"closed": {"full": 2}, "jobs": 1}

    assert add_counters(left, right) == {"closed": {"full": 3}, "jobs": 1}
    assert left == {"closed": {"full": 1}}
    assert right == {"closed": {"full": 2}, "jobs": 1}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"batch_s": 4.9, "batch_model": "digits"}, "ready"),
        (
            {"batch_s": 120.4, "batch_model": "digits"},
            "ready: runs a batch of digits for 120 s now",
        ),
        ({"batch_s": 120.4}, "ready: runs a batch for 120 s now"),
        ({"batch_s": 120.4, "text": "other: no weights"}, "ready: other: no weights"),
    ],
)
def test_a_state_is_told_with_what_explains_it(said: dict[str, Any], shown: str) -> None:
    assert state_of({"state": "ready", **said}) == shown
