"""A server that stands still for longer than any claim lives, and connections that are cut again
and again: nothing runs twice, and work goes on soon.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client, Job
from producer.contract.settings import Settings
from tests.support.engines import row, started, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

MODEL = "scripted"
FROZEN_S = 70
#: The promise: workers claim again within this.
AGAIN_S = 30
CUTS, SEED = 20, 4
JOBS_A_CUT = 400


@pytest.fixture
def pair(broker: TestServer, log: Path) -> Iterator[tuple[Worker, Worker]]:
    """Two workers that hold batches of half a second at every moment."""
    options = {"log": str(log), "batch_s": 0.5}
    environ = {"FLEET_CLAIM_TTL_S": "6"}
    with contextlib.ExitStack() as stack:
        config = stack.enter_context(config_folder({MODEL: {**SCRIPTED, "options": options}}))
        one, two = (
            stack.enter_context(running_worker(broker, config, node=node, environ=environ))
            for node in ("one", "two")
        )
        yield one, two


def submit(client: Client, first: int, count: int) -> list[Job]:
    return client.submit_many(MODEL, ({"x": row(job=n)} for n in range(first, first + count)))


def pids(pair: tuple[Worker, Worker]) -> list[list[int]]:
    return [[worker.pid, *worker.instance_pids()] for worker in pair]


def assert_each_ran_once(broker: TestServer, log: Path, jobs: list[Job]) -> None:
    assert starts(log) == dict.fromkeys(range(1, len(jobs) + 1), 1)
    assert_all_ended(broker, MODEL)


def test_a_server_that_stands_still_makes_nothing_run_twice(
    broker: TestServer, pair: tuple[Worker, Worker], log: Path
) -> None:
    with Client(Settings(broker_url=broker.url)) as client:
        before = pids(pair)
        jobs = submit(client, 1, 3000)
        wait_until(lambda: len({start.pid for start in started(log)}) == 2, what="both to work")
        time.sleep(2)

        broker.freeze()
        time.sleep(FROZEN_S)
        before_thaw, thawed_s = len(started(log)), time.monotonic()
        broker.thaw()
        held = tally(broker, MODEL).claimed

        wait_until(
            lambda: len({start.pid for start in started(log)[before_thaw:]}) == 2,
            what="both to work again",
            timeout_s=AGAIN_S + 20,
        )
        again_s = time.monotonic() - thawed_s
        for job in jobs:
            assert job.reply(120).attempts == 1
        assert pids(pair) == before

    print(f"{held} jobs were held for {FROZEN_S} s; both worked again after {again_s:.1f} s")
    assert held > 0
    assert again_s < AGAIN_S
    assert_each_ran_once(broker, log, jobs)


def test_connections_cut_again_and_again_under_load_make_nothing_run_twice(
    broker: TestServer, pair: tuple[Worker, Worker], log: Path
) -> None:
    chance, cut, jobs = random.Random(SEED), 0, list[Job]()
    with Client(Settings(broker_url=broker.url)) as client:
        before = pids(pair)
        for _ in range(CUTS):
            jobs += submit(client, len(jobs) + 1, JOBS_A_CUT)
            time.sleep(chance.uniform(0.2, 1.5))
            with broker.client() as own:
                for kind in ("normal", "pubsub"):
                    cut += own.client_kill_filter(_type=kind)
            assert tally(broker, MODEL).unfinished > 0
        for job in jobs:
            assert job.reply(120).attempts == 1
        assert pids(pair) == before

    print(f"{CUTS} times, {cut} connections in all, {len(jobs)} jobs (seed {SEED})")
    assert_each_ran_once(broker, log, jobs)
