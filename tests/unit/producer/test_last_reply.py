"""A process that ends right after its last reply has deleted what it read."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from producer.contract.app import make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.worker import ROOT
from tests.unit.producer.conftest import Worker

pytest.importorskip("fsspec")

pytestmark = pytest.mark.redis

KEYS: Final = Keys()
#: An app on a folder that takes its time to delete files, as buckets do.
APP: Final = """
import sys, time
import fsspec
from fsspec.implementations.local import LocalFileSystem
from producer.client import Client

class Slow(LocalFileSystem):
    protocol = "slow"

    def rm_file(self, path):
        time.sleep(float(sys.argv[1]))
        super().rm_file(path)

fsspec.register_implementation("slow", Slow)
{body}
"""
READS: Final = "Client().submit('digits', {'i': 1}).reply(20)"
FORKED: Final = """
import multiprocessing
def read():
    Client().submit('digits', {'i': 1}).reply(20)
child = multiprocessing.get_context("fork").Process(target=read)
child.start()
child.join()
"""
CLOSES: Final = """
with Client() as client:
    for job in client.as_completed(client.submit_many("digits", [{"i": 1}, {"i": 2}])):
        job.reply(0)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "arrays"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def worker(settings: Settings, store: Path) -> Iterator[Worker]:
    """A worker that answers with a large array."""
    its = dataclasses.replace(settings, blob_url=store.as_uri())
    with make_app(its) as app:
        worker = Worker(its, app, ("fleet.digits",))
        worker.answer = lambda call: {"y": np.ones((1, 100_000), np.uint8)}
        worker.start()
        yield worker
        worker.stop()


def run(settings: Settings, store: Path, body: str, *, removes_in_s: float) -> float:
    """Run an app to its end; return how long that took."""
    environ = {
        "FLEET_BROKER_URL": settings.broker_url,
        "FLEET_BLOB_URL": f"slow://{store}",
        "PYTHONPATH": str(ROOT),
    }
    began_s = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", APP.replace("{body}", body), str(removes_in_s)],
        env={**os.environ, **environ},
        timeout=40,
        check=True,
    )
    return time.monotonic() - began_s


@pytest.mark.parametrize("body", [READS, CLOSES, FORKED], ids=["reads", "closes", "forked"])
def test_nothing_that_was_read_is_left(
    settings: Settings, store: Path, worker: Worker, client: Any, body: str
) -> None:
    run(settings, store, body, removes_in_s=0.3)

    assert worker.messages
    assert not list(store.iterdir())
    assert not client.keys(KEYS.result("*"))


def test_a_store_that_stands_still_does_not_hold_up_the_end(
    settings: Settings, store: Path, client: Any
) -> None:
    quick_s = run(settings, store, READS, removes_in_s=0)

    slow_s = run(settings, store, READS, removes_in_s=30)

    assert len(list(store.iterdir())) == 1
    assert not client.keys(KEYS.result("*"))
    # A busy machine needs longer than the second and a half for the rest.
    assert slow_s < quick_s + 10
