"""A worker whose parent was killed is started again at once, on the same instances, under load."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client
from producer.contract.names import FREE, GROUP, Keys, Priority, queue_of
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.host import MODEL, running_host
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import Worker

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere leases and claims run out"),
]

STREAM = Keys().stream(queue_of(MODEL), Priority.NORMAL)
INSTANCES = 2
BATCH_S = 0.2
ROUNDS = 3
#: Enough for all rounds: 40 a second.
JOBS = 800
#: Of 15 s that leases and claims last by default; most of it is the start of Python.
AT_ONCE_S = 12.0


def kill(worker: Worker) -> None:
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait(10)


def unfinished(broker: TestServer) -> dict[bytes, bytes]:
    """Return who holds each entry that was claimed and has not ended."""
    with broker.client() as client:
        pending: Any = client.xpending_range(STREAM, GROUP, "-", "+", 1000)
    return {each["message_id"]: each["consumer"] for each in pending}


def test_a_worker_that_is_started_again_answers_at_once_and_runs_what_the_dead_one_held(
    broker: TestServer, log: Path
) -> None:
    answered_s, again_s = [], []
    with (
        running_host(broker, log, instances=INSTANCES, batch_s=BATCH_S) as (host, occupancy),
        Client(Settings(broker_url=broker.url)) as client,
    ):
        (worker,) = host.add()
        host.wait_parts(INSTANCES)
        jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, JOBS + 1)))
        for number in range(1, ROUNDS + 1):
            wait_until(lambda: unfinished(broker), what="jobs in hand")

            kill(worker)
            killed_s = time.monotonic()
            held = [entry for entry, who in unfinished(broker).items() if who != FREE.encode()]
            probe = client.submit(MODEL, {"x": row(job=JOBS + number)}, priority="high")
            worker.start()

            probe.reply(60)
            answered_s.append(time.monotonic() - killed_s)
            while not unfinished(broker).keys().isdisjoint(held):
                time.sleep(0.02)
            again_s.append(time.monotonic() - killed_s)
            host.wait_parts(INSTANCES)
        for job in jobs:
            job.reply(60)

    print("seconds from the kill to the first answer:", ", ".join(f"{s:.1f}" for s in answered_s))
    print("and until all that was in hand had ended:", ", ".join(f"{s:.1f}" for s in again_s))
    assert occupancy.overlaps() == []
    assert len(occupancy.instances()) == INSTANCES
    assert set(starts(log)) == set(range(1, JOBS + ROUNDS + 1))
    assert_all_ended(broker, MODEL)
    assert max(answered_s) < AT_ONCE_S
    assert max(again_s) < AT_ONCE_S
