"""Sending while Redis is away and over connections that break: an error soon, no job twice."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.blobs import Blobs, Named
from producer.contract.errors import BadRequest, Overloaded
from producer.contract.message import from_fields
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from tests.support.engines import row, starts
from tests.support.proxy import running_proxy
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
STREAM = Keys().stream(f"fleet.{MODEL}", Priority.NORMAL)
#: Options that choose the short way to the broker, or the one through Celery and kombu.
WAYS: dict[str, dict[str, Any]] = {"short": {}, "kombu": {"compression": None}}


@pytest.fixture
def server() -> Iterator[TestServer]:
    """A server of its own for each test, which may kill it."""
    with running_server() as server:
        yield server


@pytest.fixture
def infer(server: TestServer) -> Infer:
    return register(make_app(Settings(broker_url=server.url)))


def send(infer: Infer, options: dict[str, Any], **more: Any) -> Any:
    return infer.apply_async((MODEL, {"x": row()}), **options, **more)


def refused_after_s(infer: Infer, options: dict[str, Any]) -> float:
    began_s = time.monotonic()
    with pytest.raises(OperationalError):
        send(infer, options)
    return time.monotonic() - began_s


@pytest.mark.parametrize("way", WAYS)
def test_a_send_while_redis_is_away_fails_soon_and_works_when_it_is_back(
    server: TestServer, infer: Infer, way: str
) -> None:
    send(infer, WAYS[way])
    server.kill()

    took_s: list[float] = []
    threads = [
        threading.Thread(target=lambda: took_s.append(refused_after_s(infer, WAYS[way])))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took_s) == 8
    assert max(took_s) < 5
    server.start()

    sent = [threading.Thread(target=send, args=(infer, WAYS[way])) for _ in range(8)]
    for thread in sent:
        thread.start()
    for thread in sent:
        thread.join()
    with server.client() as client:
        assert client.xlen(STREAM) >= 8


@pytest.fixture
def nowhere() -> Iterator[str]:
    """The URL of a port that answers no attempt to connect."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # What is not accepted fills the backlog; from then on the kernel drops what comes.
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"


@pytest.mark.parametrize("way", WAYS)
def test_a_send_to_a_server_that_cannot_be_reached_fails_soon(nowhere: str, way: str) -> None:
    infer = register(make_app(Settings(broker_url=nowhere)))

    assert 1 < refused_after_s(infer, WAYS[way]) < 5


def test_a_send_to_a_server_that_stands_still_fails_soon(server: TestServer, infer: Infer) -> None:
    send(infer, {})
    server.freeze()

    took_s = refused_after_s(infer, {})

    server.thaw()
    assert took_s < 6
    send(infer, {})


def test_a_connection_that_died_while_it_was_idle_is_noticed(
    server: TestServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.publisher._IDLE_S", 0.0)
    with running_proxy(server.port) as proxy:
        infer = register(make_app(Settings(broker_url=proxy.url)))
        send(infer, {})
        proxy.mute()

        send(infer, {})

    assert client.xlen(STREAM) == 2


def test_a_job_of_many_megabytes_is_sent_whole(client: redis.Redis, infer: Infer) -> None:
    image = np.arange(5_000_000, dtype=np.float32).reshape(1, -1)

    infer.delay(MODEL, {"x": image})

    entries: Any = client.xrange(STREAM)
    ((_, fields),) = entries
    blobs = Blobs.of(Settings()).read(client, [Named.read(fields[b"blobs"])])
    args, _, _ = wire.loads(from_fields(fields).body, blobs)
    np.testing.assert_array_equal(args[1]["x"], image)


def test_a_send_whose_reply_is_lost_is_sent_again_and_runs_once(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    with running_proxy(server.port) as proxy:
        infer = register(make_app(Settings(broker_url=proxy.url)))
        send(infer, {})
        client.delete(STREAM)
        proxy.swallow = b"XADD"

        job = infer.delay(MODEL, {"x": row(job=1)})

        assert client.xlen(STREAM) == 2
        with running_worker(server, config) as worker:
            assert job.get(timeout=20)["y"].shape == (1, 3)
            wait_until(lambda: client.xlen(STREAM) == 0, what="an empty queue")
            worker.stop()
        assert starts(log) == {1: 1}


@pytest.mark.parametrize("ignored", [False, True])
def test_the_second_of_two_sends_comes_after_the_first_has_run(
    server: TestServer, client: redis.Redis, config: Path, log: Path, ignored: bool
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    options: dict[str, Any] = {"task_id": "same", "ignore_result": ignored}
    with running_worker(server, config) as worker:
        for _ in range(2):
            infer.apply_async((MODEL, {"x": row(job=1)}), **options)
            wait_until(lambda: starts(log).get(1), what="the start")
            wait_until(lambda: client.xlen(STREAM) == 0, what="an empty queue")
        worker.stop()

    assert starts(log) == {1: 1}


_inherited: list[Infer] = []


def _send_and_get(infer: Infer, number: int) -> bool:
    return bool(infer.delay(MODEL, {"x": row(argument=number)}).get(timeout=10)["y"][0, 1])


def test_a_forked_child_sends_on_connections_of_its_own(
    server: TestServer, infer: Infer, config: Path
) -> None:
    with running_worker(server, config):
        assert _send_and_get(infer, 1)

        with multiprocessing.get_context("fork").Pool(3, _inherit, (infer,)) as children:
            assert children.map(_ask_in_child, range(1, 7)) == [True] * 6
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if _send_and_get(infer, 2) else 2)
            finally:
                os._exit(1)

        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert _send_and_get(infer, 3)


def _inherit(infer: Infer) -> None:
    _inherited.append(infer)


def _ask_in_child(number: int) -> bool:
    return _send_and_get(_inherited[0], number)


def test_a_bad_input_among_many_says_which_were_accepted(
    server: TestServer, client: redis.Redis
) -> None:
    def many() -> Iterator[Any]:
        for number in range(500):
            yield {"x": row(job=number)} if number != 300 else "not a mapping"

    with Client(Settings(broker_url=server.url)) as fleet:
        with pytest.raises(BadRequest) as told:
            fleet.submit_many(MODEL, many(), job_ids=(f"{number}" for number in range(500)))

        accepted: Any = vars(told.value)["jobs"]
        assert [job.id for job in accepted] == [f"{number}" for number in range(300)]
        assert client.xlen(STREAM) == 300


def test_a_redis_that_is_full_in_the_middle_says_which_were_accepted(
    server: TestServer, client: redis.Redis
) -> None:
    def many() -> Iterator[Any]:
        for number in range(500):
            if number == 300:
                client.config_set("maxmemory", 1)
            yield {"x": row(job=number)}

    with Client(Settings(broker_url=server.url)) as fleet:
        with pytest.raises(Overloaded) as told:
            fleet.submit_many(MODEL, many())
        client.config_set("maxmemory", 0)

        accepted: Any = vars(told.value)["jobs"]
        assert len(accepted) == 256
        assert client.xlen(STREAM) == 256


def test_what_redis_did_not_take_is_sent_again_under_the_same_ids_and_runs_once(
    server: TestServer, config: Path, log: Path
) -> None:
    ids = [f"job-{number}" for number in range(1, 501)]
    inputs = [{"x": row(job=number)} for number in range(1, 501)]
    with (
        running_proxy(server.port) as proxy,
        Client(Settings(broker_url=proxy.url)) as fleet,
    ):

        def many() -> Iterator[Any]:
            for number, each in enumerate(inputs):
                if number == 300:
                    proxy.swallow = b"job-301"
                    proxy.refusing = True
                yield each

        with pytest.raises(OperationalError) as told:
            fleet.submit_many(MODEL, many(), job_ids=ids)
        accepted: Any = vars(told.value)["jobs"]
        have = {job.id for job in accepted}
        rest = [
            (job_id, each) for job_id, each in zip(ids, inputs, strict=True) if job_id not in have
        ]
        proxy.refusing = False
        jobs = accepted + fleet.submit_many(
            MODEL, [each for _, each in rest], job_ids=[job_id for job_id, _ in rest]
        )

        assert len(have) == 256
        with running_worker(server, config):
            assert sum(1 for _ in fleet.as_completed(jobs, timeout_s=20)) == 500
    assert starts(log) == dict.fromkeys(range(1, 501), 1)


def test_ids_that_do_not_go_round_are_told(server: TestServer) -> None:
    with Client(Settings(broker_url=server.url)) as fleet, pytest.raises(ValueError, match="zip"):
        fleet.submit_many(MODEL, [{"x": row()}] * 2, job_ids=["one"])
