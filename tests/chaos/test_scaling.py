"""The number of instances under steps and trickles of load, and while Redis is away."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

MODEL = "scripted"
INSTANCES = 3


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    model = {**SCRIPTED, "max_batch_size": 1, "options": {"log": str(log), "batch_s": 0.05}}
    with config_folder({MODEL: model}) as folder:
        yield folder


def test_a_step_of_two_thousand_jobs(broker: TestServer, config: Path, log: Path) -> None:
    down_after_s = 10
    environ = {"FLEET_MIN_INSTANCES": "1", "FLEET_DOWN_AFTER_S": str(down_after_s)}
    with running_worker(broker, config, instances=INSTANCES, environ=environ, wait=False) as worker:
        worker.wait_ready(1)
        client = Client(Settings(broker_url=broker.url))
        began_s = time.monotonic()
        jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 2001)))

        wait_until(
            lambda: len(worker.instance_pids()) == INSTANCES, what="all instances", timeout_s=15
        )
        up_s = time.monotonic() - began_s
        for job in client.as_completed(jobs, timeout_s=120):
            job.reply(0)
        idle_s = time.monotonic()
        wait_until(
            lambda: len(worker.instance_pids()) == 1,
            what="one instance",
            timeout_s=down_after_s + 15,
        )

        print(
            f"all up after {up_s:.1f} s, one left {time.monotonic() - idle_s:.1f} s after the end"
        )
        counters = worker.wait_counters(MODEL, jobs=2000)
    assert counters["succeeded"] == 2000
    assert starts(log) == dict.fromkeys(range(1, 2001), 1)


def test_a_trickle_at_the_edge_of_the_quiet_time(
    broker: TestServer, config: Path, log: Path
) -> None:
    down_after_s, chance = 4, random.Random(7)
    environ = {"FLEET_MIN_INSTANCES": "1", "FLEET_DOWN_AFTER_S": str(down_after_s)}
    with running_worker(broker, config, instances=INSTANCES, environ=environ, wait=False) as worker:
        worker.wait_ready(1)
        client = Client(Settings(broker_url=broker.url))
        seen = [len(worker.instance_pids())]
        for number in range(1, 41):
            client.submit(MODEL, {"x": row(job=number)}).reply(20)
            until_s = time.monotonic() + down_after_s * chance.uniform(0.9, 1.1)
            while time.monotonic() < until_s:
                seen.append(len(worker.instance_pids()))
                time.sleep(0.25)

    changes = sum(one != other for one, other in itertools.pairwise(seen))
    print(f"changes in 40 jobs, {40 * down_after_s} s: {changes}")
    assert changes <= 40 * down_after_s / 60
    assert starts(log) == dict.fromkeys(range(1, 41), 1)


def test_redis_away_for_twenty_seconds_during_load(
    broker: TestServer, config: Path, log: Path
) -> None:
    environ = {"FLEET_MIN_INSTANCES": "1", "FLEET_DOWN_AFTER_S": "5"}
    with running_worker(broker, config, instances=INSTANCES, environ=environ, wait=False) as worker:
        worker.wait_ready(1)
        client = Client(Settings(broker_url=broker.url))
        jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 1501)))
        wait_until(lambda: len(worker.instance_pids()) == INSTANCES, what="all instances")
        parent, pids = worker.pid, worker.instance_pids()

        broker.freeze()
        time.sleep(20)
        during = worker.instance_pids()
        broker.thaw()
        for job in client.as_completed(jobs, timeout_s=120):
            job.reply(0)

        assert during == pids
        assert worker.pid == parent
        assert worker.process is not None
        assert worker.process.poll() is None
    assert starts(log) == dict.fromkeys(range(1, 1501), 1)
