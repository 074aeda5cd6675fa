"""The keeper's thread on a real server: a flood in one list delays nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract.names import FREE, GROUP, Keys, Priority
from tests.support.leasing import leasing_nothing
from tests.support.pace import Pace
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from workers.parent.deaths import Cause, Death
from workers.parent.keeper import Keeper
from workers.serving import Serving

pytestmark = pytest.mark.redis

KEYS = Keys()
NODE = "keeper@test"
CLAIM_TTL_S = 0.9
FLOOD = 40_000


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    yield client
    # Jobs are left unfinished here on purpose.
    client.flushall()


@pytest.fixture
def said() -> dict[str, str]:
    """Return the status, which a test may change."""
    return {}


@pytest.fixture
def keeper(broker: redis.Redis, server: TestServer, said: dict[str, str]) -> Iterator[Keeper]:
    with server.client() as own:
        made = Keeper(
            client=own,
            keys=KEYS,
            node=NODE,
            serving=Serving(["flooded", "quiet"]),
            claim_ttl_s=CLAIM_TTL_S,
            consumers=lambda: ["alive"],
            status=lambda: said,
            leasing=leasing_nothing(own),
        )
        made.prepare()
        yield made
        made.stop(10)


def claim(broker: redis.Redis, consumer: str) -> None:
    """Let ``consumer`` hold an entry of the quiet queue."""
    stream = KEYS.stream("fleet.quiet", Priority.NORMAL)
    broker.xadd(stream, {"id": consumer})
    broker.xreadgroup(GROUP, consumer, {stream: ">"})


def idle_s(broker: redis.Redis) -> dict[str, float]:
    """Return how long ago each claim on the quiet queue was renewed."""
    stream = KEYS.stream("fleet.quiet", Priority.NORMAL)
    found: Any = broker.xpending_range(stream, GROUP, "-", "+", 10)
    return {each["consumer"].decode(): each["time_since_delivered"] / 1000 for each in found}


def test_a_flood_in_one_list_delays_no_renewal_and_no_release(
    broker: redis.Redis, keeper: Keeper
) -> None:
    claim(broker, "alive")
    claim(broker, "dead")
    message = b'{"body": "%s", "headers": {"id": "j"}, "properties": {}}' % (b"A" * 500)
    broker.lpush("fleet.flooded", *[message] * FLOOD)

    keeper.start()
    wait_until(lambda: broker.llen("fleet.flooded") < FLOOD, what="the first messages moved")
    keeper.died(Death(consumer="dead", cause=Cause.DIED))
    seen = []
    # The keeper is a thread beside this one.
    with Pace() as pace:
        while left := broker.llen("fleet.flooded"):
            seen.append((left, idle_s(broker)))

    freed_at = next(left for left, idle in seen if FREE in idle)
    longest_s = max(idle["alive"] for _, idle in seen)
    print(
        f"{len(seen)} looks, longest without renewal {longest_s:.2f} s, freed at {freed_at}; "
        f"the machine stood still for {pace.longest_s:.2f} s"
    )
    assert longest_s < CLAIM_TTL_S * 2 / 3 + pace.longest_s
    assert freed_at > FLOOD / 2
    assert broker.xlen(KEYS.stream("fleet.flooded", Priority.NORMAL)) == FLOOD


def test_after_a_time_in_which_nobody_could_renew_others_have_time_to(
    broker: redis.Redis, keeper: Keeper
) -> None:
    """The keeper's own instances hold nothing, so that only the attempt tells it of the trouble."""
    keeper.start()
    claim(broker, "other")
    broker.replicaof("127.0.0.1", "1")
    time.sleep(3 * CLAIM_TTL_S)
    broker.replicaof("NO", "ONE")
    ended_s = time.monotonic()

    wait_until(lambda: FREE in idle_s(broker), what="the take-over", every_s=0.01)

    assert time.monotonic() - ended_s > CLAIM_TTL_S / 3


def test_what_changed_is_published_at_once(
    broker: redis.Redis, keeper: Keeper, said: dict[str, str]
) -> None:
    keeper.start()
    wait_until(lambda: broker.exists(KEYS.worker(NODE)), what="the first words")
    said["state"] = "new"
    changed_s = time.monotonic()
    keeper.changed()

    wait_until(lambda: b"new" in (broker.get(KEYS.worker(NODE)) or b""), what="the new state")

    # Without a word from anybody it is published every two seconds.
    assert time.monotonic() - changed_s < 1


def test_a_full_server_is_told_who_is_there_and_what_is_served(
    broker: redis.Redis, keeper: Keeper, said: dict[str, str]
) -> None:
    said["state"] = "working on"
    broker.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            broker.set("anything", 1)

        keeper.start()
        wait_until(
            lambda: json.loads(broker.get(KEYS.worker(NODE)) or b"{}") == said,
            what="the status",
            timeout_s=5,
        )
    finally:
        broker.config_set("maxmemory", 0)

    assert broker.zrange(KEYS.workers, 0, -1) == [NODE.encode()]
    assert broker.zrange(KEYS.models, 0, -1) == [b"flooded", b"quiet"]


def test_a_look_into_empty_lists_is_no_script(broker: redis.Redis, keeper: Keeper) -> None:
    keeper.start()
    broker.lpush("fleet.quiet", b"junk")
    wait_until(lambda: not broker.llen("fleet.quiet"), what="a message to be moved")
    looks_before = calls(broker, "exists")
    broker.config_resetstat()

    wait_until(lambda: calls(broker, "exists") >= 8, what="some looks")

    assert looks_before > 0
    assert broker.xlen(KEYS.stream("fleet.quiet", Priority.NORMAL)) == 1
    assert calls(broker, "type") == 0


def calls(broker: redis.Redis, command: str) -> int:
    """Return how often a command was called since the statistics were reset."""
    about: Any = broker.info("commandstats").get(f"cmdstat_{command}", {})
    return int(about.get("calls", 0))
