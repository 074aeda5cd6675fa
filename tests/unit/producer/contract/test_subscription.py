"""A subscription hears again after whatever happened to its connection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract.settings import reading_options, redis_client
from producer.contract.subscription import News, Subscription
from tests.support.proxy import Proxy, running_proxy
from tests.support.servers import TestServer

pytestmark = pytest.mark.redis


@pytest.fixture
def proxy(server: TestServer) -> Iterator[Proxy]:
    with running_proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def subscription(proxy: Proxy) -> Iterator[Subscription]:
    subscription = Subscription(redis_client(proxy.url, **reading_options()))
    subscription.begin([b"one"])
    until_begun(subscription)
    yield subscription
    subscription.close()


def until_begun(subscription: Subscription, within_s: float = 5) -> None:
    deadline_s = time.monotonic() + within_s
    while subscription.news(0.05) is not None:
        assert time.monotonic() < deadline_s


def test_what_is_published_is_heard(subscription: Subscription, client: redis.Redis) -> None:
    client.publish("one", "a")
    client.publish("one", "b")

    # They need not come together.
    heard: list[News] = []
    while len(heard) < 2 and (more := subscription.news(5)):
        heard += more
    assert heard == [News(b"one", b"a"), News(b"one", b"b")]
    assert subscription.news(0.01) == []


def test_a_cut_is_told_and_heard_over(subscription: Subscription, client: redis.Redis) -> None:
    for word in ("a", "b", "c"):
        client.client_kill_filter(_type="pubsub")
        until_begun(subscription)
        client.publish("one", word)

        assert subscription.news(5) == [News(b"one", word.encode())]


def test_silence_is_told_from_death(
    subscription: Subscription, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.contract.subscription._SILENT_S", 1)
    for _ in range(12):
        assert subscription.news(0.25) == []

    proxy.mute()

    until_begun(subscription)


@pytest.mark.parametrize("lasted_s", [0, 1.2])
def test_nothing_is_heard_while_nobody_answers_and_few_are_asked(
    subscription: Subscription, proxy: Proxy, client: redis.Redis, lasted_s: float
) -> None:
    """However good the connection was that ended, what comes after it is tried with pauses."""
    assert subscription.news(lasted_s) == []
    proxy.refusing = True
    client.client_kill_filter(_type="pubsub")
    began_s, turns = time.monotonic(), 0
    while time.monotonic() - began_s < 1.5:
        assert subscription.news(0.2) == []
        turns += 1

    assert turns < 25
    proxy.refusing = False
    until_begun(subscription)


def pubsub_ids(client: Any) -> set[str]:
    return {each["id"] for each in client.client_list(_type="pubsub")}


def test_a_connection_is_kept_for_what_begins_next(
    subscription: Subscription, client: redis.Redis
) -> None:
    before = pubsub_ids(client)
    subscription.end()
    subscription.begin([b"two"])
    until_begun(subscription)
    client.publish("one", "a")
    client.publish("two", "b")

    assert subscription.news(5) == [News(b"two", b"b")]
    # Those of tests before it may be gone by now.
    assert pubsub_ids(client) <= before
