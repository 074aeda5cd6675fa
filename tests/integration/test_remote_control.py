"""`celery inspect` and `celery control`: what they say of jobs that the parent never holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.control import Inspect

from producer.contract.app import make_app
from producer.contract.errors import Cancelled
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.engines import Do, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import (
    ROOT,
    SCRIPTED,
    Worker,
    config_folder,
    running_worker,
    standing_still,
)

pytestmark = pytest.mark.redis

MODEL = "scripted"
NODE = "remote@test"
BATCH_S = 2.5


@pytest.fixture(scope="module")
def worker(server: TestServer) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="remote") as running,
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
def busy(inspect: Inspect, infer: Infer) -> Iterator[tuple[str, float]]:
    """Have one batch run; gives its job and when it was sent."""
    sent_unix_s = time.time()
    job = infer.delay(MODEL, {"x": row(Do.SLEEP, BATCH_S)})
    wait_active(inspect, job.id)
    yield job.id, sent_unix_s
    job.get(timeout=10)


@pytest.fixture
def inspect(app: Celery) -> Inspect:
    """Ask the one worker there is; the first answer is enough."""
    return app.control.inspect(destination=[NODE], limit=1, timeout=5)


def wait_active(inspect: Inspect, *job_ids: str) -> None:
    """Wait until these jobs run, and no others: what is sent then is in no batch with them."""
    wait_until(
        lambda: {job["id"] for job in (inspect.active() or {}).get(NODE, ())} == {*job_ids},
        what="the batch to run",
    )


def told(app: Celery, command: str, **arguments: Any) -> dict[str, str]:
    """Send a control command and return what the worker answered."""
    (reply,) = app.control.broadcast(
        command, arguments=arguments, destination=[NODE], reply=True, limit=1, timeout=5
    )
    return dict(reply[NODE])


def test_jobs_that_run_are_active_under_the_name_of_their_model(
    inspect: Inspect, worker: Worker, busy: tuple[str, float]
) -> None:
    job_id, sent_unix_s = busy

    (job,) = inspect.active()[NODE]

    assert job["id"] == job_id
    assert job["name"] == "fleet.infer.scripted"
    assert job["worker_pid"] in worker.instance_pids()
    assert job["time_start"] == pytest.approx(sent_unix_s, abs=1.5)
    assert job["args"] == job["kwargs"] == ""
    json.dumps(job)


def test_a_job_that_runs_is_found_by_its_id_and_another_is_not(
    inspect: Inspect, busy: tuple[str, float]
) -> None:
    job_id, _ = busy

    found = inspect.query_task(job_id, "unknown")[NODE]

    assert found.keys() == {job_id}
    assert found[job_id][0] == "active"


def test_a_job_that_runs_is_not_ended_by_a_revoke(
    app: Celery, infer: Infer, busy: tuple[str, float]
) -> None:
    job_id, _ = busy

    answer = told(app, "revoke", task_id=job_id)

    assert f"tasks {job_id} marked" in answer["ok"]
    assert infer.AsyncResult(job_id).get(timeout=10)["y"].shape == (1, 3)


def test_a_job_that_is_answered_stays_what_it_is(app: Celery, infer: Infer) -> None:
    job = infer.delay(MODEL, {"x": row()})
    job.get(timeout=10)

    answer = told(app, "revoke", task_id=job.id, terminate=True)

    assert f"tasks {job.id} answered before" in answer["ok"]
    assert infer.AsyncResult(job.id).state == "SUCCESS"


def test_a_job_that_runs_alone_is_terminated_with_its_process(
    app: Celery, infer: Infer, inspect: Inspect, worker: Worker
) -> None:
    (pid,) = worker.instance_pids()
    job = infer.delay(MODEL, {"x": row(Do.SLEEP, 60)})
    wait_active(inspect, job.id)

    told(app, "terminate", task_id=job.id, signal="SIGKILL")

    with pytest.raises(Cancelled, match="terminated while it ran"):
        job.get(timeout=10)
    assert job.state == "REVOKED"
    assert infer.delay(MODEL, {"x": row()}).get(timeout=20)["y"].shape == (1, 3)
    assert worker.instance_pids() != [pid]


def test_a_terminated_job_does_no_harm_to_its_batch_mates(
    app: Celery, infer: Infer, inspect: Inspect, worker: Worker
) -> None:
    worker.wait_ready()
    (pid,) = worker.instance_pids()
    before = infer.delay(MODEL, {"x": row(Do.SLEEP, 1)})
    wait_active(inspect, before.id)
    with standing_still(worker):
        # Neither is claimed without the other.
        mate = infer.delay(MODEL, {"x": row(Do.SLEEP, 4)})
        stamped = infer.apply_async(
            (MODEL, {"x": row()}), stamped_headers=["tenant"], tenant="seven"
        )
    wait_active(inspect, mate.id, stamped.id)

    told(app, "revoke_by_stamped_headers", headers={"tenant": ["seven"]}, terminate=True)

    with pytest.raises(Cancelled, match="terminated while it ran"):
        stamped.get(timeout=10)
    assert mate.get(timeout=10)["y"].shape == (1, 3)
    assert before.get(timeout=10)["y"].shape == (1, 3)
    assert worker.instance_pids() == [pid]


def test_jobs_that_wait_are_revoked_by_their_stamp(
    app: Celery, infer: Infer, busy: tuple[str, float]
) -> None:
    eight, nine = (
        infer.apply_async((MODEL, {"x": row()}), stamped_headers=["tenant"], tenant=tenant)
        for tenant in ("eight", "nine")
    )

    told(app, "revoke_by_stamped_headers", headers=["tenant=eight"])

    with pytest.raises(Cancelled):
        eight.get(timeout=10)
    assert nine.get(timeout=10)["y"].shape == (1, 3)


def test_a_job_that_waits_is_revoked(
    app: Celery, infer: Infer, inspect: Inspect, busy: tuple[str, float]
) -> None:
    job = infer.delay(MODEL, {"x": row()})

    answer = told(app, "revoke", task_id=[job.id])

    assert job.id in answer["ok"]
    with pytest.raises(Cancelled):
        job.get(timeout=10)
    assert job.state == "REVOKED"
    assert job.id in inspect.revoked()[NODE]


def test_a_worker_answers_a_ping(inspect: Inspect) -> None:
    assert inspect.ping() == {NODE: {"ok": "pong"}}


def test_stats_count_the_jobs_and_show_the_instances(
    inspect: Inspect, infer: Infer, worker: Worker
) -> None:
    infer.delay(MODEL, {"x": row()}).get(timeout=10)
    done = wait_until(
        lambda: worker.counters(MODEL).get("jobs"), what="the totals to reach the parent"
    )

    stats = inspect.stats()[NODE]

    assert stats["total"]["fleet.infer"] >= done
    assert stats["pid"] == worker.pid
    assert stats["pool"]["processes"] == worker.instance_pids()
    assert stats["pool"]["max-concurrency"] == 1
    assert stats["pool"]["models"] == [MODEL]


def test_an_idle_worker_has_nothing_active_and_nothing_reserved(inspect: Inspect) -> None:
    assert inspect.active() == {NODE: []}
    assert inspect.reserved() == {NODE: []}


def test_a_worker_names_its_task_and_its_queues(inspect: Inspect) -> None:
    assert inspect.registered() == {NODE: ["fleet.infer"]}
    assert [queue["name"] for queue in inspect.active_queues()[NODE]] == ["fleet.scripted"]


def test_the_password_of_the_broker_is_not_shown(inspect: Inspect) -> None:
    assert "********" in inspect.conf()[NODE]["broker_url"]


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("pool_restart", {}, "restart the worker"),
        ("rate_limit", {"task_name": "fleet.infer", "rate_limit": "1/s"}, "no rate"),
        ("time_limit", {"task_name": "fleet.infer", "hard": 1}, "batch_timeout_s"),
        ("disable_events", {}, "events = false"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_what_means_nothing_here_is_refused_with_what_to_do_instead(
    app: Celery, command: str, arguments: dict[str, Any], says: str
) -> None:
    answer = told(app, command, **arguments)

    assert says in answer["error"]


def test_events_are_on_from_the_start(app: Celery) -> None:
    assert told(app, "enable_events") == {"ok": "task events already enabled"}


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["inspect", "active"], "- empty -"),
        (["inspect", "active_queues"], "fleet.scripted"),
        (["control", "revoke", "some-id"], "tasks some-id marked as cancelled"),
        (["control", "rate_limit", "fleet.infer", "1/s"], "no rate to limit"),
    ],
    ids=" ".join,
)
def test_the_command_line_says_the_same(worker: Worker, command: list[str], says: str) -> None:
    celery = [sys.executable, "-m", "celery", "-A", "workers.app"]
    options = ["-d", NODE, "-t", "10"]

    ran = subprocess.run(
        [*celery, *command, *options],
        env=worker.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout


def test_shutdown_ends_the_worker_in_good_order(server: TestServer, worker: Worker) -> None:
    with running_worker(server, worker.config, node="leaving") as leaving:
        leaving.wait_heard()
        with make_app(Settings(broker_url=server.url)) as app:
            app.control.shutdown(destination=["leaving@test"])

        assert leaving.process is not None
        assert leaving.process.wait(timeout=20) == 0
        assert leaving.instance_pids() == []


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("5", id="a number"),
        pytest.param('"x"', id="text"),
        pytest.param("x", id="no JSON"),
        pytest.param("{}", id="empty"),
        pytest.param('{"body": "e30="}', id="no properties"),
        pytest.param('{"properties": {"delivery_tag": []}}', id="a list for a tag"),
        pytest.param('{"__type__": "decimal", "__value__": "x"}', id="no decimal"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param(
            '{"body": "5", "content-type": "application/json", "content-encoding": "utf-8",'
            ' "properties": {"delivery_tag": "t"}}',
            id="a command that is a number",
        ),
    ],
)
def test_what_is_no_message_does_not_end_the_parent(
    server: TestServer, worker: Worker, inspect: Inspect, data: str
) -> None:
    pid, instances = worker.pid, worker.instance_pids()
    with server.client() as client:
        assert client.publish("/0.celery.pidbox", data) == 1

    # Not at once: after a command that fails, Celery subscribes anew.
    answer = wait_until(inspect.ping, what="an answer to a ping")

    assert answer[NODE] == {"ok": "pong"}
    assert worker.process is not None
    assert worker.process.poll() is None
    assert (worker.pid, worker.instance_pids()) == (pid, instances)
