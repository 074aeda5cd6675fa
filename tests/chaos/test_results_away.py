"""The server of the results is down while jobs run: none is acknowledged without its result, and
the worker's parent answers all the time.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.support.engines import row, started, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

MODEL = "scripted"
INSTANCES = 2
JOBS = 2000
DOWN_S = 30
#: The promise: remote control answers within this, whatever the results do.
PING_S = 1.0


class Pings(threading.Thread):
    """Asks one node again and again whether it lives; keeps how long each answer took."""

    def __init__(self, settings: Settings, node: str) -> None:
        super().__init__(name="pings")
        self._app, self._node = make_app(settings), node
        self._ending = threading.Event()
        self.took_s: list[float] = []
        self.unanswered = 0

    def run(self) -> None:
        while not self._ending.wait(0.3):
            began_s = time.monotonic()
            answers = self._app.control.ping([self._node], timeout=5, limit=1)
            self.took_s.append(time.monotonic() - began_s)
            self.unanswered += not answers

    def __enter__(self) -> Pings:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join(30)
        self._app.close()


@pytest.mark.parametrize("how", ["shut down", "frozen"])
def test_no_job_is_acknowledged_without_its_result(
    broker: TestServer, results: TestServer, log: Path, how: str
) -> None:
    settings = Settings(broker_url=broker.url, result_url=results.url)
    options = {"log": str(log), "batch_s": 0.05}
    with (
        config_folder({MODEL: {**SCRIPTED, "options": options}}) as config,
        Client(settings) as client,
        running_worker(
            broker, config, instances=INSTANCES, environ={"FLEET_RESULT_URL": results.url}
        ) as worker,
        Pings(settings, worker.node) as pings,
    ):
        pids = (worker.pid, worker.instance_pids())
        jobs = client.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, JOBS + 1)))
        wait_until(lambda: len(started(log)) > JOBS / 4, what="the first quarter")

        if how == "shut down":
            results.shut_down()
        else:
            results.freeze()
        down_until_s = time.monotonic() + DOWN_S
        time.sleep(2)  # An answer that was stored just before may still be acknowledged.
        held = tally(broker, MODEL)
        while time.monotonic() < down_until_s:
            assert tally(broker, MODEL).unfinished == held.unfinished
            time.sleep(0.5)
        if how == "shut down":
            results.start()
        else:
            results.thaw()

        for job in jobs:
            assert job.reply(60).attempts == 1
        assert (worker.pid, worker.instance_pids()) == pids

    print(f"held for {DOWN_S} s: {held.claimed} answers, {held.waiting} waited")
    print(f"{len(pings.took_s)} pings, the slowest answered after {max(pings.took_s):.3f} s")
    assert held.claimed > 0
    assert pings.unanswered == 0
    assert max(pings.took_s) < PING_S
    assert starts(log) == dict.fromkeys(range(1, JOBS + 1), 1)
    assert_all_ended(broker, MODEL)
