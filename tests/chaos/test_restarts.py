"""A worker whose parent was killed is started again at once, on the same instances, under load."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.host import MODEL, running_host
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import Worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

INSTANCES = 2
BATCH_S = 0.2
#: Enough for all rounds: 40 jobs a second.
JOBS = 1200


def kill(worker: Worker) -> None:
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait(10)


def test_a_worker_that_is_started_again_answers_at_once_and_runs_what_the_dead_one_held(
    broker: TestServer, log: Path
) -> None:
    """Leases and claims last as long as they do by default: 15 s."""
    answered_s, held_s = [], []
    with (
        running_host(broker, log, instances=INSTANCES, batch_s=BATCH_S) as (host, occupancy),
        Client(Settings(broker_url=broker.url)) as client,
    ):
        (worker,) = host.add()
        host.wait_parts(INSTANCES)
        jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, JOBS + 1)))
        for number in range(3):
            before = starts(log)
            wait_until(lambda seen=before: len(starts(log)) >= len(seen) + 20, what="some starts")

            kill(worker)
            killed_s = time.monotonic()
            begun = {job for job, count in starts(log).items() if count == 1}
            probe = client.submit(MODEL, {"x": row(job=JOBS + 1 + number)}, priority="high")
            worker.start()

            probe.reply(60)
            answered_s.append(time.monotonic() - killed_s)
            host.wait_parts(INSTANCES)
            assert len(begun) > 0
        for job in jobs:
            job.reply(60)
        held_s.append(time.monotonic() - killed_s)

    print("first answer after a kill, seconds:", ", ".join(f"{each:.1f}" for each in answered_s))
    print(f"all answered {held_s[0]:.1f} s after the last kill")
    assert occupancy.overlaps() == []
    assert_all_ended(broker, MODEL)
    assert max(answered_s) < 8
