"""kill -9 of everything while jobs flow: each is answered once, and the log of starts says how
often it ran.
"""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client, Job
from producer.contract.names import GROUP, Keys
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, alive, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

JOBS = 5000
UNFINISHED = 500
KEYS = Keys()
MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "batch_s": 0.01}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


def submit(client: Client, count: int = JOBS) -> list[Job]:
    inputs = ({"x": row(job=number)} for number in range(1, count + 1))
    return client.submit_many(MODEL, inputs)


def unfinished(server: TestServer) -> int:
    with server.client() as client:
        return sum(client.xlen(stream) for stream in KEYS.streams(QUEUE))


def answer_all(client: Client, jobs: list[Job]) -> None:
    for job in client.as_completed(jobs, timeout_s=120):
        job.reply(0)


def assert_nothing_left(server: TestServer, log: Path, count: int) -> None:
    """No job waits, is held or is dead; every job was started; print how often."""
    counts = collections.Counter(starts(log).values())
    print(f"starts: {dict(sorted(counts.items()))}")
    assert sum(counts.values()) == count
    with server.client() as client:
        assert unfinished(server) == 0
        assert client.hlen(KEYS.journal(QUEUE)) == 0
        assert client.xlen(KEYS.dead(QUEUE)) == 0
        for stream in KEYS.streams(QUEUE):
            assert client.xpending(stream, GROUP)["pending"] == 0


def at_the_middle(server: TestServer, do: Any) -> None:
    """Call ``do`` when a part of the jobs is done and at least UNFINISHED are not; print how
    many.
    """
    wait_until(lambda: unfinished(server) < JOBS * 0.8, what="the first jobs to be done")
    left = unfinished(server)
    print(f"unfinished at the kill: {left}")
    assert left >= UNFINISHED
    do()


def test_an_instance_is_killed(broker: TestServer, config: Path, log: Path) -> None:
    with running_worker(broker, config, instances=2) as worker:
        client = Client(Settings(broker_url=broker.url))
        parent = worker.pid
        jobs = submit(client)

        at_the_middle(broker, lambda: os.kill(worker.instance_pids()[0], signal.SIGKILL))

        answer_all(client, jobs)
        assert_nothing_left(broker, log, JOBS)
        assert max(starts(log).values()) <= 2
        assert worker.pid == parent
        worker.wait_ready(2)


def test_the_parent_alone_is_killed(broker: TestServer, config: Path, log: Path) -> None:
    environ = {"FLEET_CLAIM_TTL_S": "6"}
    with (
        running_worker(broker, config, instances=1, node="victim", environ=environ) as victim,
        running_worker(broker, config, instances=1, node="heir", environ=environ),
    ):
        client = Client(Settings(broker_url=broker.url))
        jobs = submit(client)
        orphans: list[int] = []

        def kill_parent() -> None:
            orphans.extend(victim.instance_pids())
            os.kill(victim.pid, signal.SIGKILL)
            time.sleep(1)
            assert not any(map(alive, orphans))

        at_the_middle(broker, kill_parent)

        assert orphans
        answer_all(client, jobs)
        assert_nothing_left(broker, log, JOBS)
        assert max(starts(log).values()) <= 2


def test_redis_is_killed(broker: TestServer, config: Path, log: Path) -> None:
    with running_worker(broker, config, instances=2) as worker:
        client = Client(Settings(broker_url=broker.url))
        jobs = submit(client)
        pids = worker.instance_pids()

        def kill_redis() -> None:
            # The append-only file is written every second; what it does not hold yet is not
            # promised.
            broker.kill()
            time.sleep(1)
            broker.start()

        at_the_middle(broker, kill_redis)

        answer_all(client, jobs)
        assert_nothing_left(broker, log, JOBS)
        assert worker.instance_pids() == pids
