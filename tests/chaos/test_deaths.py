"""A hundred workers come and go and five hundred instances die under load: nothing is lost, and
nothing is left of the dead in Redis.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client, Job
from producer.contract.settings import Settings
from tests.support.engines import left_unfinished_by, row, starts
from tests.support.queues import assert_all_ended, consumers, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1500)]

MODEL = "scripted"
WORKERS, INSTANCES, SEED = 100, 5, 5
UNFINISHED = 500
CONSUMERS = 10
ENVIRON = {
    "FLEET_CLAIM_TTL_S": "6",
    # What was given back is taken first, and so a job may be in the hands of many that are killed.
    "FLEET_MAX_ATTEMPTS": "100",
}


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "batch_s": 0.05}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


class Load:
    """Keeps at least UNFINISHED jobs in the queue."""

    def __init__(self, broker: TestServer, client: Client) -> None:
        self._broker, self._client, self.jobs = broker, client, list[Job]()

    def top_up(self) -> None:
        missing = 2 * UNFINISHED - tally(self._broker, MODEL).unfinished
        first = len(self.jobs) + 1
        inputs = ({"x": row(job=n)} for n in range(first, first + max(0, missing)))
        self.jobs += self._client.submit_many(MODEL, inputs)


def kill_every_instance(worker: Worker, chance: random.Random) -> set[int]:
    """kill -9 of all that are ready, one after the other."""
    victims = list(worker.ready_pids())
    chance.shuffle(victims)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.05))
    return set(victims)


def end(worker: Worker, how: signal.Signals) -> set[int]:
    """End the worker; returns the instances that are killed by that."""
    if how is signal.SIGTERM:
        assert worker.stop() == 0
        return set()
    assert worker.process is not None
    children = set(worker.instance_pids())
    worker.process.kill()
    worker.process.wait(timeout=30)
    return children


def test_a_hundred_workers_and_five_hundred_instances(
    broker: TestServer, config: Path, log: Path
) -> None:
    chance, killed, most = random.Random(SEED), set[int](), 0
    with Client(Settings(broker_url=broker.url)) as client:
        load = Load(broker, client)
        # Creates the groups, and lets each worker find what others left.
        with running_worker(broker, config, node="first", environ=ENVIRON) as first:
            load.top_up()
            for turn in range(WORKERS):
                how = chance.choice([signal.SIGTERM, signal.SIGKILL])
                with running_worker(
                    broker, config, node=f"w{turn}", instances=INSTANCES, environ=ENVIRON
                ) as worker:
                    load.top_up()
                    most = max(most, len(consumers(broker, MODEL)))
                    killed |= kill_every_instance(worker, chance)
                    killed |= end(worker, how)
            for job in load.jobs:
                job.reply(200)
            wait_until(
                lambda: len(consumers(broker, MODEL)) < CONSUMERS,
                what="the consumers of the dead to be removed",
                timeout_s=120,
            )
            left = consumers(broker, MODEL)
            assert first.process is not None
            assert first.process.poll() is None

    counts = starts(log)
    times = dict(sorted(collections.Counter(counts.values()).items()))
    print(f"{WORKERS} workers started, {len(killed)} instances killed (seed {SEED})")
    print(f"{len(load.jobs)} jobs, starts {times}")
    print(f"consumers: {most} at most, {len(left)} left")
    assert len(killed) >= WORKERS * INSTANCES
    assert counts.keys() == set(range(1, len(load.jobs) + 1))
    assert left_unfinished_by(log) <= killed
    assert_all_ended(broker, MODEL)
