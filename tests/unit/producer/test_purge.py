"""What a purge of a queue deletes, large arrays and all, and what it leaves."""

from __future__ import annotations

import dataclasses
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from producer.contract.app import FleetApp, make_app
from producer.contract.blobs import Blobs, Named
from producer.contract.names import GROUP, Keys, Priority
from producer.contract.settings import Settings, redis_client
from producer.purge import purge
from producer.tasks import Infer, register
from tests.support.commands import CELERY, run_command
from tests.support.waiting import wait_until

pytestmark = pytest.mark.redis

KEYS: Final = Keys()
QUEUE: Final = "fleet.digits"
NORMAL: Final = KEYS.stream(QUEUE, Priority.NORMAL)
INPUTS: Final = {"image": [[1.0]]}
#: Larger than what stays in a message.
LARGE: Final = {"image": np.ones((1, 20_000), np.float32)}


@pytest.fixture(params=["in Redis", "in a folder"])
def kept(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> Settings:
    """Settings that keep large arrays in each of both places."""
    url = (tmp_path / "arrays").as_uri() if request.param == "in a folder" else ""
    return dataclasses.replace(settings, blob_url=url)


@pytest.fixture
def large(kept: Settings) -> Iterator[Infer]:
    """``infer`` of an app with these settings."""
    app: FleetApp = make_app(kept)
    task = register(app)
    yield task
    task.publisher.close()
    app.close()


def arrays(client: Any, kept: Settings) -> set[str]:
    """Return the ids of the large arrays there are."""
    in_redis = (key.decode().removeprefix(KEYS.blob("")) for key in client.keys(KEYS.blob("*")))
    folder = Path(kept.blob_url.removeprefix("file://")) if kept.blob_url else None
    in_files = (file.name for file in folder.iterdir()) if folder and folder.is_dir() else ()
    return {*in_redis, *in_files}


def ids_of(entry: tuple[Any, dict[bytes, bytes]]) -> set[str]:
    return set(Named.read(entry[1][b"blobs"]).ids)


@pytest.mark.scripts
def test_a_purge_deletes_what_waits_and_leaves_what_is_claimed(
    infer: Infer, settings: Settings, client: Any
) -> None:
    for _ in range(410):
        infer.delay("digits", INPUTS)
    infer.apply_async(("digits", INPUTS), countdown=60)
    client.xgroup_create(NORMAL, GROUP, id="0")
    client.xreadgroup(GROUP, "node/0/1.1", {NORMAL: ">"}, count=3)
    given_back = client.xreadgroup(GROUP, "free", {NORMAL: ">"}, count=2)[0][1]

    assert purge(client, Blobs.of(settings), QUEUE) == 408

    assert client.xlen(NORMAL) == 3
    assert client.xpending(NORMAL, GROUP)["pending"] == 3
    assert not client.xrange(NORMAL, given_back[0][0], given_back[0][0])
    assert not client.exists(KEYS.delayed(QUEUE))


@pytest.mark.scripts
def test_no_record_of_a_start_is_left_of_a_job_that_is_purged(
    infer: Infer, settings: Settings, client: Any
) -> None:
    started, sent_again = infer.delay("digits", INPUTS).id, infer.delay("digits", INPUTS).id
    client.xgroup_create(NORMAL, GROUP, id="0")
    ((_, (entry, _)),) = client.xreadgroup(GROUP, "free", {NORMAL: ">"}, count=2)
    records = {
        started: f"{NORMAL} {entry[0].decode()} 1 - -",
        # Of another entry, which lives.
        sent_again: f"{NORMAL} 1-1 1 - node/0/1.1",
    }
    client.hset(KEYS.journal(QUEUE), mapping=records)

    assert purge(client, Blobs.of(settings), QUEUE) == 2

    assert client.hkeys(KEYS.journal(QUEUE)) == [sent_again.encode()]


@pytest.mark.scripts
def test_large_arrays_go_with_the_jobs_that_are_purged(
    large: Infer, kept: Settings, client: Any
) -> None:
    for _ in range(3):
        large.delay("digits", LARGE)
    large.apply_async(("digits", LARGE), countdown=60)
    client.xgroup_create(NORMAL, GROUP, id="0")
    ((_, (claimed,)),) = client.xreadgroup(GROUP, "node/0/1.1", {NORMAL: ">"}, count=1)
    client.xreadgroup(GROUP, "free", {NORMAL: ">"}, count=1)
    assert len(arrays(client, kept)) == 4

    assert purge(client, Blobs.of(kept), QUEUE) == 3

    assert arrays(client, kept) == ids_of(claimed)


@pytest.mark.scripts
def test_the_arrays_that_a_dead_letter_needs_stay(
    large: Infer, kept: Settings, client: Any
) -> None:
    for _ in range(2):
        large.delay("digits", LARGE)
    buried, _ = client.xrange(NORMAL)
    (blob_id,) = ids_of(buried)
    client.set(KEYS.kept_blob(blob_id), 1, ex=60)

    assert purge(client, Blobs.of(kept), QUEUE) == 2

    assert arrays(client, kept) == {blob_id}


@pytest.mark.scripts
def test_a_full_server_is_purged_and_what_cannot_be_read_as_well(
    large: Infer, kept: Settings, client: Any
) -> None:
    large.delay("digits", LARGE)
    client.zadd(KEYS.delayed(QUEUE), {b"\xc1no message": 0, b"": 0})
    client.xadd(NORMAL, {"blobs": "no array"})
    client.config_set("maxmemory", 1)
    try:
        assert purge(client, Blobs.of(kept), QUEUE) == 4
    finally:
        client.config_set("maxmemory", 0)

    assert not arrays(client, kept)
    assert not client.xlen(NORMAL)
    assert not client.exists(KEYS.delayed(QUEUE))


@pytest.mark.parametrize("kept", ["in a folder"], indirect=True)
def test_a_long_queue_is_purged_in_the_memory_of_a_short_one(
    large: Infer, kept: Settings, client: Any
) -> None:
    def peak_bytes(jobs: int) -> int:
        for _ in range(jobs):
            large.delay("digits", LARGE)
        tracemalloc.start()
        try:
            assert purge(client, Blobs.of(kept), QUEUE) == jobs
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(100)

    assert peak_bytes(700) < 2 * peak_bytes(200)
    assert not arrays(client, kept)


def test_a_purge_ends_while_others_send_faster_than_it_deletes(
    settings: Settings, client: Any
) -> None:
    ended = threading.Event()

    def send_faster() -> None:
        with (
            redis_client(settings.broker_url) as sender,
            sender.pipeline(transaction=False) as pipe,
        ):
            until_s = time.monotonic() + 3
            while not ended.is_set() and time.monotonic() < until_s:
                for _ in range(2000):
                    pipe.xadd(NORMAL, {"body": b""})
                pipe.execute()

    client.xadd(NORMAL, {"body": b""})
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(send_faster)
        wait_until(lambda: client.xlen(NORMAL) >= 2000, what="jobs to be sent")

        purge(client, Blobs.of(settings), QUEUE)

        assert not sending.done()
        ended.set()
        sending.result()


def test_celerys_own_command_purges_a_queue_of_the_fleet(
    large: Infer, kept: Settings, client: Any
) -> None:
    for _ in range(2):
        large.delay("digits", LARGE)
    environ = {"FLEET_BROKER_URL": kept.broker_url, "FLEET_BLOB_URL": kept.blob_url}
    environ = {name: value for name, value in environ.items() if value}

    said = run_command(*CELERY, "purge", "-f", "-Q", QUEUE, **environ)

    assert "Purged 2 messages" in said.stdout, said.stderr
    assert not arrays(client, kept)
