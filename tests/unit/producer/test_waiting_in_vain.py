"""Many whose waits are over at once: what they are told costs one question, and few seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from producer.client import Client, Job
from producer.contract import errors
from producer.contract.patience import Patience
from tests.support.servers import TestServer

pytestmark = pytest.mark.redis

MANY = 100
#: Who waits for less is not told.
WAIT_S = 1.1


def sent(fleet: Client) -> list[Job]:
    return fleet.submit_many("digits", [{"image": np.ones((1, 4), np.float32)}] * MANY)


def why(job: Job) -> str:
    with pytest.raises(errors.JobTimeout) as told:
        job.reply(WAIT_S)
    return str(told.value)


async def all_in_vain(jobs: list[Job]) -> list[Any]:
    waits = (job.reply_within(Patience(WAIT_S, 9)) for job in jobs)
    return await asyncio.gather(*waits, return_exceptions=True)


def test_one_of_many_asks_for_all(fleet: Client, client: Any) -> None:
    jobs = sent(fleet)
    before = client.info("stats")["total_connections_received"]

    with ThreadPoolExecutor(MANY) as pool:
        told = list(pool.map(why, jobs))

    assert all("No worker runs" in each for each in told)
    # One more asks where threads are seconds late.
    assert client.info("stats")["total_connections_received"] - before < MANY // 10


def test_many_waits_that_are_over_together_end_in_time_whatever_the_loops_threads_do(
    fleet: Client, client: Any
) -> None:
    free = threading.Event()

    async def ask() -> float:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(free.wait, 20))
        began_s = time.monotonic()
        waits = [fleet.infer("digits", {"i": 1}, timeout_s=1.1) for _ in range(100)]
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert "No worker runs at the moment" in str(error)
        took_s = time.monotonic() - began_s
        free.set()
        await busy
        return took_s

    before = client.info("stats")["total_connections_received"]

    took_s = asyncio.run(ask())

    assert took_s < 15
    # One of them asked for all.
    assert client.info("stats")["total_connections_received"] - before < 50


def test_coroutines_do_not_wait_one_after_the_other_for_words_that_do_not_come(
    fleet: Client, server: TestServer
) -> None:
    jobs = sent(fleet)

    server.freeze()
    try:
        began_s = time.monotonic()
        ended = asyncio.run(all_in_vain(jobs))
        took_s = time.monotonic() - began_s
    finally:
        server.thaw()

    assert {type(each) for each in ended} == {errors.JobTimeout}
    # Half a second each, in a loop's few threads, would be ten.
    assert took_s < WAIT_S + 3
