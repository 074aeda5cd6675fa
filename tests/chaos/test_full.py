"""A full Redis: who sends is told at once, who works goes on until there is room again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from producer.client import Client, Job
from producer.contract.errors import Overloaded
from producer.contract.settings import Settings
from tests.support.engines import Do, row, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

MODEL = "scripted"
EPISODES = 3
#: The promise: who sends to a full Redis is told so within this.
TOLD_S = 5
#: Who was told so looks again as often as this.
TAKEN_S = 5

#: AT7 of the acceptance tests: jobs of 50 KB behind a batch of 10 s, full for 30 s.
WIDTH, BATCH_S, WAITING, FULL_S = 12_800, 10, 100, 30

JOBS = 20_000


@pytest.fixture
def client(broker: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=broker.url)) as client:
        yield client


@contextlib.contextmanager
def full(broker: TestServer) -> Iterator[None]:
    """Let Redis have no memory for anything new."""
    with broker.client() as client:
        client.config_set("maxmemory", "1mb")
    yield
    with broker.client() as client:
        client.config_set("maxmemory", 0)


def told_after_s(client: Client, width: int = 3) -> float:
    """Send a job that must be refused; returns how long that took."""
    began_s = time.monotonic()
    with pytest.raises(Overloaded):
        client.submit(MODEL, {"x": np.zeros((1, width), np.float32)})
    return time.monotonic() - began_s


def taken_again_after_s(client: Client, job: int) -> float:
    """Send a job until it is taken, now that there is room; returns how long that took."""

    def taken() -> Job | None:
        with contextlib.suppress(Overloaded):
            return client.submit(MODEL, {"x": row(job=job)})
        return None

    began_s = time.monotonic()
    wait_until(taken, what="a job to be taken", timeout_s=TAKEN_S + 5).reply(20)
    return time.monotonic() - began_s


def assert_nobody_died(worker: Worker, pids: tuple[int, list[int]]) -> None:
    assert (worker.pid, worker.instance_pids()) == pids
    assert worker.process is not None
    assert worker.process.poll() is None


def test_jobs_of_fifty_kilobytes_wait_when_redis_gets_full(
    broker: TestServer, client: Client, log: Path
) -> None:
    def wide(do: Do, argument: float, job: int) -> dict[str, np.ndarray]:
        x = np.zeros((1, WIDTH), np.float32)
        x[0, :3] = (do, argument, job)
        return {"x": x}

    model = {**SCRIPTED, "options": {"log": str(log), "width": WIDTH}}
    told_s, jobs = [], 0
    with config_folder({MODEL: model}) as config, running_worker(broker, config) as worker:
        pids = (worker.pid, worker.instance_pids())
        for _ in range(EPISODES):
            jobs += 1
            slow = client.submit(MODEL, wide(Do.SLEEP, BATCH_S, jobs))
            wait_until(lambda: jobs in starts(log), what="the slow batch")  # noqa: B023
            many = [wide(Do.OK, 0, n) for n in range(jobs + 1, jobs + WAITING + 1)]
            waiting = client.submit_many(MODEL, many)
            jobs += WAITING

            with full(broker):
                until_s = time.monotonic() + FULL_S
                told_s.append(told_after_s(client, WIDTH))
                wait_until(lambda: tally(broker, MODEL).unfinished == 0, what="all", timeout_s=25)
                time.sleep(until_s - time.monotonic())

            for job in (slow, *waiting):
                assert job.reply(20).attempts == 1
        assert_nobody_died(worker, pids)

    print(f"{EPISODES} episodes of {FULL_S} s; told after {max(told_s):.3f} s at most")
    assert max(told_s) < TOLD_S
    assert starts(log) == dict.fromkeys(range(1, jobs + 1), 1)
    assert_all_ended(broker, MODEL)


def test_redis_is_full_three_times_in_a_run_of_twenty_thousand(
    broker: TestServer, client: Client, log: Path
) -> None:
    per_episode = JOBS // EPISODES
    model = {**SCRIPTED, "options": {"log": str(log), "batch_s": 0.02}}
    told_s, taken_s, drained, jobs = [], [], [], list[Job]()
    with (
        config_folder({MODEL: model}) as config,
        running_worker(broker, config, instances=2) as worker,
    ):
        pids = (worker.pid, worker.instance_pids())
        for episode in range(EPISODES):
            first = episode * per_episode + 1
            last = JOBS if episode == EPISODES - 1 else first + per_episode - 1
            jobs += client.submit_many(MODEL, ({"x": row(job=n)} for n in range(first, last + 1)))

            with full(broker):
                drained.append(tally(broker, MODEL).unfinished)
                began_s = time.monotonic()
                while tally(broker, MODEL).unfinished:
                    told_s.append(told_after_s(client))
                    assert time.monotonic() - began_s < 60
                    time.sleep(0.2)
            taken_s.append(taken_again_after_s(client, JOBS + episode + 1))
        for job in jobs:
            assert job.reply(60).attempts == 1
        assert_nobody_died(worker, pids)

    print(f"{JOBS} jobs; drained while full: {drained}")
    print(f"{len(told_s)} sends refused, told after {max(told_s):.3f} s at most")
    print(f"with room again, taken after {max(taken_s):.2f} s at most")
    assert max(taken_s) < TAKEN_S
    assert min(drained) > 500
    assert max(told_s) < TOLD_S
    assert starts(log) == dict.fromkeys(range(1, JOBS + EPISODES + 1), 1)
    assert_all_ended(broker, MODEL)


def test_a_server_that_throws_keys_away_is_refused_at_start(broker: TestServer) -> None:
    with broker.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

    with (
        config_folder({MODEL: SCRIPTED}) as config,
        running_worker(broker, config, wait=False) as worker,
    ):
        assert worker.process is not None
        assert worker.process.wait(timeout=20) == 2
        (line,) = worker.log().splitlines()

    print(line)
    assert "maxmemory-policy allkeys-lru" in line
