"""Redis blinks while a batch runs and a program waits for it: cut connections, a restart, a long
standstill; jobs and results on two servers, each by turns.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery.result import ResultSet

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.connections import channels, connections
from tests.support.engines import Do, row, started, starts
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    # Celery leaves the result backend of each thread that waits to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "scripted"
BATCH = 16
BATCH_S = 10
BLIP_AT_S = 3
REPEATS = 5
DOWN_S = 5
FROZEN_S = 70
#: The promise: what is sent after a blip is done within this.
RECOVERED_S = 60

Servers = Sequence[TestServer]


class Producer:
    """A program that sends one half of its jobs by Celery and the other by a Client, and waits for
    all of them.
    """

    def __init__(self, settings: Settings) -> None:
        self._app = make_app(settings)
        self._infer = register(self._app)
        self._client = Client(settings)
        self._threads = concurrent.futures.ThreadPoolExecutor(2)

    def send(self, first: int, *, slow_s: float = 0) -> Callable[[], None]:
        """Send BATCH jobs, the last of them slow; returns what waits until all are answered."""
        inputs = [{"x": row(job=first + n)} for n in range(BATCH)]
        inputs[-1] = {"x": row(Do.SLEEP, slow_s, job=first + BATCH - 1)}
        half = BATCH // 2
        results = ResultSet([self._infer.delay(MODEL, each) for each in inputs[:half]])
        jobs = self._client.submit_many(MODEL, inputs[half:])
        timeout_s = slow_s + FROZEN_S + RECOVERED_S
        waiting: list[concurrent.futures.Future[Any]] = [
            self._threads.submit(results.get, timeout=timeout_s),
            self._threads.submit(lambda: [job.reply(timeout_s) for job in jobs]),
        ]

        def wait() -> None:
            for future in waiting:
                future.result(timeout_s)

        return wait

    def close(self) -> None:
        self._threads.shutdown()
        self._client.close()
        self._infer.publisher.close()
        backend: Any = self._app.backend
        backend.waiter.close()
        self._app.close()


@pytest.fixture
def worker(broker: TestServer, results: TestServer, log: Path) -> Iterator[Worker]:
    # An idle instance would begin the first job alone before the others are sent.
    model = {**SCRIPTED, "max_batch_size": BATCH, "max_queue_delay_s": 1.0}
    models = {MODEL: {**model, "options": {"log": str(log)}}}
    environ = {"FLEET_RESULT_URL": results.url}
    with (
        config_folder(models) as config,
        running_worker(broker, config, environ=environ) as worker,
    ):
        yield worker


def held(servers: Servers) -> set[str]:
    """Return what this process is connected from, and what anybody but a worker listens on."""
    # Backends of threads that have ended are garbage in circles.
    gc.collect()
    found = set()
    for server in servers:
        found |= connections(server, os.getpid())
        with server.client() as client:
            found |= {name.decode() for name in channels(client)}
    return found


def blip_in_a_batch(servers: Servers, log: Path, blip: Callable[[], None], *, first: int) -> float:
    """Let a blip happen in the middle of a batch; returns how long what is sent after it takes."""
    broker, results = servers
    settings = Settings(broker_url=broker.url, result_url=results.url)
    with contextlib.closing(Producer(settings)) as producer:
        wait_for_first = producer.send(first, slow_s=BATCH_S)
        wait_until(lambda: starts(log).get(first), what="the start")
        assert started(log)[-1].rows == BATCH
        time.sleep(BLIP_AT_S)

        blip()

        began_s = time.monotonic()
        producer.send(first + BATCH)()
        took_s = time.monotonic() - began_s
        wait_for_first()
    return took_s


def blips(
    servers: Servers, log: Path, blip: Callable[[Servers], None], *, turns: Sequence[Servers]
) -> None:
    """Let each of ``turns`` blink in the middle of a batch; nothing may run twice, be waited for in
    vain, or stay connected.
    """
    took_s, before = [], held(servers)
    for turn, blinking in enumerate(turns):
        first = 2 * BATCH * turn + 1
        took_s.append(blip_in_a_batch(servers, log, lambda: blip(blinking), first=first))  # noqa: B023
        wait_until(lambda: held(servers) <= before, what="the producer's connections to be gone")

    print(f"{len(turns)} repeats; what was sent after was done within {max(took_s):.1f} s")
    assert max(took_s) < RECOVERED_S
    assert starts(log) == dict.fromkeys(range(1, 2 * BATCH * len(turns) + 1), 1)
    assert_all_ended(servers[0], MODEL)


def in_turn(broker: TestServer, results: TestServer) -> Sequence[Servers]:
    return [[broker], [results], [broker, results], [broker], [results]][:REPEATS]


def cut(servers: Servers) -> None:
    """End every connection: those of commands and those of subscriptions."""
    for server in servers:
        with server.client() as client:
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind)


def restart(servers: Servers) -> None:
    for server in servers:
        server.shut_down()
    time.sleep(DOWN_S)
    for server in servers:
        server.start()


def freeze(servers: Servers) -> None:
    for server in servers:
        server.freeze()
    time.sleep(FROZEN_S)
    for server in servers:
        server.thaw()


def test_every_connection_is_cut_in_the_middle_of_a_batch(
    broker: TestServer, results: TestServer, worker: Worker, log: Path
) -> None:
    blips([broker, results], log, cut, turns=[[broker, results]] * REPEATS)


def test_redis_is_shut_down_in_the_middle_of_a_batch(
    broker: TestServer, results: TestServer, worker: Worker, log: Path
) -> None:
    blips([broker, results], log, restart, turns=in_turn(broker, results))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_redis_stands_still_for_long_in_the_middle_of_a_batch(
    broker: TestServer, results: TestServer, worker: Worker, log: Path
) -> None:
    blips([broker, results], log, freeze, turns=in_turn(broker, results))
