"""Event loops that await hundreds of jobs, and a client that has had a hundred thousand."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from producer.client import Client
from producer.contract import errors
from producer.contract.names import Keys, queue_of
from producer.contract.settings import Settings
from tests.chaos.processes import memory_bytes
from tests.support.connections import channels, connections
from tests.support.engines import row, starts
from tests.support.loop_lag import loop_lag, p99_s, told
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

MODEL = "scripted"
BATCH_S = 0.1
AT_ONCE, ROUNDS = 200, 5
LAG_S: Final = 0.02
LARGE, LARGE_LAG_S = 5, 0.3
MANY: Final = 100_000
#: What a process may grow by: pieces of memory that it freed and the system has not got back.
GROWTH_BYTES: Final = 10_000_000

#: Keys of the fleet that outlive all jobs.
LASTING: Final = (
    *("fleet:stream:", "fleet:models", "fleet:worker", "fleet:host:", "fleet:lease:", "_kombu."),
)


@pytest.fixture
def worker(broker: TestServer, log: Path) -> Iterator[Worker]:
    options = {"log": str(log), "batch_s": BATCH_S}
    with (
        config_folder({MODEL: {**SCRIPTED, "options": options, "max_batch_size": 64}}) as config,
        running_worker(broker, config) as worker,
    ):
        yield worker


@pytest.fixture
def settings(broker: TestServer) -> Settings:
    return Settings(broker_url=broker.url)


def shared(settings: Settings) -> Callable[[], Client]:
    client = Client(settings)
    return lambda: client


def one_each(settings: Settings) -> Callable[[], Client]:
    return lambda: Client(settings)


@pytest.mark.parametrize("clients", [shared, one_each])
def test_two_hundred_awaits_do_not_block_the_loop(
    settings: Settings, worker: Worker, clients: Callable[[Settings], Callable[[], Client]]
) -> None:
    client = clients(settings)

    async def ask(number: int) -> float:
        reply = await client().infer(MODEL, {"x": row(argument=number, job=1)}, timeout_s=60)
        return float(reply.outputs["y"][0, 1])

    async def serve() -> None:
        async with loop_lag() as idle_s:
            await asyncio.sleep(1)
        async with loop_lag() as late_s:
            for _ in range(ROUNDS):
                found = await asyncio.gather(*(ask(number) for number in range(AT_ONCE)))
                assert found == [2.0 * number for number in range(AT_ONCE)]
        print(f"idle: {told(idle_s)}; {AT_ONCE} awaits: {told(late_s)}; load {os.getloadavg()[0]}")
        assert p99_s(late_s) < LAG_S

    asyncio.run(serve())


def test_twenty_megabytes_do_not_block_the_loop(settings: Settings, worker: Worker) -> None:
    large = np.zeros(5_000_000, np.float32)

    async def ask(client: Client) -> None:
        # The model has no input `more`; it says so when it has read all of them.
        with pytest.raises(errors.BadRequest):
            await client.infer(MODEL, {"x": row(), "more": large}, timeout_s=60)

    async def serve(client: Client) -> None:
        async with loop_lag() as late_s:
            await asyncio.gather(*(ask(client) for _ in range(LARGE)))
        print(f"{LARGE} jobs of 20 MB: {told(late_s)}; load {os.getloadavg()[0]}")
        # A copy in another thread keeps Python's lock, and no longer.
        assert max(late_s) < LARGE_LAG_S

    with Client(settings) as client:
        asyncio.run(serve(client))


def test_who_gives_up_leaves_nothing_behind(
    settings: Settings, broker: TestServer, worker: Worker, log: Path
) -> None:
    """Each waits for less time than the queue takes, and most of the jobs need not run."""

    async def ask(client: Client, number: int) -> None:
        await client.infer(MODEL, {"x": row(job=number)}, timeout_s=0.7)

    async def serve(client: Client) -> list[Any]:
        calls = (ask(client, number) for number in range(1, AT_ONCE * 2 + 1))
        return await asyncio.gather(*calls, return_exceptions=True)

    with broker.client() as looking, Client(settings) as client:
        ended = asyncio.run(serve(client))

        wait_until(
            lambda: not sum(looking.xlen(key) for key in Keys().streams(queue_of(MODEL))),
            what="an empty queue",
        )
        wait_until(lambda: not _of_jobs(looking), what="no key of a job")
        ran = len(starts(log))

    given_up = [each for each in ended if each is not None]
    print(f"{len(given_up)} of {len(ended)} gave up; {ran} jobs ran; load {os.getloadavg()[0]}")
    assert given_up
    assert {type(each) for each in given_up} == {errors.JobTimeout}
    assert len(ended) - len(given_up) <= ran < len(ended)


def _of_jobs(looking: Any) -> list[str]:
    """Return the keys that are there because of jobs; fences end by themselves within a minute."""
    keys = [key.decode() for key in looking.keys("*")]
    return [key for key in keys if not key.startswith((*LASTING, "fleet:fence:"))]


def test_a_hundred_thousand_jobs_leave_all_as_it_was(
    settings: Settings, broker: TestServer, worker: Worker
) -> None:
    with broker.client() as looking:
        looking.ping()
        before = _connections(broker)
        with Client(settings) as client:
            # The first time it takes memory from the system, and Python keeps that.
            _round_trip(client)
            idle = _connections(broker), channels(looking)
            first = _memory()
            began_s = time.monotonic()

            _round_trip(client)

            took_s = time.monotonic() - began_s
            wait_until(lambda: _memory()[0] - first[0] < 2000, what="the memory as before")
            last = _memory()
            assert (_connections(broker), channels(looking)) == idle
        wait_until(lambda: _connections(broker) == before, what="the connections to end")
        assert not channels(looking)

    print(
        f"{MANY} jobs in {took_s:.0f} s; connections before {before}, with the client {idle[0]}; "
        f"{last[0] - first[0]:+} blocks, {last[1] - first[1]:+} bytes; load {os.getloadavg()[0]}"
    )
    assert last[1] - first[1] < GROWTH_BYTES


def _round_trip(client: Client) -> None:
    jobs = client.submit_many(MODEL, [{"x": row()}] * MANY)
    assert sum(1 for _ in client.as_completed(jobs, timeout_s=200)) == MANY


def _connections(broker: TestServer) -> int:
    """Return how many connections this process has to the server."""
    gc.collect()
    return len(connections(broker, os.getpid()))


def _memory() -> tuple[int, int]:
    """Return the allocated blocks of Python and the resident bytes of this process."""
    gc.collect()
    return sys.getallocatedblocks(), memory_bytes(os.getpid()) or 0
