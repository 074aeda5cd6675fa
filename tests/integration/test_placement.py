"""`celery control add_consumer` and `cancel_consumer`: models that a running worker takes on and
leaves to others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from celery import Celery

from producer.contract.app import make_app
from producer.contract.errors import UnknownModel
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.engines import Do, loads, row, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

NODE: Final = "placing@test"
KEYS: Final = Keys()
LOAD_S: Final = 0.5
JOBS: Final = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the engine of the second model notes its loads and starts."""
    return tmp_path_factory.mktemp("logs") / "second"


@pytest.fixture(scope="module")
def worker(server: TestServer, log: Path) -> Iterator[Worker]:
    """Run two instances that serve the first of two models."""
    with server.client() as client:
        client.flushall()
    models = {
        "first": {**SCRIPTED, "options": {}},
        "second": {
            **SCRIPTED,
            "max_batch_size": 2,
            "options": {"log": str(log), "load_s": LOAD_S},
        },
    }
    with (
        config_folder(models) as config,
        running_worker(server, config, "-Q", "fleet.first", node="placing", instances=2) as running,
    ):
        running.wait_heard()
        yield running


@pytest.fixture(scope="module")
def app(worker: Worker, server: TestServer) -> Celery:
    return make_app(Settings(broker_url=server.url))


@pytest.fixture(scope="module")
def infer(app: Celery) -> Infer:
    return register(app)


@pytest.fixture
def second(app: Celery, worker: Worker) -> None:
    """Have both instances serve the second model too."""
    told(app, "add_consumer", "fleet.second")
    wait_loaded(app, {"first", "second"})


@pytest.fixture
def first_alone(app: Celery, worker: Worker) -> None:
    """Have both instances serve the first model alone."""
    told(app, "cancel_consumer", "fleet.second")
    wait_loaded(app, {"first"})


def told(app: Celery, command: str, queue: str) -> dict[str, str]:
    """Send a control command and return what the worker answered."""
    (reply,) = app.control.broadcast(
        command, arguments={"queue": queue}, destination=[NODE], reply=True, limit=1, timeout=5
    )
    return dict(reply[NODE])


def wait_loaded(app: Celery, models: set[str]) -> None:
    """Wait until both instances hold ``models``, and no others."""
    inspect = app.control.inspect(destination=[NODE], limit=1, timeout=5)

    def loaded() -> bool:
        told = (inspect.stats() or {}).get(NODE)
        instances = told["pool"]["instances"] if told else ()
        return [(each["state"], set(each["models"])) for each in instances] == [
            ("ready", models)
        ] * 2

    wait_until(loaded, what=f"two instances with {models}", timeout_s=20)


def answer(infer: Infer, model: str) -> Any:
    return infer.delay(model, {"x": row()}).get(timeout=20)["y"].shape


@pytest.mark.parametrize(
    ("command", "queue", "says"),
    [
        ("add_consumer", "celery", "belong to a plain Celery worker"),
        ("add_consumer", "fleet.secnd", "Did you mean 'second'"),
        ("add_consumer", "fleet.../first", "no model"),
        ("cancel_consumer", "celery", "belong to a plain Celery worker"),
        ("cancel_consumer", "fleet.second", "not served here, but fleet.first"),
        ("cancel_consumer", "fleet.first", "Add another first"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    app: Celery, first_alone: None, command: str, queue: str, says: str
) -> None:
    refusal = told(app, command, queue)

    assert says in refusal["error"]


def test_a_model_that_is_added_is_loaded_in_one_instance_while_the_other_serves(
    app: Celery, infer: Infer, first_alone: None, log: Path
) -> None:
    with pytest.raises(UnknownModel):
        infer.delay("second", {"x": row()})

    said = told(app, "add_consumer", "fleet.second")
    job = infer.delay("second", {"x": row(job=1)})
    meanwhile = answer(infer, "first")

    assert said["ok"].startswith("fleet.second is served here as soon as")
    assert job.get(timeout=20)["y"].shape == meanwhile == (1, 3)
    wait_loaded(app, {"first", "second"})
    assert len(set(loads(log))) == 2
    lines = [line.split() for line in log.read_text().splitlines()]
    one, other = (float(words[-1]) for words in lines if words[0] == "load")
    assert other - one > LOAD_S
    assert told(app, "add_consumer", "fleet.second")["ok"] == "fleet.second is served here already"


def test_what_is_added_shows_everywhere(
    app: Celery, worker: Worker, server: TestServer, second: None
) -> None:
    inspect = app.control.inspect(destination=[NODE], limit=1, timeout=5)
    queues = [queue["name"] for queue in inspect.active_queues()[NODE]]
    with server.client() as client:
        known: Any = client.zrange(KEYS.models, 0, -1)

    assert queues == ["fleet.first", "fleet.second"]
    assert inspect.stats()[NODE]["pool"]["models"] == ["first", "second"]
    assert known == [b"first", b"second"]
    wait_until(
        lambda: worker.status()["models"] == ["first", "second"], what="the status to follow"
    )


def test_an_added_model_is_served_to_stock_apps_too(server: TestServer, second: None) -> None:
    with Celery(broker=server.url, backend=server.url, set_as_current=False) as stock:
        job = stock.send_task(
            "fleet.infer", args=["second", {"x": [[0, 4, 0]]}], queue="fleet.second"
        )

        assert job.get(timeout=20) == {"y": [[0, 8, 0]]}


def test_an_instance_that_replaces_a_dead_one_has_the_models_of_now(
    app: Celery, infer: Infer, worker: Worker, second: None
) -> None:
    for pid in worker.instance_pids():
        os.kill(pid, signal.SIGKILL)

    assert answer(infer, "second") == (1, 3)
    wait_loaded(app, {"first", "second"})


def test_a_model_that_is_cancelled_finishes_what_runs_and_starts_nothing_more(
    app: Celery, infer: Infer, server: TestServer, log: Path, second: None
) -> None:
    before = len(starts(log))
    jobs = [infer.delay("second", {"x": row(Do.SLEEP, 0.2, job=100 + n)}) for n in range(JOBS)]
    wait_until(lambda: len(starts(log)) >= before + 6, what="some to run")

    said = told(app, "cancel_consumer", "fleet.second")
    wait_loaded(app, {"first"})

    done = len(starts(log)) - before
    counted = tally(server, "second")
    assert said["ok"].startswith("fleet.second is no longer served here")
    assert done < JOBS
    assert (counted.claimed, counted.begun) == (0, 0)
    assert counted.waiting + counted.given_back == JOBS - done
    closes = [line for line in log.read_text().splitlines() if line.startswith("close")]
    assert len(closes) >= 2
    assert answer(infer, "first") == (1, 3)

    told(app, "add_consumer", "fleet.second")

    assert all(job.get(timeout=30)["y"].shape == (1, 3) for job in jobs)
    assert {n: count for n, count in starts(log).items() if n >= 100} == {
        100 + n: 1 for n in range(JOBS)
    }
    assert_all_ended(server, "second")
    wait_loaded(app, {"first", "second"})


def test_the_command_line_does_the_same(worker: Worker) -> None:
    command = [sys.executable, "-m", "celery", "-A", "workers.app", "control"]
    command += ["-d", NODE, "-t", "10"]

    ran = subprocess.run(
        [*command, "add_consumer", "fleet.first"],
        env=worker.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert "fleet.first is served here already" in ran.stdout
