"""A slow batch is not a dead one: its claims are renewed, also while Redis is away, and only the
death of their holder hands its jobs on.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client, Job
from producer.contract.settings import Settings
from tests.support.engines import Do, row, started, starts
from tests.support.queues import assert_all_ended, oldest_claim_s
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker, write_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

MODEL = "scripted"
CLAIM_TTL_S = 6
#: The promise: a dead worker's claims are taken over within `claim_ttl_s` plus this.
MARGIN_S = 3
BATCH_S = 20
JOBS = 8
AWAY_S = 15
ENVIRON = {"FLEET_CLAIM_TTL_S": str(CLAIM_TTL_S)}


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    model = {**SCRIPTED, "max_batch_size": JOBS, "max_queue_delay_s": 2.0}
    with config_folder({MODEL: {**model, "options": {"log": str(log)}}}) as folder:
        yield folder


@pytest.fixture
def client(broker: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=broker.url)) as client:
        yield client


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A batch of BATCH_S that runs on one worker, and another worker that is idle."""

    jobs: list[Job]
    holder: Worker


@pytest.fixture
def scene(broker: TestServer, config: Path, client: Client, log: Path) -> Iterator[Scene]:
    # Only the last job is slow, so that run alone the others take no time.
    slow = {JOBS: row(Do.SLEEP, BATCH_S, job=JOBS)}
    inputs = ({"x": slow.get(n, row(job=n))} for n in range(1, JOBS + 1))
    with running_worker(broker, config, node="one", environ=ENVIRON) as holder:
        jobs = client.submit_many(MODEL, inputs)
        wait_until(lambda: len(started(log)) == JOBS, what="the start of the batch")
        assert {start.rows for start in started(log)} == {JOBS}
        # Two idle workers would have shared them.
        with running_worker(broker, config, node="two", environ=ENVIRON):
            yield Scene(jobs=jobs, holder=holder)


def seconds_until_all_run_again(log: Path, since_s: float) -> float:
    wait_until(
        lambda: len(started(log)) == 2 * JOBS,
        what="all to run again",
        timeout_s=CLAIM_TTL_S + MARGIN_S + 10,
    )
    took_s = time.monotonic() - since_s
    print(f"all {JOBS} jobs were begun again after {took_s:.1f} s")
    return took_s


def test_a_batch_longer_than_its_claims_runs_once(
    broker: TestServer, scene: Scene, log: Path
) -> None:
    oldest_s = 0.0
    until_s = started(log)[0].at_unix_s + BATCH_S - 1
    while time.time() < until_s:
        oldest_s = max(oldest_s, oldest_claim_s(broker, MODEL))
        time.sleep(0.1)
    for job in scene.jobs:
        job.reply(20)

    print(f"the oldest claim was renewed {oldest_s:.2f} s before")
    assert oldest_s < CLAIM_TTL_S
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 1)
    assert_all_ended(broker, MODEL)


def test_a_killed_workers_batch_is_begun_again_in_time(
    broker: TestServer, scene: Scene, log: Path
) -> None:
    os.kill(scene.holder.pid, signal.SIGKILL)
    took_s = seconds_until_all_run_again(log, time.monotonic())

    for job in scene.jobs:
        assert job.reply(BATCH_S + 20).attempts == 2
    assert took_s < CLAIM_TTL_S + MARGIN_S
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 2)
    assert_all_ended(broker, MODEL)


def go(broker: TestServer, how: str) -> None:
    if how == "killed":
        broker.kill()
    else:
        broker.freeze()


def come_back(broker: TestServer, how: str) -> None:
    if how == "killed":
        broker.start()
    else:
        broker.thaw()


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_batch_runs_once_though_redis_is_away_in_the_middle(
    broker: TestServer, scene: Scene, log: Path, how: str
) -> None:
    # What the append-only file does not hold yet is not promised; the second worker's start took
    # longer than that.
    go(broker, how)
    time.sleep(AWAY_S)
    come_back(broker, how)

    for job in scene.jobs:
        assert job.reply(BATCH_S + 20).attempts == 1
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 1)
    assert_all_ended(broker, MODEL)


def test_a_worker_killed_while_redis_is_away_is_inherited_once_it_is_back(
    broker: TestServer, scene: Scene, log: Path
) -> None:
    go(broker, "killed")
    time.sleep(AWAY_S / 2)
    os.kill(scene.holder.pid, signal.SIGKILL)
    time.sleep(AWAY_S / 2)
    come_back(broker, "killed")
    took_s = seconds_until_all_run_again(log, time.monotonic())

    for job in scene.jobs:
        assert job.reply(BATCH_S + 20).attempts == 2
    assert took_s < CLAIM_TTL_S + MARGIN_S
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 2)
    assert_all_ended(broker, MODEL)


def test_jobs_that_wait_for_a_load_and_then_for_company_run_once(
    broker: TestServer, config: Path, client: Client, log: Path
) -> None:
    options = {"log": str(log), "load_s": 10}
    write_model(config, MODEL, {**SCRIPTED, "max_queue_delay_s": 8.0, "options": options})
    jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, JOBS + 1)))

    with (
        running_worker(broker, config, node="one", environ=ENVIRON, wait=False),
        running_worker(broker, config, node="two", environ=ENVIRON, wait=False),
    ):
        began_s = time.monotonic()
        for job in jobs:
            job.reply(60)
        took_s = time.monotonic() - began_s

    print(f"answered {took_s:.1f} s after the start of the workers")
    assert took_s > 18
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 1)
    assert_all_ended(broker, MODEL)
