"""Engines that load slowly: nothing is claimed for one that is not ready, none is loaded twice, and
those that stand go on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.support.engines import loads, row, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker, write_model

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

MODEL = "scripted"
LOAD_S = 12
#: The promise: capacity is back within this.
RESTORED_S = 20
LONG_LOAD_S = 60


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "load_s": LOAD_S}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


@pytest.fixture
def client(broker: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=broker.url)) as client:
        yield client


class Load:
    """Jobs one after the other, each answered at once by an instance that stands."""

    def __init__(self, client: Client) -> None:
        self._client, self.sent, self.slowest_s = client, 0, 0.0

    def until_ready(self, worker: Worker, count: int, log: Path) -> float:
        """Send jobs until ``count`` instances are ready; returns how long that took."""
        began_s = time.monotonic()
        while len(pids := worker.ready_pids()) != count or pids != set(worker.instance_pids()):
            assert time.monotonic() - began_s < RESTORED_S, worker.instances()
            self.send()
            time.sleep(0.1)
        assert len(set(loads(log))) == len(loads(log))
        return time.monotonic() - began_s

    def send(self) -> None:
        self.sent += 1
        began_s = time.monotonic()
        self._client.submit(MODEL, {"x": row(job=self.sent)}).reply(10)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)


def test_every_new_process_loads_once_and_the_others_go_on(
    broker: TestServer, config: Path, client: Client, log: Path
) -> None:
    control = make_app(Settings(broker_url=broker.url)).control
    load = Load(client)
    took_s: dict[str, float] = {}
    with running_worker(broker, config, "--autoscale", "4,2", instances=4, wait=False) as worker:
        worker.wait_ready(2)
        worker.wait_heard()
        for _ in range(4):
            load.send()
        assert len(loads(log)) == 2

        os.kill(worker.instance_pids()[0], signal.SIGKILL)
        wait_until(lambda: len(loads(log)) == 3, what="the successor's load")
        took_s["one of two killed"] = load.until_ready(worker, 2, log)
        assert len(loads(log)) == 3

        control.autoscale(4, 4, destination=[worker.node])
        wait_until(lambda: len(loads(log)) == 5, what="the loads of two more")
        took_s["two to four"] = load.until_ready(worker, 4, log)
        assert len(loads(log)) == 5

        # There is no recycling; giving instances up and taking new ones is what comes near it.
        control.autoscale(2, 2, destination=[worker.node])
        wait_until(lambda: len(worker.instance_pids()) == 2, what="two to end")
        control.autoscale(4, 4, destination=[worker.node])
        wait_until(lambda: len(loads(log)) == 7, what="the loads of two more")
        took_s["four to two to four"] = load.until_ready(worker, 4, log)
        assert len(loads(log)) == 7

    print({what: f"{seconds:.1f} s" for what, seconds in took_s.items()})
    print(f"{load.sent} jobs meanwhile, the slowest answered after {load.slowest_s:.2f} s")
    assert load.slowest_s < LOAD_S / 2
    assert starts(log) == dict.fromkeys(range(1, load.sent + 1), 1)
    assert_all_ended(broker, MODEL)


def test_jobs_wait_unclaimed_for_a_load_longer_than_any_claim(
    broker: TestServer, config: Path, client: Client, log: Path
) -> None:
    write_model(config, MODEL, {**SCRIPTED, "options": {"log": str(log), "load_s": LONG_LOAD_S}})
    environ = {"FLEET_CLAIM_TTL_S": "6"}
    jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 201)))

    with (
        running_worker(broker, config, node="one", environ=environ, wait=False),
        running_worker(broker, config, node="two", environ=environ, wait=False),
    ):
        wait_until(lambda: len(loads(log)) == 2, what="both loads")
        until_s = time.monotonic() + LONG_LOAD_S - 2
        while time.monotonic() < until_s:
            assert tally(broker, MODEL).waiting == len(jobs)
            time.sleep(0.5)
        for job in jobs:
            job.reply(20)

    assert len(loads(log)) == 2
    assert starts(log) == dict.fromkeys(range(1, len(jobs) + 1), 1)
    assert_all_ended(broker, MODEL)
