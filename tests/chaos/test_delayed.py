"""Jobs that are to wait cost those that are not nothing, and run once when their time has come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.chaos.processes import memory_bytes
from tests.support.engines import row, started, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

MODEL = "scripted"
DELAYED, DELAY_S, IMMEDIATE = 20_000, 3600, 10
#: The promise: those that are not delayed are done within this.
DONE_S = 5
GROWTH_BYTES = 10 * 1024 * 1024

CLAIM_TTL_S, LONGER_S = 3, 10


@pytest.fixture
def infer(broker: TestServer) -> Iterator[Infer]:
    app = make_app(Settings(broker_url=broker.url))
    yield register(app)
    app.close()


@pytest.fixture
def worker(broker: TestServer, log: Path) -> Iterator[Worker]:
    environ = {"FLEET_CLAIM_TTL_S": str(CLAIM_TTL_S)}
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {"log": str(log)}}}) as config,
        running_worker(broker, config, environ=environ) as worker,
    ):
        yield worker


def memory(worker: Worker) -> list[int]:
    """Return the bytes of the parent and of each instance."""
    return [memory_bytes(pid) or 0 for pid in (worker.pid, *worker.instance_pids())]


def test_twenty_thousand_delayed_jobs_do_not_hold_up_ten(
    broker: TestServer, infer: Infer, worker: Worker, log: Path
) -> None:
    infer.delay(MODEL, {"x": row(job=1)}).get(timeout=10)
    before, began_s = memory(worker), time.monotonic()
    for number in range(DELAYED):
        infer.apply_async((MODEL, {"x": row(job=1000 + number)}), countdown=DELAY_S)
    print(f"{DELAYED} delayed jobs sent in {time.monotonic() - began_s:.0f} s")

    began_s = time.monotonic()
    results = [infer.delay(MODEL, {"x": row(job=n)}) for n in range(2, IMMEDIATE + 2)]
    for result in results:
        result.get(timeout=20)
    took_s = time.monotonic() - began_s
    time.sleep(2 * CLAIM_TTL_S)
    after = memory(worker)

    grown = [f"{(now - then) / 1e6:+.1f} MB" for now, then in zip(after, before, strict=True)]
    print(f"{IMMEDIATE} immediate ones done after {took_s:.2f} s; parent and instance {grown}")
    assert took_s < DONE_S
    assert all(now - then < GROWTH_BYTES for now, then in zip(after, before, strict=True))
    assert starts(log) == dict.fromkeys(range(1, IMMEDIATE + 2), 1)
    assert tally(broker, MODEL).delayed == DELAYED


def test_jobs_delayed_for_longer_than_a_claim_lives_run_once_when_they_are_due(
    broker: TestServer, infer: Infer, worker: Worker, log: Path
) -> None:
    due_unix_s = time.time() + LONGER_S
    results = [
        infer.apply_async((MODEL, {"x": row(job=n)}), countdown=due_unix_s - time.time())
        for n in range(1, 101)
    ]

    wait_until(lambda: len(started(log)) == 100, what="all to start", timeout_s=2 * LONGER_S)
    for result in results:
        result.get(timeout=20)

    late_s = [start.at_unix_s - due_unix_s for start in started(log)]
    print(f"begun {min(late_s):.2f} to {max(late_s):.2f} s after they were due")
    assert min(late_s) >= -0.01
    assert max(late_s) < 3
    assert starts(log) == dict.fromkeys(range(1, 101), 1)
    assert_all_ended(broker, MODEL)
