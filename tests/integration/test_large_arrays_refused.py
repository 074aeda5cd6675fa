"""A full Redis and the large arrays of jobs it does not take: nothing of them stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract.blobs import Blobs
from producer.contract.errors import Overloaded
from producer.contract.memory import is_full
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.servers import TestServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

KEYS: Final = Keys()
NBYTES: Final = 1_000_000
#: Two large arrays: one may have had room where the other has none.
INPUTS: Final = {"a": np.zeros(NBYTES, np.uint8), "b": np.zeros(NBYTES, np.uint8)}


@pytest.fixture
def small(client: redis.Redis) -> Iterator[redis.Redis]:
    """Return a client of a server that has room for a few jobs."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 7 * NBYTES)
    yield client
    client.config_set("maxmemory", 0)
    client.flushall()


def blobs(client: redis.Redis) -> list[Any]:
    return list(client.scan_iter(f"{KEYS.blob('')}*", count=1000))


def test_arrays_of_refused_jobs_leave_the_memory_to_jobs(
    server: TestServer, small: redis.Redis
) -> None:
    # A watermark that never holds anything back: many clients at once pass it as well.
    settings = Settings(broker_url=server.url, memory_watermark=1.0)
    taken = 0

    with Client(settings) as fleet:
        for _ in range(20):
            try:
                fleet.submit("m", INPUTS)
            except Overloaded:
                continue
            taken += 1

    assert 0 < taken < 20
    assert len(blobs(small)) == 2 * taken


def test_a_job_that_a_full_server_refuses_takes_its_arrays_along(client: redis.Redis) -> None:
    way = Blobs.of(Settings())
    *arrays, send = way.commands(way.pack(INPUTS), ["XADD", "fleet:x", "*", "a", 1], ttl_s=9)
    for command in arrays:
        client.execute_command(*command)

    client.config_set("maxmemory", "1mb")
    try:
        with pytest.raises(redis.ResponseError) as refusal:
            client.execute_command(*send)
    finally:
        client.config_set("maxmemory", 0)

    assert is_full(refusal.value)
    assert not blobs(client)


def test_a_job_that_is_held_back_leaves_no_file(
    server: TestServer, small: redis.Redis, tmp_path: Path
) -> None:
    settings = Settings(
        broker_url=server.url, blob_url=f"file://{tmp_path}/arrays", memory_watermark=0.01
    )

    with Client(settings) as fleet, pytest.raises(Overloaded):
        fleet.submit("m", INPUTS)

    assert not list(tmp_path.rglob("*"))
