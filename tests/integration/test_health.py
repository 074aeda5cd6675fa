"""`fleet health` asks the worker of its own host, and a stop is obeyed from the first moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def fails_to_load(tmp_path: Path) -> Path:
    """Return the file whose text is the error of every load, while it is there."""
    return tmp_path / "load-fails"


@pytest.fixture
def config(fails_to_load: Path) -> Iterator[Path]:
    options = {"load_fails_while": str(fails_to_load)}
    with config_folder({"scripted": {**SCRIPTED, "options": options}}) as folder:
        yield folder


@pytest.fixture
def worker(server: TestServer, config: Path) -> Iterator[Worker]:
    with running_worker(server, config, node="asked") as running:
        yield running


def health(worker: Worker, environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the exit code and the one line that was printed."""
    ran = subprocess.run(
        [sys.executable, "-m", "producer.cli", "health", "-n", worker.node],
        env={**worker.environ, **(environ or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    (line,) = (ran.stdout + ran.stderr).splitlines()
    return ran.returncode, line


def test_a_worker_with_an_instance_that_is_ready_is_healthy(worker: Worker) -> None:
    assert health(worker) == (0, "asked@test: 1 of 1 instances ready.")


def test_a_worker_that_hangs_is_not_healthy_although_another_one_answers(
    server: TestServer, config: Path, worker: Worker
) -> None:
    with running_worker(server, config, node="other") as other:
        assert worker.process is not None
        worker.process.send_signal(signal.SIGSTOP)
        try:
            status, line = health(worker)
        finally:
            worker.process.send_signal(signal.SIGCONT)
        assert health(other)[0] == 0

    assert status == 1
    assert line.startswith("fleet: asked@test does not answer within 6 s.")


def test_a_worker_whose_models_cannot_be_loaded_is_not_healthy(
    server: TestServer, config: Path, fails_to_load: Path
) -> None:
    fails_to_load.write_text("the weights are too large")
    with running_worker(server, config, node="broken", wait=False) as worker:
        wait_until(
            lambda: [instance["state"] for instance in worker.instances()] == ["broken"],
            what="the instance to be broken",
        )
        status, line = health(worker)

    assert status == 1
    assert line.startswith("fleet: No instance of broken@test is ready: instance 0 is broken: ")
    assert "the weights are too large" in line


def test_without_a_server_no_worker_is_healthy(worker: Worker) -> None:
    began_s = time.monotonic()
    status, line = health(worker, {"FLEET_BROKER_URL": NOWHERE})

    assert status == 1
    assert line.startswith("fleet: There is no Redis at redis://127.0.0.1:1/0")
    assert time.monotonic() - began_s < 5


def test_a_stop_before_anything_is_loaded_ends_the_worker_in_order(
    server: TestServer, config: Path
) -> None:
    environ = {
        **os.environ,
        "FLEET_BROKER_URL": server.url,
        "FLEET_CONFIG": str(config),
        "PYTHONPATH": str(ROOT),
    }
    # As the image's entry point does; the mask is inherited.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "worker"],
            env=environ,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process.terminate()
    _, errors = process.communicate(timeout=60)

    assert (process.returncode, errors) == (0, "")
