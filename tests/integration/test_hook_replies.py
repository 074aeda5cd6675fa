"""What goes into hooks and comes out of them: jobs of one worker, none of which harms it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from producer.client import Client, Job
from producer.contract.errors import FleetError
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.engines import starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

MODEL = "told"
KEYS = Keys()
HOOKED = {**SCRIPTED, "code": "tests.support.hooks:Told"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file in which the engine notes every start."""
    return tmp_path_factory.mktemp("hooks") / "starts.log"


@pytest.fixture(scope="module")
def worker(server: TestServer, log: Path) -> Iterator[Worker]:
    """Run a worker with one model, whose hooks do what their inputs say."""
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**HOOKED, "options": {"log": str(log)}}}) as config,
        running_worker(server, config) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[redis.Redis]:
    """Return a client of a server that is not emptied under the worker."""
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def fleet(server: TestServer, worker: Worker) -> Iterator[Client]:
    with Client(Settings(broker_url=server.url)) as client:
        yield client


def error_of(job: Job) -> FleetError:
    with pytest.raises(FleetError) as told:
        job.reply(30)
    return told.value


def test_bytes_and_text_go_in_and_what_postprocess_returns_comes_out(
    fleet: Client, worker: Worker
) -> None:
    raw = fleet.submit(MODEL, {"data": b"\x00\xff"}).reply(20)
    text = fleet.submit(MODEL, {"data": "a sentence"}).reply(20)
    label = fleet.submit(MODEL, {"behind": "answer cat"}).reply(20)
    (instance,) = worker.instances()

    assert raw.outputs == {"read": b"\x00\xff", "rows": 1}
    assert text.outputs == {"read": "a sentence", "rows": 1}
    assert (label.outputs, label.attempts) == ("cat", 1)
    assert instance["models"][MODEL]["hooks"] == ["preprocess", "postprocess"]


def test_a_batch_whose_every_job_is_refused_never_reaches_the_engine(
    fleet: Client, log: Path
) -> None:
    inputs = [{"before": "refuse no", "job": n} for n in range(1, 4)]

    codes = {error_of(job).code for job in fleet.submit_many(MODEL, inputs)}
    after = fleet.submit(MODEL, {"job": 4}).reply(20)

    assert codes == {"BAD_REQUEST"}
    assert after.attempts == 1
    assert starts(log) == {4: 1}


@pytest.mark.parametrize("reply", ["cat", None])
def test_a_stock_app_gets_a_hooks_reply_in_json(
    server: TestServer, worker: Worker, client: redis.Redis, reply: str | None
) -> None:
    told = {"behind": f"answer {reply}"} if reply else {"data": "text"}
    with Celery(broker=server.url, backend=server.url) as app:
        sent = app.send_task("fleet.infer", args=[MODEL, told], queue=f"fleet.{MODEL}")
        key = KEYS.result(sent.id)
        stored: Any = wait_until(lambda: client.get(key), what="a result")

    assert json.loads(stored)["result"] == (reply or {"read": "text", "rows": 1})


def test_no_value_of_a_reply_is_in_the_log(fleet: Client, worker: Worker) -> None:
    """The last test here: the worker ends."""
    fleet.submit(MODEL, {"data": "a-secret-text", "behind": "answer a-secret-label"}).reply(20)
    error_of(fleet.submit(MODEL, {"data": "a-secret-text", "behind": "kind"}))
    worker.stop()

    assert "secret" not in worker.log()
