"""A broker that fills up: those who send are told in time, and nobody else is held back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import Overloaded
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.publisher import FRESH_S
from producer.tasks import Infer, register
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import running_worker

pytestmark = pytest.mark.redis

MODEL = "scripted"
INPUTS = {"x": row()}
KEYS = Keys()


@pytest.fixture
def infer(server: TestServer, client: redis.Redis) -> Iterator[Infer]:
    app = make_app(Settings(broker_url=server.url))
    task = register(app)
    yield task
    task.publisher.close()
    app.close()


@pytest.fixture(autouse=True)
def no_limit_afterwards(client: redis.Redis) -> Iterator[None]:
    yield
    client.config_set("maxmemory", 0)
    client.flushall()


def fill(client: redis.Redis, part: float = 0.95) -> None:
    """Let this part of maxmemory be used, most of it by a ballast, so that clients count little."""
    client.setrange("ballast", 32 * 1024 * 1024, "x")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / part))


def seconds_until_told(send: Callable[[], Any]) -> float:
    """Send until it is refused by the watermark."""

    def told() -> str | None:
        try:
            send()
        except Overloaded as error:
            return str(error)
        return None

    began_s = time.monotonic()
    text = wait_until(told, what="a refusal", timeout_s=5)
    assert "FLEET_MEMORY_WATERMARK" in text
    assert "Send again later" in text
    return time.monotonic() - began_s


@pytest.mark.scripts
def test_every_way_to_send_is_told_before_the_server_is_full(
    infer: Infer, fleet: Client, client: redis.Redis
) -> None:
    ways: Mapping[str, Callable[[], Any]] = {
        "delay": lambda: infer.delay(MODEL, INPUTS),
        "through kombu": lambda: infer.apply_async((MODEL, INPUTS), compression=None),
        "submit": lambda: fleet.submit(MODEL, INPUTS),
        "submit_many": lambda: fleet.submit_many(MODEL, [INPUTS] * 3),
    }
    for send in ways.values():
        send()

    fill(client)
    took_s = {name: seconds_until_told(send) for name, send in ways.items()}

    assert max(took_s.values()) < 2 * FRESH_S
    client.config_set("maxmemory", 0)
    for send in ways.values():
        send()


def test_submit_many_looks_before_each_part_and_says_what_was_sent(
    fleet: Client, client: redis.Redis
) -> None:
    def many() -> Iterator[Mapping[str, Any]]:
        for number in range(100_000):
            if number == 300:
                fill(client)
                time.sleep(FRESH_S)
            yield INPUTS

    with pytest.raises(Overloaded) as told:
        fleet.submit_many(MODEL, many())

    sent = told.value.jobs  # type: ignore[attr-defined]
    assert len(sent) == 256
    assert client.xlen(KEYS.stream(f"fleet.{MODEL}", Priority.NORMAL)) == len(sent)


@pytest.mark.scripts
def test_a_server_that_is_really_full_refuses_at_once(
    infer: Infer, fleet: Client, client: redis.Redis
) -> None:
    infer.delay(MODEL, INPUTS)
    fleet.submit(MODEL, INPUTS)
    client.config_set("maxmemory", 1)

    for send in (infer.delay, fleet.submit):
        with pytest.raises(Overloaded, match="is full"):
            send(MODEL, INPUTS)


def test_a_server_without_a_limit_is_never_too_full(infer: Infer, client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)

    infer.delay(MODEL, INPUTS)
    time.sleep(FRESH_S)
    infer.delay(MODEL, INPUTS)


@pytest.mark.scripts
def test_a_user_who_may_not_ask_sends_all_the_same_and_asks_once_a_minute(
    server: TestServer, client: redis.Redis
) -> None:
    client.execute_command("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-info")
    client.config_resetstat()
    url = server.url.replace("redis://", "redis://app:pw@")
    try:
        with Client(Settings(broker_url=url)) as fleet:
            fleet.submit(MODEL, INPUTS)
            fill(client)
            time.sleep(FRESH_S)
            fleet.submit(MODEL, INPUTS)
            time.sleep(FRESH_S)
            fleet.submit(MODEL, INPUTS)
        refused = client.info("commandstats")["cmdstat_info"]["rejected_calls"]
    finally:
        client.execute_command("ACL", "DELUSER", "app")

    assert refused == 1
    assert client.xlen(KEYS.stream(f"fleet.{MODEL}", Priority.NORMAL)) == 3


def test_a_watermark_of_1_leaves_the_refusal_to_the_server(
    server: TestServer, client: redis.Redis
) -> None:
    with Client(Settings(broker_url=server.url, memory_watermark=1)) as fleet:
        fill(client, 0.95)

        fleet.submit(MODEL, INPUTS)


def test_workers_and_those_who_cancel_or_await_are_not_held_back(
    server: TestServer, fleet: Client, client: redis.Redis, config: Path, log: Path
) -> None:
    jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 101)))
    fill(client, 0.98)
    assert seconds_until_told(lambda: fleet.submit(MODEL, INPUTS)) < 2 * FRESH_S
    jobs[-1].cancel()

    with running_worker(server, config):
        for job in jobs[:-1]:
            job.reply(30)
        wait_until(lambda: jobs[-1].done, what="the end of the cancelled job")

    assert len(starts(log)) == 99
