"""Somebody's own Celery app beside the fleet: its tasks wait in the list ``celery`` of the same
Redis and run on a plain worker.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import redis
from celery import Celery, Task

from producer.contract.app import FleetApp, make_app
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT

#: Says where the app's own broker is, when this module is loaded by a plain worker.
BROKER: Final = "TEST_APP_BROKER_URL"
#: Says under which prefix its own tasks and their results lie, where it has one.
PREFIX: Final = "TEST_APP_PREFIX"


def make_own_app(url: str, *, backend: str = "", prefix: str = "") -> tuple[Celery, Infer]:
    """Return an app on stock ``redis://`` lists and JSON results, with `infer` registered on it.

    ``backend`` goes before the result URL; ``prefix`` is the app's, not the fleet's.
    """
    own = Celery("own", broker=url, backend=f"{backend}{url}")
    if prefix:
        own.conf.broker_transport_options = {"global_keyprefix": prefix}
        own.conf.result_backend_transport_options = {"global_keyprefix": prefix}
    own.conf.broker_connection_retry_on_startup = True
    infer = register(own, Settings(broker_url=url))

    @own.task(name="own.row", shared=False)
    def row(*values: float) -> dict[str, Any]:
        """Return the inputs of a job."""
        return {"x": [list(values)]}

    @own.task(name="own.first", shared=False)
    def first(answers: list[Any]) -> Any:
        return answers[0]

    @own.task(name="own.answer", shared=False, bind=True)
    def answer(task: Task, value: float, others: int = 0) -> dict[str, Any]:
        """Return what a job could, once ``others`` of its chord have been counted."""
        counted = own.backend.get_key_for_group(task.request.group or "none", ".j")
        wait_until(
            lambda: own.backend.client.zcard(counted) >= others if others else True,
            what=f"{others} members of the chord",
        )
        return {"y": [[value]]}

    @own.task(name="own.total", shared=False)
    def total(outputs: Any) -> float:
        """Return the sum of what one job, or each of a chord, answered; count the runs."""
        _note(own, "total")
        return sum(
            float(np.sum(o["y"])) for o in (outputs if isinstance(outputs, list) else [outputs])
        )

    @own.task(name="own.shape", shared=False)
    def shape(answers: Any) -> Any:
        """Return the numbers of a chord's answers, in lists as they came."""
        if isinstance(answers, list):
            return [shape(each) for each in answers]
        return np.asarray(answers["y"][0]).tolist()

    @own.task(name="own.failed", shared=False)
    def failed(job_id: str) -> None:
        """Note the id of a job that failed."""
        _note(own, "failed", job_id)

    return own, infer


@contextlib.contextmanager
def own_app(url: str, *, backend: str = "", prefix: str = "") -> Iterator[tuple[Celery, Infer]]:
    """Return `make_own_app` for the length of the block; no connection of it is left."""
    own, infer = make_own_app(url, backend=backend, prefix=prefix)
    try:
        yield own, infer
    finally:
        infer.publisher.close()
        for app in (own, infer.fleet):
            end_app(app)


def end_app(app: Celery) -> None:
    """Close every connection of ``app``."""
    app.backend.waiter.close()
    app.backend.result_consumer.stop()
    # A result that is dropped later would connect again, to unsubscribe.
    app.backend.result_consumer.subscribed_to.clear()
    app.backend.client.connection_pool.disconnect()
    app.close()


@contextlib.contextmanager
def fleet_app(settings: Settings) -> Iterator[tuple[FleetApp, Infer]]:
    """Return an app of the fleet's own with its task; no connection of it is left."""
    app = make_app(settings)
    infer = register(app)
    try:
        yield app, infer
    finally:
        infer.publisher.close()
        end_app(app)


def runs(client: redis.Redis, task: str) -> list[str]:
    """Return what a task of the app noted, one entry for each run."""
    noted: Any = client.lrange(f"own:{task}", 0, -1)
    return [entry.decode() for entry in noted]


def _note(own: Celery, task: str, text: str = "") -> None:
    with own.backend.client.pipeline() as pipe:
        pipe.rpush(f"own:{task}", text)
        pipe.expire(f"own:{task}", 600)
        pipe.execute()


@contextlib.contextmanager
def running_plain_worker(
    server: TestServer, log: Path, more: Mapping[str, str] | None = None
) -> Iterator[Mapping[str, str]]:
    """Run Celery's own worker with the app, and ``more`` environment, for the length of the
    block.
    """
    environ = {**os.environ, BROKER: server.url, "PYTHONPATH": str(ROOT), **(more or {})}
    command = [sys.executable, "-m", "celery", "-A", "tests.support.app", "worker"]
    with log.open("wb") as sink:
        worker = subprocess.Popen(
            [*command, "-P", "solo", "-n", "plain@test", "-l", "INFO"],
            env=environ,
            cwd=ROOT,
            stdout=sink,
            stderr=sink,
        )
    try:
        wait_until(lambda: "ready." in log.read_text(), what="the plain worker to be ready")
        yield environ
    finally:
        worker.kill()
        worker.wait(timeout=30)


if BROKER in os.environ:
    app, _ = make_own_app(os.environ[BROKER], prefix=os.environ.get(PREFIX, ""))
