"""kill -9 while a worker moves messages of a stock app from a list: each is answered once."""

from __future__ import annotations

import base64
import collections
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from producer.contract.names import GROUP, Keys
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

KEYS = Keys()
MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
ROUNDS = 3
JOBS = 5000

chance = random.Random(1)


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    with config_folder({MODEL: {**SCRIPTED, "options": {"log": str(log)}}}) as folder:
        yield folder


def messages(server: TestServer, first: int) -> list[bytes]:
    """Return JOBS messages of a stock app, made large so that moving them takes a while."""
    with Celery(broker=server.url, set_as_current=False) as stock, server.client() as client:
        stock.send_task("fleet.infer", queue="elsewhere", headers={"padding": "x" * 8192})
        sent: Any = client.rpop("elsewhere")
    message = json.loads(sent)
    found = []
    for number in range(first, first + JOBS):
        call = [[MODEL, {"x": row(job=number).tolist()}], {}, {}]
        message["body"] = base64.b64encode(json.dumps(call).encode()).decode()
        message["headers"]["id"] = f"job-{number}"
        found.append(json.dumps(message).encode())
    return found


def in_the_middle(client: redis.Redis, sent: list[bytes], do: Callable[[], None]) -> None:
    """Put messages into the list and call ``do`` while they are moved; print how many are left."""
    client.lpush(QUEUE, *sent)
    wait_until(lambda: client.llen(QUEUE) < JOBS, what="the first to be moved", every_s=0)
    time.sleep(chance.uniform(0, 0.05))
    left = client.llen(QUEUE)
    do()
    print(f"left in the list at the kill: {left}")
    assert left > 0


def assert_each_is_answered_once(server: TestServer, log: Path, count: int) -> None:
    names = [KEYS.result(f"job-{number}") for number in range(1, count + 1)]
    with server.client() as client:
        wait_until(
            lambda: client.exists(*names) == count,
            what=f"{count} results",
            timeout_s=120,
            every_s=0.5,
        )
        stored: Any = client.mget(names)
        assert {json.loads(each)["status"] for each in stored} == {"SUCCESS"}
        assert not client.exists(*KEYS.lists(QUEUE), KEYS.delayed(QUEUE), KEYS.dead(QUEUE))
        wait_until(lambda: not any(map(client.xlen, KEYS.streams(QUEUE))), what="an empty stream")
        assert not client.exists(KEYS.journal(QUEUE))
        for stream in KEYS.streams(QUEUE):
            assert client.xpending(stream, GROUP)["pending"] == 0
    counts = collections.Counter(starts(log).values())
    print(f"starts: {dict(sorted(counts.items()))}")
    assert sum(counts.values()) == count
    assert set(counts) <= {1, 2}


def test_the_worker_is_killed_while_it_moves(broker: TestServer, config: Path, log: Path) -> None:
    environ = {"FLEET_CLAIM_TTL_S": "6"}
    with broker.client() as client:
        for turn in range(ROUNDS):
            sent = messages(broker, 1 + turn * JOBS)
            with running_worker(broker, config, node=f"w{turn}", environ=environ) as worker:
                in_the_middle(client, sent, partial(os.kill, worker.pid, signal.SIGKILL))

    with running_worker(broker, config, node="last", environ=environ):
        assert_each_is_answered_once(broker, log, ROUNDS * JOBS)


def test_redis_is_killed_while_messages_are_moved(
    broker: TestServer, config: Path, log: Path
) -> None:
    def restart() -> None:
        broker.kill()
        broker.start()

    with running_worker(broker, config) as worker:
        parent = worker.pid
        for turn in range(ROUNDS):
            sent = messages(broker, 1 + turn * JOBS)
            wait_for_keeper(broker, worker)
            with broker.client() as client:
                in_the_middle(client, sent, restart)

        assert_each_is_answered_once(broker, log, ROUNDS * JOBS)
        assert worker.pid == parent


def wait_for_keeper(broker: TestServer, worker: Worker) -> None:
    """Wait until the lists are looked into again."""
    with broker.client() as client:
        client.lpush(QUEUE, b"")
        wait_until(lambda: not client.llen(QUEUE), what="a look into the list")
        wait_until(lambda: client.delete(KEYS.dead(QUEUE)), what="the dead letter of the look")
