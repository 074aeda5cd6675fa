"""Files of large arrays whose jobs Redis did not take: deleted where that is certain."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.blobs import Blobs, Named, again
from producer.contract.errors import BadRequest, Overloaded
from producer.contract.memory import is_full
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from tests.support.app import fleet_app
from tests.support.proxy import running_proxy
from tests.support.servers import TestServer, running_server

pytestmark = [pytest.mark.redis, pytest.mark.timeout(60)]

KEYS: Final = Keys()
STREAM: Final = KEYS.stream("fleet.m", Priority.NORMAL)
INPUTS: Final = {"a": np.zeros(1_000_000, np.uint8), "b": np.zeros(1_000_000, np.uint8)}
IN_A_MINUTE: Final = datetime.timedelta(minutes=1)

Way = Callable[[Settings], Any]


def by_client(settings: Settings) -> Any:
    with Client(settings) as fleet:
        yield lambda: fleet.submit("m", INPUTS)


def by_celery(settings: Settings) -> Any:
    eta = datetime.datetime.now(datetime.UTC) + IN_A_MINUTE
    with fleet_app(settings) as (_, infer):
        yield lambda: infer.apply_async(("m", INPUTS), eta=eta)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("fsspec")
    return tmp_path / "arrays"


@pytest.fixture
def emptied(client: redis.Redis) -> Iterator[redis.Redis]:
    yield client
    client.config_set("maxmemory", 0)
    client.flushall()


def settings_of(url: str, folder: Path) -> Settings:
    # A watermark that never holds anything back: many clients at once pass it as well.
    return Settings(broker_url=url, blob_url=folder.as_uri(), memory_watermark=1.0)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


@pytest.mark.parametrize("way", [by_client, by_celery])
def test_a_job_that_a_full_server_refuses_takes_its_files_along(
    server: TestServer, emptied: redis.Redis, folder: Path, way: Way
) -> None:
    for send in way(settings_of(server.url, folder)):
        send()
        before = files(folder)
        # Within the second for which its memory is taken for what it was.
        emptied.config_set("maxmemory", 1)

        with pytest.raises(Overloaded, match="takes no new jobs"):
            send()

        assert len(before) == 2
        assert files(folder) == before


def test_a_job_that_never_left_takes_its_files_along(folder: Path) -> None:
    with running_server() as server, Client(settings_of(server.url, folder)) as fleet:
        fleet.submit("m", INPUTS)
        before = files(folder)
        fleet._room.sending._infer.publisher.close()
        server.kill()

        with pytest.raises(OperationalError):
            fleet.submit("m", INPUTS)

        assert files(folder) == before


def test_a_job_of_which_nobody_knows_whether_it_was_taken_keeps_its_files(
    server: TestServer, emptied: redis.Redis, folder: Path
) -> None:
    with running_proxy(server.port) as proxy, Client(settings_of(proxy.url, folder)) as fleet:
        fleet.submit("m", INPUTS)
        proxy.swallow, proxy.refusing = b"XADD", True

        with pytest.raises(OperationalError):
            fleet.submit("m", INPUTS)

        assert emptied.xlen(STREAM) == 2
        assert len(files(folder)) == 4


def test_a_bad_job_and_those_behind_it_leave_no_file(
    server: TestServer, emptied: redis.Redis, folder: Path
) -> None:
    many: list[Any] = [INPUTS, {"a": np.zeros(70_000, np.uint8), "b": object()}, INPUTS]

    with Client(settings_of(server.url, folder)) as fleet, pytest.raises(BadRequest):
        fleet.submit_many("m", many)

    entries: Any = emptied.xrange(STREAM)
    ((_, fields),) = entries
    assert set(Named.read(fields[b"blobs"]).ids) == files(folder)


def test_what_is_sent_again_to_a_server_that_is_full_by_then_leaves_the_first_its_arrays(
    emptied: redis.Redis,
) -> None:
    way = Blobs.of(Settings())
    commands = way.commands(way.pack(INPUTS), ["XADD", STREAM, "*", "a", 1], ttl_s=9)
    for command in commands:
        emptied.execute_command(*command)
    emptied.config_set("maxmemory", "1mb")

    with pytest.raises(redis.ResponseError) as refusal:
        emptied.execute_command(*again(commands[-1]))

    assert is_full(refusal.value)
    assert len([*emptied.scan_iter(f"{KEYS.blob('')}*", count=1000)]) == 2


def test_fleets_of_one_server_put_the_files_of_their_jobs_where_each_of_them_says(
    server: TestServer, emptied: redis.Redis, folder: Path
) -> None:
    folders = [folder / "one", folder / "two"]

    for each in folders:
        for send in by_celery(settings_of(server.url, each)):
            send()

    assert [len(files(each)) for each in folders] == [2, 2]
