"""How many jobs a second a worker says it answers."""

from __future__ import annotations

from typing import Any

from workers.parent.rates import Rates


def instances(*jobs: int) -> list[dict[str, Any]]:
    return [{"counters": {"digits": {"jobs": count}}} for count in jobs]


def test_the_first_look_knows_no_rate() -> None:
    assert Rates().look(instances(100), now_s=0) == {}


def test_a_rate_is_taken_over_all_instances_since_the_first_look() -> None:
    rates = Rates()
    rates.look(instances(100), now_s=0)

    assert rates.look(instances(140, 20), now_s=2) == {"digits": 30.0}


def test_what_is_longer_ago_than_ten_seconds_is_forgotten() -> None:
    rates = Rates()
    for now_s, jobs in ((0, 0), (2, 1000), (4, 1000), (8, 1000), (12, 1010)):
        rate = rates.look(instances(jobs), now_s=now_s)

    assert rate == {"digits": 1.0}
    assert rates.look(instances(1010), now_s=30) == {"digits": 0.0}


def test_a_worker_without_jobs_says_nothing_of_its_models() -> None:
    rates = Rates()
    rates.look([], now_s=0)

    assert rates.look([], now_s=2) == {}
