"""A stock Celery app, without any code of ours, and a fleet worker on one Redis: its jobs go
through the lists it knows, and it reads their results with the backend it has.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from producer.contract.app import make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.engines import Do, starts
from tests.support.servers import TestServer
from tests.support.stock import Stock
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()
NODE = "stock"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file in which the scripted engine notes every start."""
    return tmp_path_factory.mktemp("starts") / "starts.log"


@pytest.fixture(scope="module")
def worker(server: TestServer, log: Path) -> Iterator[Worker]:
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {"log": str(log)}}}) as config,
        running_worker(server, config, node=NODE) as running,
    ):
        running.wait_heard()
        yield running


@pytest.fixture(scope="module")
def stock(server: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    return Stock(tmp_path_factory.mktemp("stock"), server)


@pytest.fixture(autouse=True)
def settled(no_lasting_keys: None, server: TestServer) -> Iterator[None]:
    """Let the worker put away what a test's last job has left to do."""
    yield
    with server.client() as client:
        wait_until(
            lambda: not client.keys("fleet:journal:*") and not client.keys("fleet:delayed:*"),
            what="the worker to be done",
        )


@pytest.fixture
def broker(server: TestServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def app(server: TestServer) -> Iterator[Celery]:
    """Return a stock app in this process, for tests that need no look at its results."""
    with Celery(broker=server.url, backend=server.url, set_as_current=False) as own:
        yield own


def send(app: Celery, *values: float, model: str = MODEL, **options: Any) -> str:
    """Send a job as a stock app does; return its id."""
    args = [model, {"x": [list(values)]}]
    return str(app.send_task("fleet.infer", args=args, queue=f"fleet.{model}", **options).id)


def meta_of(broker: redis.Redis, job_id: str, timeout_s: float = 20) -> dict[str, Any]:
    """Return what is stored for a job, once it is there; JSON, as a stock app reads it."""
    key = KEYS.result(job_id)
    stored: Any = wait_until(lambda: broker.get(key), what="a result", timeout_s=timeout_s)
    return dict(json.loads(stored))


def test_a_stock_app_reads_the_answer_and_what_the_fleet_says_of_it(
    worker: Worker, stock: Stock
) -> None:
    said = stock.ask('outcome(infer({"x": [[0, 4, 0.5]]}).delay())')

    assert said["value"] == {"y": [[0, 8, 1]]}
    assert said["state"] == "SUCCESS"
    assert said["fleet"]["model"] == MODEL
    assert said["fleet"]["attempts"] == 1


@pytest.mark.parametrize(
    ("job", "state", "text"),
    [
        ('infer({"wrong": 1})', "FAILURE", "BadRequest: BAD_REQUEST: "),
        (f'infer({{"x": [[{Do.RAISE}, 0, 0]]}})', "FAILURE", "EngineFailed: ENGINE_FAILED: "),
        ('infer({"x": [[0, 0, 0]]}, model="other")', "FAILURE", "UnknownModel: UNKNOWN_MODEL: "),
        ('infer({"x": [[0, 0, 0]]}).set(expires=1e-6)', "REVOKED", "Expired: EXPIRED: "),
        ('infer({"x": [[0, 0, 0]]}).set(compression="gzip")', "FAILURE", "BadMessage: BAD_MES"),
    ],
    ids=["BAD_REQUEST", "ENGINE_FAILED", "UNKNOWN_MODEL", "EXPIRED", "BAD_MESSAGE"],
)
def test_a_stock_app_reads_what_went_wrong_with_its_code(
    worker: Worker, stock: Stock, job: str, state: str, text: str
) -> None:
    said = stock.ask(f"outcome(({job}).delay())")

    assert said["value"].startswith(text)
    assert len(said["value"]) > len(text) + 10
    assert said["state"] == state


def test_a_job_that_follows_a_job_is_answered_in_json_too(worker: Worker, stock: Stock) -> None:
    # The worker sends the second one itself, so it is never in a list.
    first, second = (f'infer({{"x": [[0, {number}, 0]]}}, immutable=True)' for number in (1, 2))

    said = stock.ask(f"outcome(({first} | {second}).delay())")

    assert said["value"] == {"y": [[0, 4, 0]]}


def test_jobs_that_wait_before_the_first_worker_starts_are_answered(
    server: TestServer, app: Celery, broker: redis.Redis
) -> None:
    jobs = [send(app, 0, number, 0, model="late", priority=number % 10) for number in range(30)]

    with (
        config_folder({"late": {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="late"),
    ):
        answers = [meta_of(broker, job)["result"]["y"][0][1] for job in jobs]

    assert answers == [2 * number for number in range(30)]
    assert not broker.exists(*KEYS.lists("fleet.late"))


def test_a_job_waits_at_most_about_half_a_second_for_an_idle_worker(
    worker: Worker, app: Celery, broker: redis.Redis
) -> None:
    took_s = []
    for _ in range(10):
        began_s = time.monotonic()
        meta_of(broker, send(app, 0, 0, 0))
        took_s.append(time.monotonic() - began_s)

    print(f"seconds from send to result: {sorted(round(each, 3) for each in took_s)}")
    assert sorted(took_s)[5] < 0.5
    assert max(took_s) < 1


def test_a_job_that_is_revoked_before_its_time_is_not_run(
    worker: Worker, app: Celery, broker: redis.Redis
) -> None:
    job = send(app, 0, 0, 0, countdown=2)
    wait_until(lambda: broker.zcard(KEYS.delayed(QUEUE)), what="the job to be delayed")

    app.control.revoke(job)

    meta = meta_of(broker, job)
    assert meta["status"] == "REVOKED"
    assert meta["result"]["exc_message"][0].startswith("CANCELLED: ")


def test_a_job_with_a_countdown_runs_when_it_is_due(
    worker: Worker, app: Celery, broker: redis.Redis
) -> None:
    began_s = time.monotonic()

    meta_of(broker, send(app, 0, 0, 0, countdown=2))

    assert 1.9 < time.monotonic() - began_s < 6


def test_a_message_that_nobody_can_read_is_a_dead_letter(
    worker: Worker, broker: redis.Redis
) -> None:
    before = broker.xlen(KEYS.dead(QUEUE))

    broker.lpush(QUEUE, b"\x80\x04K*.", b'{"body": "%%", "headers": {"id": "x"}}')

    wait_until(lambda: broker.xlen(KEYS.dead(QUEUE)) == before + 2, what="two dead letters")
    error = meta_of(broker, "x")["result"]["exc_message"][0]
    assert error == "BAD_MESSAGE: The message has no 'content-type'."


def test_a_job_that_runs_is_active_under_the_name_of_its_model(
    worker: Worker, app: Celery, broker: redis.Redis
) -> None:
    job = send(app, Do.SLEEP, 2, 0)
    wait_until(lambda: broker.hexists(KEYS.journal(QUEUE), job), what="the job to be begun")

    replies = app.control.inspect(destination=[f"{NODE}@test"], limit=1, timeout=5).active()

    (running,) = replies[f"{NODE}@test"]
    assert (running["id"], running["name"]) == (job, "fleet.infer.scripted")
    meta_of(broker, job)


@pytest.mark.parametrize(
    "command",
    [
        *("ping", "stats", "conf", "report", "registered", "clock", "revoked"),
        *("active", "reserved", "scheduled", "active_queues"),
    ],
)
def test_what_a_stock_app_asks_a_fleet_worker_is_answered_in_json(
    worker: Worker, app: Celery, command: str
) -> None:
    inspect = app.control.inspect(destination=[f"{NODE}@test"], limit=1, timeout=5)

    assert inspect._request(command).keys() == {f"{NODE}@test"}


def test_a_message_that_was_sent_twice_runs_once(
    worker: Worker, app: Celery, broker: redis.Redis, log: Path
) -> None:
    app.send_task("fleet.infer", args=[MODEL, {"x": [[0, 0, 71]]}], queue="elsewhere", task_id="71")
    sent: Any = broker.rpop("elsewhere")

    broker.lpush(QUEUE, sent, sent)
    meta_of(broker, "71")
    broker.lpush(QUEUE, sent)
    meta_of(broker, send(app, 0, 0, 72))

    assert starts(log) == {71: 1, 72: 1}


def test_no_other_list_is_read(worker: Worker, app: Celery, broker: redis.Redis) -> None:
    for number in range(100):
        app.send_task("stock.total", args=[number])

    meta_of(broker, send(app, 0, 0, 0))
    meta_of(broker, send(app, 0, 0, 0, countdown=1))

    assert broker.llen("celery") == 100
    broker.delete("celery")


def test_an_apps_own_worker_is_not_told_to_read_a_queue_of_the_fleet(
    worker: Worker, stock: Stock, app: Celery, broker: redis.Redis, server: TestServer
) -> None:
    fleet = make_app(Settings(broker_url=server.url))

    with stock.running_worker():
        replies = fleet.control.add_consumer(QUEUE, reply=True, timeout=5)
        answers = [meta_of(broker, send(app, 0, 0, number))["status"] for number in range(10)]

    assert [node for reply in replies for node in reply] == [f"{NODE}@test"]
    assert answers == ["SUCCESS"] * 10


@pytest.mark.parametrize("count", [5_000, pytest.param(20_000, marks=pytest.mark.chaos)])
def test_thousands_of_messages_are_moved_within_seconds(
    worker: Worker, app: Celery, broker: redis.Redis, count: int
) -> None:
    app.send_task(
        "fleet.infer", args=[MODEL, {"x": [[0, 0, 0]]}], queue="elsewhere", task_id="TEMPLATE"
    )
    sent: Any = broker.rpop("elsewhere")
    messages = [sent.replace(b"TEMPLATE", b"flood%d" % number) for number in range(count)]

    began_s = time.monotonic()
    broker.lpush(QUEUE, *messages)
    wait_until(lambda: not broker.llen(QUEUE), what="an empty list", timeout_s=30)
    took_s = time.monotonic() - began_s

    print(f"{count:,} messages moved in {took_s:.1f} s")
    assert took_s < count / 1000
    wait_until(
        lambda: not any(map(broker.xlen, KEYS.streams(QUEUE))),
        what=f"{count:,} answers",
        timeout_s=45,
    )
    assert json.loads(broker.get(KEYS.result(f"flood{count - 1}")) or b"")["status"] == "SUCCESS"
