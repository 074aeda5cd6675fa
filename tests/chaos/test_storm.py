"""A small form of the storm (`python -m tests.chaos.storm`): six faults, every job judged."""

from __future__ import annotations

import pytest

from tests.chaos import faults
from tests.chaos.faults import KILLS, Fault
from tests.chaos.fleet import Shape
from tests.chaos.rounds import Rounds
from tests.chaos.trial import trial

_FAULTS = (
    *KILLS,
    Fault(name="CLIENT KILL of all", strike=faults.cut_connections),
    Fault(name="SIGTERM of a worker", strike=faults.end_worker),
)


pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


def test_six_faults_under_load_lose_nothing_and_answer_nothing_twice() -> None:
    with trial(Shape(claim_ttl_s=3, clients=2), seed=7, patient=False) as on_trial:
        report = Rounds(on_trial, _FAULTS, jobs_a_round=500).run(print)

    assert report.broken == []
    assert report.accepted >= 3000
    assert [each.fault for each in report.rounds] == [fault.name for fault in _FAULTS]
