"""What somebody is told whose jobs wait: that no worker runs, or that the model cannot be loaded,
and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError
from click.testing import CliRunner

from producer.cli import cli
from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import JobTimeout
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

SOUND, BROKEN = "scripted", "without_weights"
WHY = "the weights are missing"
#: Who waits for less is not told.
WAIT_S = 1.1


@pytest.fixture
def why(tmp_path: Path) -> Path:
    path = tmp_path / "why"
    path.write_text(WHY)
    return path


@pytest.fixture
def worker(server: TestServer, client: Any, why: Path) -> Iterator[Worker]:
    broken = {**SCRIPTED, "options": {"load_fails_while": str(why)}}
    with (
        config_folder({SOUND: SCRIPTED, BROKEN: broken}) as config,
        running_worker(server, config, node="partial") as running,
    ):
        yield running


def reply(server: TestServer, model: str) -> object:
    with Client(Settings(broker_url=server.url)) as app:
        return app.submit(model, {"x": row()}).reply(WAIT_S)


def completed(server: TestServer, model: str) -> object:
    with Client(Settings(broker_url=server.url)) as app:
        return list(app.as_completed([app.submit(model, {"x": row()})], WAIT_S))


def infer(server: TestServer, model: str) -> object:
    async def ask() -> object:
        with Client(Settings(broker_url=server.url)) as app:
            return await app.infer(model, {"x": row()}, timeout_s=WAIT_S)

    return asyncio.run(ask())


def get(server: TestServer, model: str) -> object:
    task = register(make_app(Settings(broker_url=server.url)))
    return task.delay(model, {"x": row()}).get(timeout=WAIT_S)


def shown(server: TestServer, command: str) -> str:
    environ = {"FLEET_BROKER_URL": server.url, "COLUMNS": "400"}
    output = CliRunner().invoke(cli, [command], env=environ).output
    return " ".join(output.split())


def test_a_model_that_no_instance_can_load_is_named_with_its_error(
    server: TestServer, worker: Worker, why: Path
) -> None:
    told = f"No running worker has '{BROKEN}' loaded: {WHY}"
    with ThreadPoolExecutor() as threads:
        waits = [threads.submit(wait, server, BROKEN) for wait in (reply, completed, get, infer)]
    for wait in waits:
        with pytest.raises((JobTimeout, CeleryTimeoutError), match=told):
            wait.result()

    assert f"1 worker, no instance ready: {WHY}" in shown(server, "queue")
    assert f"ready: {BROKEN}: {WHY}" in shown(server, "status")
    assert f"{BROKEN} (broken)" in shown(server, "status")
    assert "1 of 1 instances ready; " in shown_health(server, worker)

    why.unlink()
    # The job of a coroutine that waits no longer is cancelled.
    wait_until(lambda: worker.counters(BROKEN).get("succeeded") == 3, what="the three answers")


def shown_health(server: TestServer, worker: Worker) -> str:
    environ = {"FLEET_BROKER_URL": server.url}
    return CliRunner().invoke(cli, ["health", "-n", worker.node], env=environ).output


def test_who_waits_without_a_worker_is_told_that_none_runs(server: TestServer, client: Any) -> None:
    with pytest.raises(JobTimeout, match="No worker runs at the moment"):
        reply(server, SOUND)
