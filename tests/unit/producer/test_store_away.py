"""A wait goes on while the folder or bucket of large arrays fails, and never beyond its time."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import JobTimeout
from producer.contract.patience import Patience
from producer.contract.settings import Settings
from producer.tasks import Infer
from tests.support.waiting import wait_until
from tests.unit.producer.conftest import Worker

pytest.importorskip("fsspec")

pytestmark = pytest.mark.redis

LARGE: Final = np.ones((1, 100_000), np.uint8)
FAILED: Final = r"\(FLEET_BLOB_URL\) failed"
SILENT: Final = r"\(FLEET_BLOB_URL\) does not answer"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The folder that the worker writes to."""
    folder = tmp_path / "arrays"
    folder.mkdir()
    return folder


@pytest.fixture
def way(tmp_path: Path) -> Path:
    """The app's way to the folder: a file lies there, so that it fails at once."""
    way = tmp_path / "way"
    way.touch()
    return way


def mend(way: Path, store: Path) -> None:
    way.unlink()
    way.symlink_to(store)


@pytest.fixture
def settings(settings: Settings, way: Path) -> Settings:
    return dataclasses.replace(settings, blob_url=way.as_uri())


@pytest.fixture
def worker(settings: Settings, store: Path) -> Iterator[Worker]:
    its = dataclasses.replace(settings, blob_url=store.as_uri())
    with make_app(its) as app:
        worker = Worker(its, app, ("fleet.digits",))
        worker.answer = lambda call: {"y": LARGE}
        worker.start()
        yield worker
        worker.stop()


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Client]:
    with Client(settings) as fleet:
        yield fleet


def test_get_goes_on_through_a_failure_of_the_store(
    infer: Infer, worker: Worker, way: Path, store: Path
) -> None:
    mender = threading.Timer(1.2, mend, (way, store))
    mender.start()

    outputs = infer.delay("digits", {"i": 1}).get(timeout=15)

    mender.join()
    np.testing.assert_array_equal(outputs["y"], LARGE)


def test_a_get_that_ends_meanwhile_says_that_the_store_failed(
    infer: Infer, fleet: Client, worker: Worker
) -> None:
    result = infer.delay("digits", {"i": 1})
    began_s = time.monotonic()

    with pytest.raises(CeleryTimeoutError, match=FAILED):
        result.get(timeout=1)
    with pytest.raises(JobTimeout, match=FAILED):
        list(fleet.as_completed([result], timeout_s=0.2))
    assert time.monotonic() - began_s < 3


def test_a_job_whose_reply_cannot_be_read_says_that_the_store_failed(
    fleet: Client, worker: Worker, way: Path, store: Path
) -> None:
    job = fleet.submit("digits", {"i": 1})

    with pytest.raises(JobTimeout, match=FAILED):
        job.reply(1)
    with pytest.raises(JobTimeout, match=FAILED):
        asyncio.run(job.reply_within(Patience(0.1, 0)))
    with pytest.raises(JobTimeout, match=FAILED):
        list(fleet.as_completed([job], timeout_s=0.1))
    with pytest.raises(JobTimeout, match=FAILED):
        asyncio.run(fleet.infer("digits", {"i": 1}, timeout_s=1))
    mend(way, store)
    np.testing.assert_array_equal(job.reply(10).outputs["y"], LARGE)


def test_a_store_that_does_not_answer_holds_no_get_beyond_its_time(
    infer: Infer, worker: Worker, way: Path, store: Path
) -> None:
    result = infer.delay("digits", {"i": 1})
    wait_until(lambda: result.backend.client.exists(f"celery-task-meta-{result.id}"), what="reply")
    (file,) = store.iterdir()
    data = file.read_bytes()
    # Whoever opens it waits until somebody writes.
    file.unlink()
    os.mkfifo(file)
    mend(way, store)
    began_s = time.monotonic()

    with pytest.raises(CeleryTimeoutError, match=SILENT):
        result.get(timeout=1.2)

    assert time.monotonic() - began_s < 3
    # The read that waits ends with nothing.
    os.close(os.open(file, os.O_WRONLY))
    file.unlink()
    file.write_bytes(data)
    np.testing.assert_array_equal(result.get(timeout=5)["y"], LARGE)
