"""Replies that are made while the engine runs the next batch, in a real worker: each batch ends by
itself, whatever becomes of the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from producer.client import Client, Job
from producer.contract.app import make_app
from producer.contract.errors import FleetError
from producer.contract.settings import Settings
from tests.support.engines import started, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "told"
NODE = "behind@test"

Inputs: TypeAlias = Mapping[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behind")


@pytest.fixture
def log(folder: Path) -> Path:
    return folder / "starts.log"


@pytest.fixture(scope="module")
def worker(server: TestServer, folder: Path) -> Iterator[Worker]:
    """A worker whose engine holds numbered jobs while there is a file ``held``."""
    with server.client() as client:
        client.flushall()
    options = {"log": str(folder / "starts.log"), "held_while": str(folder / "held")}
    model = {**SCRIPTED, "max_batch_size": 1, "code": "tests.support.hooks:Told"}
    with (
        config_folder({MODEL: {**model, "options": options}}) as config,
        running_worker(server, config, node="behind") as running,
    ):
        running.wait_heard()
        yield running


@pytest.fixture
def held(worker: Worker, folder: Path, app: Client) -> Iterator[Path]:
    """Hold the engine at the next numbered job. How long a batch takes is known before."""
    for _ in range(2):
        app.submit(MODEL, {}).reply(20)
    path = folder / "held"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def app(server: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=server.url)) as client:
        yield client


def sent_together(app: Client, held: Path, first: Inputs, second: Inputs) -> list[Job]:
    """Send two jobs, of which the second waits already when the first is claimed."""
    gate = held.with_name("gate")
    gate.touch()
    before = app.submit(MODEL, {"behind": f"while {gate}"})
    jobs = app.submit_many(MODEL, [first, second])
    gate.unlink()
    before.reply(20)
    return jobs


def wait_started(log: Path, job: int, times: int = 1) -> None:
    wait_until(lambda: starts(log).get(job) == times, what=f"start {times} of job {job}")


def test_an_answer_does_not_wait_for_the_engine_of_the_next_batch(
    app: Client, held: Path, log: Path
) -> None:
    made = held.with_name("made")
    made.touch()
    inputs = {"behind": f"while {made}", "data": 7}
    first, second = sent_together(app, held, inputs, {"job": 1})
    wait_started(log, 1)
    assert not first.done

    made.unlink()

    assert first.reply(20).outputs["read"] == 7

    assert not second.done
    held.unlink()
    assert second.reply(20).attempts == 1


def test_replies_that_fail_beside_the_engine_fail_alone(app: Client, held: Path, log: Path) -> None:
    first, second = sent_together(app, held, {"behind": "fail label"}, {"job": 2})
    wait_started(log, 2)

    with pytest.raises(FleetError, match="postprocess raised KeyError"):
        first.reply(20)

    assert not second.done
    held.unlink()
    assert second.reply(20).attempts == 1


@pytest.mark.parametrize("ended", [0, 1])
def test_a_job_is_terminated_in_either_place_and_the_other_batch_is_given_back_uncounted(
    worker: Worker, app: Client, held: Path, log: Path, ended: int
) -> None:
    (pid,) = worker.instance_pids()
    jobs = sent_together(app, held, {"behind": f"while {held}"}, {"job": 3 + ended})
    wait_started(log, 3 + ended)
    wait_until(
        lambda: [each["running"] for each in worker.instances()] == [2], what="two batches at once"
    )
    control = make_app(Settings(broker_url=worker.environ["FLEET_BROKER_URL"])).control
    active = control.inspect(destination=[NODE], limit=1, timeout=5).active()
    assert active is not None
    assert {each["id"] for each in active[NODE]} == {each.id for each in jobs}

    control.terminate(jobs[ended].id, destination=[NODE])

    with pytest.raises(FleetError, match="terminated while it ran"):
        jobs[ended].reply(20)
    held.unlink()
    assert jobs[1 - ended].reply(20).attempts == 1
    assert worker.instance_pids() != [pid]


def test_a_job_that_must_run_alone_waits_for_the_replies_before_it_and_is_waited_for(
    worker: Worker, app: Client, held: Path, log: Path, folder: Path
) -> None:
    hooks, took_s = folder / "alone.log", 0.3
    made = {"behind": f"sleep {took_s}", "log": str(hooks)}
    alone = app.submit(MODEL, {**made, "job": 5})
    wait_started(log, 5)
    (pid,) = worker.instance_pids()
    # It takes none of the others, and its successor finds them all.
    os.kill(pid, signal.SIGSTOP)
    # The first tells how long a batch takes; beside the replies of the second the next would run.
    app.submit(MODEL, {}, priority="high")
    before = app.submit(MODEL, made, priority="high")
    after = app.submit(MODEL, {"job": 6})
    held.unlink()
    os.kill(pid, signal.SIGKILL)

    assert [job.reply(30).attempts for job in (before, alone, after)] == [1, 2, 1]

    lines = (line.split() for line in hooks.read_text().splitlines())
    behind = {int(job): float(at_unix_s) for when, job, at_unix_s in lines if when == "behind"}
    began = {start.job: start.at_unix_s for start in started(log)}
    assert began[5] >= behind[0] + took_s
    assert began[6] >= behind[5] + took_s
