"""A clone that is updated under a worker that runs: what it cannot speak to it does not start, and
says so; its other instances go on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, Worker, alive, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
RESTART = "this worker's code has changed on disk since it was started: restart the worker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("updated")


@pytest.fixture(scope="module")
def clone(folder: Path) -> Path:
    """Return a clone of one's own, for it is updated."""
    for package in ("workers", "producer", "tests/support"):
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / "clone" / package, ignore=without)
    return folder / "clone"


@pytest.fixture(scope="module")
def worker(server: TestServer, folder: Path, clone: Path) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    model = {**SCRIPTED, "max_batch_size": 1, "options": {"log": str(folder / "starts.log")}}
    with (
        config_folder({MODEL: model}) as config,
        running_worker(server, config, node="updated", instances=2, clone=clone) as running,
    ):
        yield running


@contextlib.contextmanager
def updated(path: Path, before: str, after: str) -> Iterator[None]:
    """Have other text in a file for the length of the block."""
    text = path.read_text(encoding="utf-8")
    assert before in text
    path.write_text(text.replace(before, after), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def killed_with_a_job(worker: Worker, app: Client, job: int, log: Path) -> Any:
    """Kill the instance that runs a job; return the job."""
    sent = app.submit(MODEL, {"x": row(Do.SLEEP, 0.5, job=job)})
    wait_until(lambda: starts(log).get(job) == 1, what="its start")
    pid = next(
        int(line.split()[2]) for line in log.read_text().splitlines() if f"start {job} " in line
    )
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(pid), what="its death")
    return sent


def broken(worker: Worker) -> dict[str, Any] | None:
    return next((each for each in worker.instances() if each["state"] == "broken"), None)


@pytest.mark.parametrize(
    ("update", "how"),
    [
        pytest.param(
            ("workers/hello.py", "    log_level: str\n", "    log_level: str\n    more: str\n"),
            "no process can be started: ",
            id="another protocol",
        ),
        pytest.param(
            ("workers/loading.py", "logger = ", "import nothing_of_this_name\n\nlogger = "),
            "exited with status 1 (",
            id="code that the environment lacks something for",
        ),
    ],
)
def test_a_worker_whose_code_was_updated_says_so_when_an_instance_dies_and_goes_on(
    worker: Worker, clone: Path, server: TestServer, update: tuple[str, str, str], how: str
) -> None:
    path, before, after = update
    log = clone.with_name("starts.log")
    job = len(log.read_text().splitlines()) + 1
    with Client(Settings(broker_url=server.url)) as app:
        with updated(clone / path, before, after):
            sent = killed_with_a_job(worker, app, job, log)

            told = wait_until(lambda: broken(worker), what="its word", timeout_s=20)

            assert told["text"].startswith(how)
            assert RESTART in told["text"]
            assert sent.reply(20).attempts == 2
            assert RESTART in worker.log()
            assert len(worker.ready_pids()) == 1

        # As it was: nothing needs to be restarted.
        worker.wait_ready(2, timeout_s=40)
        assert [each["text"] for each in worker.instances()] == ["", ""]
