"""The two sides of the comparison, running: a worker each, and how an app sends and collects.

Nothing is measured here. A side is a context manager; its worker is ready when the block begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from celery.result import AsyncResult, ResultSet

from benchmarks import plain_celery, processes
from benchmarks.workload import MODEL, Workload, write_config
from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from producer.tasks import register
from workers import children
from workers.up import local
from workers.up.embedded import Server

#: No answer by then is a fault to be told.
_ANSWERED_WITHIN_S: Final = 120.0
_READY_WITHIN_S: Final = 60.0
_END_WITHIN_S: Final = 20.0
_CLONE: Final = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The answers in the order of the rows."""

    answers: list[Any]
    #: Rows that ran together with each row, where the answers say so.
    batch_sizes: Sequence[int] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One worker and the app's way to it."""

    name: str
    #: How the answers are collected, in a word or two.
    way: str
    #: Sends one job for each row.
    publish: Callable[[Workload], list[AsyncResult]]
    collect: Callable[[list[AsyncResult]], Collected]
    #: Process ids: the worker's main process and the one process that runs the model.
    parent: int
    instance: int


@contextlib.contextmanager
def plain(
    server: Server, workload: Workload, *, database: int, folder: Path
) -> Iterator[list[Side]]:
    """Run a plain Celery worker; gives its side once for each way to collect."""
    url = _url(server, database)
    app = plain_celery.app
    app.conf.update(broker_url=url, result_backend=url)
    environ = {
        **clean_environ(),
        "CELERY_BROKER_URL": url,
        "CELERY_RESULT_BACKEND": url,
        plain_celery.ONNX_FILE: str(workload.onnx_file),
    }
    command = [*(sys.executable, "-m", "celery", "--quiet", "-A", "benchmarks.plain_celery")]
    command += ["worker", "-c", "1", "--loglevel", "warning"]
    log = folder / "plain.log"
    with children.running(command, environ=environ, within_s=_END_WITHIN_S, output=log) as worker:
        # The first answer says that the worker is up and has opened the file.
        plain_celery.infer.delay(workload.lists[0]).get(timeout=_READY_WITHIN_S)
        (instance,) = processes.children(worker.pid)

        def side(way: str, collect: Callable[[list[AsyncResult]], Collected]) -> Side:
            return Side(
                name="plain Celery",
                way=way,
                publish=lambda load: [plain_celery.infer.delay(rows) for rows in load.lists],
                collect=collect,
                parent=worker.pid,
                instance=instance,
            )

        yield [side("get() in order", _get_in_order), side("ResultSet.get()", _get_together)]


@contextlib.contextmanager
def fleet(
    server: Server, workload: Workload, *, database: int, folder: Path, events: bool
) -> Iterator[list[Side]]:
    """Run a fleet worker; gives its side once for each way to collect."""
    config = write_config(folder / f"fleet-{database}", workload)
    url = _url(server, database)
    environ = {**clean_environ(), "FLEET_BROKER_URL": url, "FLEET_CONFIG": str(config)}
    if not events:
        environ["FLEET_EVENTS"] = "false"
    settings = Settings.from_env(environ)
    broker = local.Broker(settings=settings, environ=environ, server=server)
    infer = register(make_app(settings))
    with (
        local.worker(broker, grace_s=_END_WITHIN_S, output=folder / "fleet.log") as worker,
        Client(settings) as client,
    ):
        local.wait_until_ready(broker, worker, tell=lambda _: None, within_s=_READY_WITHIN_S)
        (instance,) = processes.children(worker.process.pid)

        def publish(load: Workload) -> list[AsyncResult]:
            return [infer.delay(MODEL, {"x": row}) for row in load.rows]

        def as_completed(results: list[AsyncResult]) -> Collected:
            jobs = client.as_completed(results, timeout_s=_ANSWERED_WITHIN_S)
            replies = {job.id: job.reply(timeout_s=0) for job in jobs}
            ordered = [replies[result.id] for result in results]
            return Collected(
                answers=[reply.outputs["y"] for reply in ordered],
                batch_sizes=[reply.batch_size for reply in ordered],
            )

        def get(results: list[AsyncResult]) -> Collected:
            got = _get_in_order(results)
            return Collected(answers=[outputs["y"] for outputs in got.answers])

        def side(way: str, collect: Callable[[list[AsyncResult]], Collected]) -> Side:
            return Side(
                name="fleet" if events else "fleet, no events",
                way=way,
                publish=publish,
                collect=collect,
                parent=worker.process.pid,
                instance=instance,
            )

        yield [side("as_completed()", as_completed), side("get() in order", get)]


def _get_in_order(results: list[AsyncResult]) -> Collected:
    return Collected(answers=[result.get(timeout=_ANSWERED_WITHIN_S) for result in results])


def _get_together(results: list[AsyncResult]) -> Collected:
    together = ResultSet(results, app=plain_celery.app)
    return Collected(answers=together.get(timeout=_ANSWERED_WITHIN_S))


def _url(server: Server, database: int) -> str:
    return f"{server.url.rpartition('/')[0]}/{database}"


def clean_environ() -> Mapping[str, str]:
    """Return our environment without what a user has set for a fleet or a Celery of their own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FLEET_", "CELERY_"))
    }
    paths = [os.fspath(_CLONE), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}
