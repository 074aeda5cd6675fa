"""How queues are counted: what waits, what is held, how old it is, and which queues there are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract import queues
from producer.contract.names import FREE, GROUP, Keys, Priority

QUEUE = "fleet.digits"
KEYS = Keys()
NORMAL, LOW = KEYS.stream(QUEUE, Priority.NORMAL), KEYS.stream(QUEUE, Priority.LOW)


@pytest.fixture
def full(client: redis.Redis) -> Iterator[None]:
    """Fill the server up when everything is in place."""
    yield
    client.config_set("maxmemory", 0)


def held(client: redis.Redis) -> queues.Held:
    return queues.count(client, KEYS, [QUEUE], oldest=True)[QUEUE]


def add(client: redis.Redis, stream: str, jobs: int) -> list[Any]:
    return [client.xadd(stream, {"id": str(number)}) for number in range(jobs)]


def test_a_queue_that_nobody_ever_used_holds_nothing(client: redis.Redis) -> None:
    found = held(client)

    assert found.nothing
    assert found.oldest_s is None
    assert queues.count(client, KEYS, []) == {}


def test_what_nobody_ever_served_waits(client: redis.Redis) -> None:
    add(client, NORMAL, 3)
    add(client, LOW, 2)

    assert held(client).waiting == held(client).queued == 5


def test_what_an_instance_holds_is_claimed_and_what_was_given_back_waits(
    client: redis.Redis,
) -> None:
    ids = add(client, NORMAL, 10)
    client.xgroup_create(NORMAL, GROUP, id="0")
    client.xreadgroup(GROUP, "instance", {NORMAL: ">"}, count=6)
    client.xclaim(NORMAL, GROUP, FREE, 0, ids[:4])
    client.zadd(KEYS.delayed(QUEUE), {"one": 1, "two": 2})
    client.xadd(KEYS.dead(QUEUE), {"job": "gone"})

    found = held(client)

    assert (found.waiting, found.claimed, found.delayed, found.dead) == (8, 2, 2, 1)
    assert not found.nothing


def test_the_oldest_is_the_oldest_that_waits_by_the_clock_of_the_server(
    client: redis.Redis,
) -> None:
    seconds, _ = client.time()
    ages_s = (500, 400, 300, 200)
    ids: list[Any] = [
        client.xadd(NORMAL, {"id": "x"}, id=f"{(seconds - age_s) * 1000}-0") for age_s in ages_s
    ]
    client.xgroup_create(NORMAL, GROUP, id="0")
    client.xreadgroup(GROUP, "instance", {NORMAL: ">"}, count=3)

    new = held(client).oldest_s
    client.xclaim(NORMAL, GROUP, FREE, 0, [ids[1]])
    given_back = held(client).oldest_s
    client.xadd(LOW, {"id": "x"}, id=f"{(seconds - 900) * 1000}-0")
    of_all = held(client).oldest_s

    assert new == pytest.approx(200, abs=5)
    assert given_back == pytest.approx(400, abs=5)
    assert of_all == pytest.approx(900, abs=5)


def test_what_was_deleted_while_it_was_held_counts_nowhere(client: redis.Redis) -> None:
    ids = add(client, NORMAL, 2)
    client.xgroup_create(NORMAL, GROUP, id="0")
    client.xreadgroup(GROUP, "instance", {NORMAL: ">"}, count=2)
    client.xdel(NORMAL, *ids)

    assert held(client).queued == 0


def test_a_full_server_is_counted_too(client: redis.Redis, full: None) -> None:
    add(client, NORMAL, 3)
    client.config_set("maxmemory", 1)

    assert held(client).waiting == 3


def test_many_jobs_are_counted_as_fast_as_a_few(client: redis.Redis) -> None:
    add(client, NORMAL, 10)
    client.xgroup_create(NORMAL, GROUP, id="0")
    few_s = fastest(client)
    client.eval("for i = 1, 200000 do redis.call('XADD', KEYS[1], '*', 'id', i) end", 1, NORMAL)

    many_s = fastest(client)

    assert held(client).waiting == 200_010
    assert many_s < 20 * few_s


def fastest(client: redis.Redis) -> float:
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        held(client)
        times.append(time.perf_counter() - began_s)
    return min(times)


def test_queues_are_found_by_whatever_they_hold(client: redis.Redis) -> None:
    keys = Keys(prefix="ours[1]*:")
    client.xadd(keys.stream("fleet.streamed", Priority.HIGH), {"id": "x"})
    client.zadd(keys.delayed("fleet.delayed"), {"x": 1})
    client.xadd(keys.dead("fleet.dead"), {"job": "x"})
    client.set(keys.fence("stream:fleet.fenced:high"), 1)
    client.xadd(KEYS.stream("fleet.theirs", Priority.HIGH), {"id": "x"})

    assert queues.find(client, keys) == {"fleet.streamed", "fleet.delayed", "fleet.dead"}
    assert queues.find(client, KEYS) == {"fleet.theirs"}


def test_who_serves_a_queue_is_added_up_over_the_workers() -> None:
    def instance(state: str, engine: str = "ready") -> dict[str, Any]:
        return {"state": state, "models": {"digits": {"state": engine}}}

    words: list[dict[str, Any]] = [
        {
            "models": ["digits", "other"],
            "answered_per_s": {"digits": 12.5},
            "instances": [instance("ready"), instance("broken"), instance("broken", "broken")],
        },
        {"models": ["digits"], "answered_per_s": {}, "instances": [instance("draining")]},
        {"models": ["other"], "answered_per_s": {"other": 5.0}, "instances": []},
    ]

    assert queues.served_by(words, "digits") == queues.Served(
        workers=2, ready=2, answered_per_s=12.5
    )
    assert queues.served_by(words, "nobodys") == queues.Served()
