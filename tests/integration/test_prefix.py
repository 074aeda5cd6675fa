"""Fleets that share one database by a prefix: all that one does is its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis
from celery import group

from producer.client import Client
from producer.contract.errors import Cancelled, JobTimeout, WorkerLost
from producer.contract.settings import Settings, redis_client
from tests.support.app import fleet_app
from tests.support.commands import CELERY, FLEET, run_command
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import Worker, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

MODEL: Final = "scripted"
PREFIX: Final = "app1:"


@pytest.fixture
def fenced_url(server: TestServer, client: redis.Redis) -> Iterator[str]:
    """Return a URL whose user is refused whatever key or channel lacks the prefix."""
    client.acl_log_reset()
    client.acl_setuser(
        "fenced",
        enabled=True,
        passwords=["+secret"],
        keys=[f"{PREFIX}*"],
        # Whoever subscribes to a pattern must be allowed that very pattern.
        channels=[f"{PREFIX}*", f"{PREFIX}/3.celery.pidbox"],
        categories=["+@all"],
    )
    yield f"redis://fenced:secret@127.0.0.1:{server.port}/3"
    client.acl_deluser("fenced")
    client.flushall()


@pytest.fixture
def environ(fenced_url: str) -> dict[str, str]:
    return {"FLEET_BROKER_URL": fenced_url, "FLEET_PREFIX": PREFIX}


@pytest.fixture
def worker(server: TestServer, config: Path, environ: dict[str, str]) -> Iterator[Worker]:
    with running_worker(server, config, environ=environ) as running:
        yield running


def test_everything_works_with_a_prefix_and_touches_no_key_without_it(
    worker: Worker, environ: dict[str, str], log: Path
) -> None:
    settings = Settings(broker_url=environ["FLEET_BROKER_URL"], prefix=PREFIX)
    with Client(settings) as client, fleet_app(settings) as (_, infer):
        slow = client.submit(MODEL, {"x": row(Do.SLEEP, 2.0, job=1)})
        # Else it might be of one batch with what is not wanted.
        wait_until(lambda: starts(log), what="the slow one to run")
        unwanted = client.submit(MODEL, {"x": row()}, priority="low")
        unwanted.cancel()
        answer = infer.delay(MODEL, {"x": row()}).get(timeout=20)
        delayed = infer.apply_async((MODEL, {"x": row()}), countdown=1).get(timeout=20)
        several = group(infer.s(MODEL, {"x": row()}) for _ in range(2))().get(timeout=20)
        poison = client.submit(MODEL, {"x": row(Do.KILL)})
        with pytest.raises(WorkerLost):
            poison.reply(timeout_s=30)
        with pytest.raises(Cancelled):
            unwanted.reply(timeout_s=20)

        assert slow.reply(timeout_s=20).model == MODEL
        for outputs in (answer, delayed, *several):
            assert np.array_equal(outputs["y"], row() * 2)

    assert worker.node in run_command(*FLEET, "status", **environ).stdout
    assert poison.id in run_command(*FLEET, "dead", "list", **environ).stdout
    # Named, it ends with the answer; a busy machine may need longer than the second by default.
    asked = (*CELERY, "inspect", "-d", worker.node, "-t", "10", "ping")
    assert "pong" in run_command(*asked, **environ).stdout
    with redis_client(environ["FLEET_BROKER_URL"].replace("fenced:secret@", "")) as everybody:
        assert all(key.startswith(PREFIX.encode()) for key in everybody.keys("*"))
        refused: Any = everybody.acl_log()
    assert refused == []


def test_a_fleet_of_another_prefix_sees_nothing_of_it(
    worker: Worker, server: TestServer, environ: dict[str, str], log: Path
) -> None:
    url = f"redis://127.0.0.1:{server.port}/3"
    others = {"FLEET_BROKER_URL": url, "FLEET_PREFIX": "app2:"}
    mine = Settings(broker_url=environ["FLEET_BROKER_URL"], prefix=PREFIX)
    with Client(mine) as client, Client(Settings(broker_url=url, prefix="app2:")) as other:
        client.submit(MODEL, {"x": row(job=1)}, job_id="the-same").reply(timeout_s=20)
        waits = other.submit(MODEL, {"x": row(job=2)}, job_id="the-same")

        with pytest.raises(JobTimeout):
            waits.reply(timeout_s=2)

    assert "start 2 " not in log.read_text()
    assert "No worker runs" in run_command(*FLEET, "status", **others).stdout
    (queue,) = json.loads(run_command(*FLEET, "queue", "--json", **others).stdout)["queues"]
    assert (queue["waiting"], queue["workers"]) == (1, 0)
    assert "pong" not in run_command(*CELERY, "inspect", "ping", **others).stdout
