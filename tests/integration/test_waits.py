"""Waits that survive: each way of waiting for replies, under each fault of Redis and the network.

Results are stored by the tests, in a worker's place, at the moment that is worst.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import kombu.pools
import pytest
import redis
from celery.exceptions import TimeoutError as CeleryTimeoutError

from producer.contract.settings import Settings
from tests.support.proxy import Proxy, running_proxy
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.waits import COUNTS, Answers, Wait, finish, waits

pytestmark = pytest.mark.redis

#: A loop that stands still for longer was blocked by a wait.
LAG_S = 0.5


@pytest.fixture
def server() -> Iterator[TestServer]:
    """A server of its own for each test, which may kill it."""
    with running_server() as server:
        yield server


@pytest.fixture
def settings(server: TestServer) -> Settings:
    return Settings(broker_url=server.url)


@pytest.fixture
def proxy(server: TestServer) -> Iterator[Proxy]:
    with running_proxy(server.port) as proxy:
        yield proxy


def heard(client: redis.Redis, made: list[Wait]) -> bool:
    """Return whether all that subscribe have done so."""
    channels: Any = client.pubsub_channels()
    results = {"get": 1, "group": COUNTS["group"], "as_completed of results": 0}
    wanted = sum(results.get(wait.way, 0) for wait in made)
    # Clients of one process hear on one channel.
    clients = {wait.client.id for wait in made if wait.way not in results}
    return len(channels) >= wanted + len(clients)


def subscribers(client: redis.Redis) -> set[str]:
    listed: Any = client.client_list(_type="pubsub")
    return {each["id"] for each in listed}


def until_heard(client: redis.Redis, made: list[Wait]) -> None:
    wait_until(lambda: heard(client, made), what="the subscriptions")


@pytest.fixture(autouse=True, scope="module")
def nobody_is_handed_a_dead_connection() -> Iterator[None]:
    """Close what kombu keeps open for all apps of this process: the tests here cut it."""
    yield
    kombu.pools.reset()


def test_a_lost_message(client: redis.Redis, settings: Settings) -> None:
    with waits(settings) as made:
        until_heard(client, made)

        for wait in made:
            Answers(settings).store(client, wait, announce=False)

        print(finish(made, within_s=5))


@pytest.mark.parametrize("kinds", [("pubsub",), ("pubsub", "normal")], ids="-".join)
def test_connections_are_killed_again_and_again(
    client: redis.Redis, settings: Settings, kinds: tuple[str, ...]
) -> None:
    with waits(settings) as made:
        until_heard(client, made)

        for wait in made:
            for kind in kinds:
                client.client_kill_filter(_type=kind, skipme=True)
            Answers(settings).store(client, wait)
            time.sleep(0.1)

        print(finish(made, within_s=8), f"lag {max(wait.lag_s for wait in made):.3f} s")
        assert max(wait.lag_s for wait in made) < LAG_S


def test_messages_are_heard_again_after_a_cut(client: redis.Redis, settings: Settings) -> None:
    with waits(settings, ["get", "group"]) as made:
        until_heard(client, made)
        cut = subscribers(client)
        client.client_kill_filter(_type="pubsub")
        wait_until(lambda: not cut & subscribers(client), what="the end of the connections")
        until_heard(client, made)

        for wait in made:
            for number, job_id in enumerate(wait.ids):
                payload = Answers(settings).payload(job_id, {"i": number})
                client.publish(f"celery-task-meta-{job_id}", payload)

        print(finish(made, within_s=5))


@pytest.mark.parametrize("still_s", [4, pytest.param(12, marks=pytest.mark.chaos)])
def test_a_server_stands_still(
    server: TestServer, client: redis.Redis, settings: Settings, still_s: float
) -> None:
    with waits(settings) as made, waits(settings, ["get", "reply", "await"], timeout_s=3) as short:
        until_heard(client, [*made, *short])

        server.freeze()
        began_s = time.monotonic()
        for wait in short:
            wait.join(20)
        given_up_s = time.monotonic() - began_s
        time.sleep(max(0.0, still_s - given_up_s))
        server.thaw()
        for wait in made:
            Answers(settings).store(client, wait)

        print(finish(made, within_s=10), f"given up after {given_up_s:.1f} s")
        assert all(isinstance(wait.error, CeleryTimeoutError | TimeoutError) for wait in short)
        assert given_up_s < 8
        assert max(wait.lag_s for wait in made) < LAG_S


def test_redis_is_killed_and_starts_again(server: TestServer, settings: Settings) -> None:
    with waits(settings) as made:
        with server.client() as client:
            until_heard(client, made)

        server.kill()
        time.sleep(1.5)
        server.start()
        with server.client() as client:
            for wait in made:
                Answers(settings).store(client, wait)

        print(finish(made, within_s=8), f"lag {max(wait.lag_s for wait in made):.3f} s")
        assert max(wait.lag_s for wait in made) < LAG_S


def test_connections_that_are_open_and_dead(
    client: redis.Redis, settings: Settings, proxy: Proxy
) -> None:
    with waits(Settings(broker_url=proxy.url)) as made:
        until_heard(client, made)

        proxy.mute()
        for wait in made:
            Answers(settings).store(client, wait)

        print(finish(made, within_s=10), f"lag {max(wait.lag_s for wait in made):.3f} s")
        assert max(wait.lag_s for wait in made) < LAG_S


def test_results_larger_than_a_subscriber_may_have_waiting(
    client: redis.Redis, settings: Settings, request: pytest.FixtureRequest
) -> None:
    limits = str(client.config_get("client-output-buffer-limit")["client-output-buffer-limit"])
    request.addfinalizer(lambda: client.config_set("client-output-buffer-limit", limits))
    client.config_set("client-output-buffer-limit", "pubsub 1mb 512kb 5")
    with waits(settings, ["get", "group", "reply", "await"]) as made:
        until_heard(client, made)
        for wait in made:
            Answers(settings).store(client, wait, more={"y": bytes(2 * 1024 * 1024)})

        print(finish(made, within_s=10))
