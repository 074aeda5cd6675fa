"""Large arrays where results have a server of their own, and in a folder in place of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.errors import ArrayMissing, ConfigError, JobTimeout
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.contract.store import Store
from tests.support.app import fleet_app
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker
from workers.preflight import _check_store

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

KEYS = Keys()
MODEL = "wide"
WIDTH = 262_144
INPUTS = {"x": np.arange(WIDTH, dtype=np.float32).reshape(1, WIDTH) / WIDTH}


@pytest.fixture(scope="module")
def wide() -> Iterator[Path]:
    with config_folder({MODEL: {**SCRIPTED, "options": {"width": WIDTH}}}) as config:
        yield config


def blobs(client: redis.Redis) -> list[Any]:
    return list(client.scan_iter(f"{KEYS.blob('')}*", count=1000))


def test_replies_lie_with_their_arrays_on_the_server_of_the_results(
    server: TestServer, client: redis.Redis, wide: Path
) -> None:
    with running_server() as apart, apart.client() as results:
        environ = {"FLEET_RESULT_URL": apart.url}
        settings = Settings(broker_url=server.url, result_url=apart.url)
        with running_worker(server, wide, environ=environ), Client(settings) as fleet:
            reply = fleet.submit(MODEL, INPUTS).reply(timeout_s=30)
            np.testing.assert_array_equal(reply.outputs["y"], INPUTS["x"] * 2)
            wait_until(lambda: not blobs(client) + blobs(results), what="no array to be left")

            with fleet_app(settings) as (_, infer):
                answer = infer.delay(MODEL, INPUTS).get(timeout=30)
            np.testing.assert_array_equal(answer["y"], INPUTS["x"] * 2)
            assert len(blobs(results)) == 1
            wait_until(lambda: not blobs(client), what="no array to be left of the job")


def test_arrays_in_a_folder_are_gone_with_their_job_and_its_reply(
    server: TestServer, client: redis.Redis, wide: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    folder = tmp_path / "arrays"
    url = folder.as_uri()
    settings = Settings(broker_url=server.url, blob_url=url)
    with running_worker(server, wide, environ={"FLEET_BLOB_URL": url}), Client(settings) as fleet:
        job = fleet.submit(MODEL, INPUTS)
        np.testing.assert_array_equal(job.reply(timeout_s=30).outputs["y"], INPUTS["x"] * 2)
        wait_until(lambda: not list(folder.iterdir()), what="no file to be left")

        fleet.submit(MODEL, INPUTS, job_id=job.id)
        wait_until(lambda: not list(folder.iterdir()), what="no file to be left of the copy")

        lost = Settings(broker_url=server.url, blob_url=(tmp_path / "elsewhere").as_uri())
        with Client(lost) as elsewhere, pytest.raises(ArrayMissing, match="FLEET_BLOB_URL"):
            elsewhere.submit(MODEL, INPUTS).reply(timeout_s=30)
    assert not blobs(client)


def test_an_id_names_no_file_but_its_own(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "secret").write_text("x")
    store = Store((tmp_path / "arrays").as_uri())

    store.write({"a" * 32: memoryview(b"elements"), "b" * 32: b"others"})
    read = store.read(["a" * 32, "c" * 32])
    store.remove(["a" * 32, "c" * 32])

    assert read == {"a" * 32: b"elements", "c" * 32: None}
    assert [file.name for file in (tmp_path / "arrays").iterdir()] == ["b" * 32]


def test_files_of_a_folder_that_is_away_are_not_taken_for_gone(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    folder = tmp_path / "arrays"
    store = Store(folder.as_uri())
    store.write({"a" * 32: b"elements"})
    aside = folder.rename(tmp_path / "aside")

    with pytest.raises(OperationalError, match="FLEET_BLOB_URL"):
        store.read(["a" * 32])
    with pytest.raises(OperationalError, match="FLEET_BLOB_URL"):
        store.write({"b" * 32: b"others"})

    aside.rename(folder)
    assert store.read(["a" * 32, "b" * 32]) == {"a" * 32: b"elements", "b" * 32: None}


def test_a_server_of_files_that_is_away_says_no_password() -> None:
    pytest.importorskip("fsspec")

    with pytest.raises(OperationalError, match="ConnectionRefusedError") as refusal:
        Store("ftp://ana:secret@127.0.0.1:1/arrays")

    assert "secret" not in str(refusal.value)
    with pytest.raises(ConfigError, match="FLEET_BLOB_URL"):
        _check_store("ftp://ana:secret@127.0.0.1:1/arrays")


def test_a_folder_that_fails_for_a_while_costs_no_reply(
    server: TestServer, client: redis.Redis, wide: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "arrays"
    settings = Settings(broker_url=server.url, blob_url=f"file://{folder}")
    with running_worker(server, wide, environ={"FLEET_BLOB_URL": settings.blob_url}):
        with fleet_app(settings) as (_, infer):
            result = infer.delay(MODEL, INPUTS)
            wait_until(lambda: client.exists(KEYS.result(result.id)), what="the result")
        wait_until(lambda: len([*folder.iterdir()]) == 1, what="the reply's array alone")
        aside = folder.rename(tmp_path / "aside")
        # Nothing can be read or written, as where a mount is away.
        folder.write_text("no folder")

        with Client(settings) as fleet:
            with pytest.raises(JobTimeout):
                list(fleet.as_completed([result.id], timeout_s=0.5))
            folder.unlink()
            aside.rename(folder)
            (job,) = fleet.as_completed([result.id], timeout_s=10)

        np.testing.assert_array_equal(job.reply(0).outputs["y"], INPUTS["x"] * 2)


def test_a_file_that_cannot_be_read_costs_its_own_job_alone(
    server: TestServer, client: redis.Redis, wide: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "arrays"
    settings = Settings(broker_url=server.url, blob_url=f"file://{folder}")
    with Client(settings) as fleet:
        bad = fleet.submit(MODEL, INPUTS)
        (file,) = folder.iterdir()
        file.unlink()
        file.mkdir()
        good = [fleet.submit(MODEL, INPUTS) for _ in range(3)]

        with running_worker(server, wide, environ={"FLEET_BLOB_URL": settings.blob_url}) as worker:
            with pytest.raises(ArrayMissing, match=r"cannot be read.*blob\.unreadable"):
                bad.reply(timeout_s=20)
            for job in good:
                np.testing.assert_array_equal(job.reply(20).outputs["y"], INPUTS["x"] * 2)
            assert "blob.unreadable" in worker.log()
            assert "IsADirectoryError" in worker.log()
