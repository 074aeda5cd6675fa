"""The smallest form of the storm (`python -m tests.chaos.storm`): each kill once, every job judged.
Six faults are in tests/chaos/test_storm.py.
"""

from __future__ import annotations

import pytest

from tests.chaos.faults import KILLS
from tests.chaos.fleet import Shape
from tests.chaos.rounds import Rounds
from tests.chaos.trial import trial


@pytest.mark.timeout(120)
def test_each_kill_under_load_loses_nothing_and_answers_nothing_twice() -> None:
    with trial(Shape(claim_ttl_s=3, clients=2), seed=7, patient=False) as on_trial:
        report = Rounds(on_trial, KILLS, jobs_a_round=350).run(print)

    assert report.broken == []
    assert report.accepted >= 1400
    assert [each.fault for each in report.rounds] == [fault.name for fault in KILLS]
