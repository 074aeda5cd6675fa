"""Sentry and OpenTelemetry, as they are installed, see one trace: the app, its own worker and the
fleet's, which may be watched as well or know nothing of either.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.app import BROKER, running_plain_worker
from tests.support.environments import pip
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

PACKAGES: Final = {
    "sentry": ["sentry-sdk"],
    "opentelemetry": ["opentelemetry-instrumentation-celery", "opentelemetry-sdk"],
}
BEGIN: Final = {
    "sentry": "import sentry_sdk\npage = sentry_sdk.start_transaction(name='page', op='page')",
    "opentelemetry": (
        "from opentelemetry import trace\n"
        "page = trace.get_tracer('page').start_as_current_span('page')"
    ),
}
#: One page of the app: a job alone, a chain across both workers, a job in JSON by its name, and
#: three of a Client's, of which one is awaited.
PAGE: Final = """
import asyncio
from celery import Celery, chain
from producer.client import Client
from tests.support import app as own
infer, total = own.app.tasks["fleet.infer"], own.app.tasks["own.total"]
inputs = {"x": [[0, 1, 0]]}
with page:
    infer.delay("scripted", inputs).get(timeout=20)
    steps = chain(own.app.tasks["own.row"].s(0, 1, 0), infer.for_model("scripted").s(), total.s())
    assert steps.apply_async().get(timeout=20) == 2
    stock = Celery(broker=own.app.conf.broker_url, backend=own.app.conf.result_backend)
    job = stock.send_task("fleet.infer", args=["scripted", inputs], queue="fleet.scripted")
    job.get(timeout=20)
    with Client(infer.fleet.settings) as client:
        client.submit("scripted", inputs).reply(20)
        client.submit_many("scripted", [inputs])[0].reply(20)
        asyncio.run(client.infer("scripted", inputs, timeout_s=20))
"""


@pytest.fixture(scope="module", params=PACKAGES)
def watcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def packages(watcher: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(watcher)
    pip(Path(sys.executable), "install", "--target", str(folder), *PACKAGES[watcher])
    return folder


@pytest.mark.parametrize("watched", [True, False], ids=["watched", "not watched"])
def test_a_page_its_jobs_and_what_follows_them_are_one_trace(
    broker: TestServer,
    packages: Path,
    watcher: str,
    watched: bool,
    tmp_path: Path,
) -> None:
    lines = tmp_path / "spans"
    path = [ROOT / "tests" / "support" / "traced", packages, ROOT]
    environ = {
        "TRACED_BY": watcher,
        "TRACED_TO": str(lines),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    with (
        config_folder({"scripted": {**SCRIPTED, "options": {}}}) as config,
        running_worker(
            broker, config, environ={**environ, "TRACED_WHO": "fleet"} if watched else {}
        ) as worker,
        running_plain_worker(broker, tmp_path / "own.log", {**environ, "TRACED_WHO": "own"}),
    ):
        subprocess.run(
            [sys.executable, "-c", f"{BEGIN[watcher]}\n{PAGE}"],
            cwd=ROOT,
            env={**os.environ, **environ, BROKER: broker.url, "TRACED_WHO": "app"},
            timeout=120,
            check=True,
        )
        wait_until(
            lambda: runs(lines).total() >= (8 if watched else 2), what="the spans of each run"
        )
        worker.stop()

    seen = [line.split() for line in lines.read_text().splitlines()]
    assert len({trace for trace, *_ in seen}) == 1
    assert {who for _, who, *_ in seen} == ({"app", "own", "fleet"} if watched else {"app", "own"})
    ran = {("own", "own.row"): 1, ("own", "own.total"): 1}
    assert runs(lines) == ran | ({("fleet", "fleet.infer"): 6} if watched else {})


def runs(lines: Path) -> collections.Counter[tuple[str, str]]:
    """Return how often each process says that it ran each task."""
    seen = [line.split() for line in lines.read_text().splitlines()] if lines.exists() else []
    return collections.Counter(
        (who, name.removeprefix("run/"))
        for _, who, kind, name in seen
        if kind in ("consumer", "queue.task.celery")
    )
