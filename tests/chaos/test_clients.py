"""Clients while Redis fails under them, and Redis after a client has died."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import group

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.connections import channels, connections
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.waits import Answers, finish, waits
from tests.support.worker import ROOT, SCRIPTED, config_folder, running_worker

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    # Of Celery's: the backends of threads that have ended are collected, not closed.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
BATCH_S = 8.0
#: Keys of the fleet that outlive its clients.
LASTING = ("fleet:stream:", "fleet:models", "fleet:workers", "fleet:worker:", "_kombu.")


@pytest.fixture(autouse=True)
def backends_of_threads() -> Iterator[None]:
    """Have them collected where it is expected, and not in whichever test comes next."""
    yield
    gc.collect()


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "batch_s": BATCH_S}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


class Asker:
    """Sixteen jobs, awaited in five ways at once."""

    def __init__(self, url: str) -> None:
        settings = Settings(broker_url=url)
        self.client = Client(settings)
        self.infer: Infer = register(make_app(settings))

    def ask(self, pool: ThreadPoolExecutor, first: int) -> list[Future[list[int]]]:
        """Send jobs from the number ``first`` on; return the numbers that come back."""
        inputs = [{"x": row(job=number)} for number in range(first, first + 16)]
        single = self.infer.delay(MODEL, inputs[0])
        four = group(self.infer.s(MODEL, each) for each in inputs[1:5]).apply_async()
        jobs = self.client.submit_many(MODEL, inputs[5:])
        return [
            pool.submit(lambda: [_number(single.get(timeout=90))]),
            pool.submit(lambda: [_number(answer) for answer in four.get(timeout=90)]),
            pool.submit(lambda: [_number(jobs[0].reply(90).outputs)]),
            pool.submit(lambda: asyncio.run(self._await(jobs[1:5]))),
            pool.submit(
                lambda: [
                    _number(j.reply(0).outputs) for j in self.client.as_completed(jobs[5:], 90)
                ]
            ),
        ]

    async def _await(self, jobs: list[Any]) -> list[int]:
        replies = await asyncio.wait_for(asyncio.gather(*jobs), 90)
        return [_number(reply.outputs) for reply in replies]

    def close(self) -> None:
        self.client.close()
        self.infer.publisher.close()
        backend: Any = self.infer.backend
        backend.waiter.close()
        # Where Celery keeps the connections of what went through kombu.
        self.infer.app.pool.force_close_all()
        self.infer.app.close()


def _number(outputs: Any) -> int:
    return round(float(outputs["y"][0, 2]) / 2)


def cut_all(server: TestServer) -> None:
    with server.client() as client:
        for kind in ("normal", "pubsub") * 5:
            client.client_kill_filter(_type=kind, skipme=True)
            time.sleep(0.2)


def kill_and_start(server: TestServer) -> None:
    # The append-only file is written every second; what it does not hold yet is not promised.
    time.sleep(1.5)
    server.kill()
    time.sleep(5)
    server.start()


def freeze(server: TestServer) -> None:
    server.freeze()
    time.sleep(12)
    server.thaw()


@pytest.mark.parametrize(("fault", "most_starts"), [(cut_all, 1), (kill_and_start, 2), (freeze, 2)])
def test_all_that_wait_get_their_replies(
    broker: TestServer, config: Path, log: Path, fault: Any, most_starts: int
) -> None:
    with running_worker(broker, config), broker.client() as looking:
        looking.ping()
        our_own = connections(broker, os.getpid())
        asker = Asker(broker.url)
        with ThreadPoolExecutor(10) as pool:
            asked = asker.ask(pool, 1)
            wait_until(lambda: len(starts(log)) == 16, what="the starts")

            fault(broker)
            began_s = time.monotonic()
            asked += asker.ask(pool, 17)

            numbers = sorted(number for each in asked for number in each.result(90))
            print(f"all 32 after {time.monotonic() - began_s:.1f} s")
        assert numbers == list(range(1, 33))
        assert max(starts(log)[number] for number in range(1, 17)) <= most_starts
        asker.close()
        del asked

        def silent() -> bool:
            # Backends of threads that have ended are garbage in circles. We look through a
            # connection of our own, which the fault may have made us open anew.
            gc.collect()
            its = connections(broker, os.getpid()) - our_own
            return len(its) <= 1 and not channels(looking)

        wait_until(silent, what="the connections of the client to be gone", timeout_s=5)


def test_waits_outlast_an_outage(broker: TestServer) -> None:
    """Longer than the 20 s after which Celery's own consumer of results gives up."""
    settings = Settings(broker_url=broker.url)
    with waits(settings, timeout_s=60) as made:
        time.sleep(1)
        broker.kill()
        time.sleep(25)
        broker.start()
        with broker.client() as client:
            for wait in made:
                Answers(settings).store(client, wait)

        print(finish(made, within_s=10))


def test_a_client_that_is_killed_leaves_nothing_behind(
    broker: TestServer, config: Path, log: Path
) -> None:
    environ = {"FLEET_CLAIM_TTL_S": "3", "FLEET_FENCE_TTL_S": "12", "FLEET_RESULT_TTL_S": "12"}
    options = {"log": str(log), "batch_s": 0.2}
    with (
        config_folder({MODEL: {**SCRIPTED, "options": options}}) as quick,
        running_worker(broker, quick, environ=environ),
        broker.client() as client,
    ):
        dying = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed_client", "1000"],
            cwd=ROOT,
            env={
                **os.environ,
                **environ,
                "FLEET_BROKER_URL": broker.url,
                "PYTHONPATH": str(ROOT),
            },
            stdout=subprocess.PIPE,
        )
        assert dying.stdout is not None
        assert dying.stdout.readline()
        assert channels(client)
        theirs = connections(broker, dying.pid)
        left = sum(client.xlen(stream) for stream in Keys().streams(QUEUE))

        dying.send_signal(signal.SIGKILL)
        dying.wait(10)
        dying.stdout.close()

        print(f"{left} jobs unfinished at the kill")
        assert left >= 500
        assert len(theirs) >= 4
        wait_until(
            lambda: not theirs & {each["addr"] for each in client.client_list()},
            what="its connections to be gone",
        )
        assert not channels(client)
        wait_until(
            lambda: not sum(client.xlen(stream) for stream in Keys().streams(QUEUE)),
            what="the jobs to be done",
            timeout_s=60,
        )
        of_fleet = (*LASTING, "fleet:host:", "fleet:lease:")
        wait_until(
            lambda: not [key for key in client.keys("*") if not key.decode().startswith(of_fleet)],
            what="no key of it",
            timeout_s=20,
        )


def test_a_hundred_waits_of_threads_survive_a_restart(broker: TestServer, config: Path) -> None:
    asker = Asker(broker.url)
    got: list[int] = []

    def ask(number: int) -> None:
        result = asker.infer.delay(MODEL, {"x": row(argument=1, job=0)})
        result.get(timeout=60)
        got.append(number)

    with running_worker(broker, config, instances=2):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        broker.kill()
        time.sleep(2)
        broker.start()
        for thread in threads:
            thread.join(80)

    assert sorted(got) == list(range(100))
    asker.close()
