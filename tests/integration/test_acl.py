"""Users with exactly the rights that docs/redis.md gives them, and workers that lack one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis
from celery import Celery, chord

from producer.client import Client
from producer.contract.errors import BadRequest, Cancelled, WorkerLost
from producer.contract.settings import Settings, redis_client
from tests.support.acl import documented_users, is_old, refusals
from tests.support.app import fleet_app
from tests.support.commands import CELERY, FLEET, run_command
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(150)]

MODEL: Final = "scripted"

#: Each is taken from a worker and given back.
RIGHTS: Final = ("-evalsha", "-xreadgroup", "-hset", "-set", "-psubscribe")


@pytest.fixture(scope="module")
def client(server: TestServer) -> Iterator[redis.Redis]:
    """Return a client that may do everything; the server is emptied once, not under a worker."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file in which the scripted engine notes every start."""
    return tmp_path_factory.mktemp("acl") / "starts.log"


@pytest.fixture(scope="module")
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "held_while": str(held_by(log))}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


@pytest.fixture(scope="module")
def users(server: TestServer, client: redis.Redis) -> Iterator[dict[str, str]]:
    """Make the documented users and return each one's URL."""
    with documented_users(server, client) as urls:
        yield urls


def held_by(log: Path) -> Path:
    """Return the file that holds the engine at a numbered job for as long as it is there."""
    return log.with_name("held")


def next_event(app: Celery) -> dict[str, Any]:
    """Return the next event that a worker sends."""
    events: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        events.append(event)
        receiver.should_stop = True

    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": take})
        receiver.capture(limit=None, timeout=20)
    return events[0]


@contextlib.contextmanager
def documented_worker(
    server: TestServer, config: Path, users: dict[str, str], node: str
) -> Iterator[Worker]:
    # Poison kills one process and no more: it is the rights that count.
    environ = {"FLEET_BROKER_URL": users["fleet-worker"], "FLEET_MAX_ATTEMPTS": "1"}
    with running_worker(server, config, "--autoscale=2,1", node=node, environ=environ) as running:
        yield running


@pytest.fixture(scope="module")
def worker(server: TestServer, config: Path, users: dict[str, str]) -> Iterator[Worker]:
    """Return a worker for all that lose a right: each is given back."""
    with documented_worker(server, config, users, "lacking") as running:
        yield running


def test_a_worker_an_app_and_people_need_no_more_than_is_documented(
    server: TestServer, config: Path, client: redis.Redis, users: dict[str, str], log: Path
) -> None:
    held = held_by(log)
    held.touch()
    settings = Settings(broker_url=users["fleet-app"])
    people = {"FLEET_BROKER_URL": users["fleet-people"]}
    client.acl_log_reset()
    with (
        documented_worker(server, config, users, "documented") as worker,
        Client(settings) as fleet,
        fleet_app(settings) as (_, infer),
    ):
        slow = fleet.submit(MODEL, {"x": row(job=100)})
        # What is given up now waits behind it.
        wait_until(lambda: starts(log).get(100), what="the start of the first")
        unwanted = fleet.submit(MODEL, {"x": row()}, priority="low")
        unwanted.cancel()
        infer.delay(MODEL, {"x": row()}).revoke()
        held.unlink()
        answer = infer.delay(MODEL, {"x": row()}).get(timeout=20)
        delayed = infer.apply_async((MODEL, {"x": row()}), countdown=1).get(timeout=20)
        large = fleet.submit(MODEL, {"x": row(Do.LARGE, 1.0)})
        too_large = fleet.submit(MODEL, {"x": np.zeros((1, 20_000), np.float32)})
        with pytest.raises(BadRequest, match="must have shape"):
            too_large.reply(timeout_s=20)
        poison = fleet.submit(MODEL, {"x": row(Do.KILL)})
        with pytest.raises(WorkerLost):
            poison.reply(timeout_s=30)
        with pytest.raises(Cancelled):
            unwanted.reply(timeout_s=20)
        members = [infer.s(MODEL, {"x": row()}) for _ in range(2)]
        together = chord(members)(infer.for_model(MODEL).s())
        with pytest.raises(BadRequest, match="must be a map"):
            together.get(timeout=20)
        assert slow.reply(timeout_s=20).model == MODEL
        assert large.reply(timeout_s=20).outputs["y"].nbytes == 1 << 20

        said = [
            run_command(*words, **people)
            for words in (
                (*FLEET, "status"),
                (*FLEET, "queue"),
                (*FLEET, "dead", "list"),
                (*FLEET, "dead", "show", poison.id),
                (*FLEET, "dead", "purge", "--all", "--yes"),
                # Named, so that they need not wait for what others might answer.
                (*CELERY, "inspect", "-d", worker.node, "-t", "10", "stats"),
                (*CELERY, "inspect", "-d", worker.node, "-t", "10", "active"),
                (*CELERY, "control", "-d", worker.node, "-t", "10", "autoscale", "2", "1"),
            )
        ]
        with fleet_app(Settings(broker_url=users["fleet-people"])) as (app, _):
            heartbeat = next_event(app)
        exit_status = worker.stop()

    for outputs in (answer, delayed):
        assert np.array_equal(outputs["y"], row() * 2)
    assert [(ended.args, ended.stderr) for ended in said if ended.returncode] == []
    assert heartbeat["hostname"] == worker.node
    assert exit_status == 0
    assert refusals(client) == []


@pytest.mark.parametrize("lacking", RIGHTS)
def test_a_worker_that_loses_a_right_names_it_and_goes_on_when_it_has_it_again(
    client: redis.Redis, users: dict[str, str], worker: Worker, log: Path, lacking: str
) -> None:
    job = 1 + RIGHTS.index(lacking)
    command = lacking.removeprefix("-")
    said_before = len(worker.log())
    pids = [worker.pid, *worker.instance_pids()]
    with Client(Settings(broker_url=users["fleet-app"])) as fleet:
        client.execute_command("ACL", "SETUSER", "fleet-worker", lacking)
        # Whoever has subscribed stays so; a new connection is refused.
        client.client_kill_filter(_type="pubsub")
        sent = fleet.submit(MODEL, {"x": row(job=job)})
        # An old server says of a script that it was refused, and not what in it.
        wanted = re.compile(rf"'{command}'|\.lua: " if is_old(client) else f"'{command}'")
        wait_until(lambda: wanted.search(worker.log()[said_before:]), what=f"{command} in the log")

        client.execute_command("ACL", "SETUSER", "fleet-worker", f"+{command}")

        assert sent.reply(timeout_s=20).model == MODEL
    assert [worker.pid, *worker.instance_pids()] == pids
    assert starts(log)[job] == 1


def test_no_user_reads_a_key_of_another_application(users: dict[str, str]) -> None:
    for name in ("fleet-worker", "fleet-app"):
        with redis_client(users[name]) as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.get("another:application")
