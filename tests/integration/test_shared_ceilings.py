"""What instances of one kind know together: in Redis, read at load, and no job waits for it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import redis

from producer.contract.names import Keys
from producer.contract.settings import redis_client
from tests.support.acl import documented_users, refusals
from tests.support.servers import TestServer
from workers.batching.ceiling import GROW_AFTER_RUNS, GROW_AFTER_S
from workers.batching.shapes import TensorKey
from workers.memory.ceilings import MOST_SHAPES, Ceilings
from workers.memory.shared_ceilings import SharedCeilings

pytestmark = pytest.mark.redis

KEYS = Keys(prefix="app1:")
KEY = KEYS.ceilings("digits", "abc")
SIZES = (TensorKey("x", "<f4", (3, 224), b""), TensorKey("rate", "<i8", (), b""))


@pytest.fixture
def exchange(client: redis.Redis) -> Callable[[Ceilings], None]:
    shared = SharedCeilings(client, KEYS)
    return lambda ceilings: shared.exchange("digits", "abc", ceilings)


def test_what_one_instance_learned_the_next_one_knows(
    client: redis.Redis, exchange: Callable[[Ceilings], None]
) -> None:
    first, second = Ceilings(), Ceilings()
    first.lower(SIZES, "fp32", failed_rows=32)
    first.lower(SIZES, "fp16", failed_rows=32)
    exchange(first)

    exchange(second)

    assert second.of(SIZES) == {"fp32": 16, "fp16": 16}
    assert client.keys("*") == [KEY.encode()]
    assert 0 < client.ttl(KEY) <= 7 * 86_400


def test_two_that_learn_at_once_end_with_the_fewer_rows(
    exchange: Callable[[Ceilings], None],
) -> None:
    first, second, third = Ceilings(), Ceilings(), Ceilings()
    first.lower(SIZES, "fp32", failed_rows=16)
    second.lower(SIZES, "fp32", failed_rows=32)

    exchange(first)
    exchange(second)
    exchange(third)

    assert second.of(SIZES) == third.of(SIZES) == {"fp32": 8}


def test_another_model_or_kind_of_instance_learns_by_itself(client: redis.Redis) -> None:
    shared = SharedCeilings(client, KEYS)
    first = Ceilings()
    first.lower(SIZES, "fp32", failed_rows=32)
    shared.exchange("digits", "abc", first)

    for model, kind in (("digits", "abd"), ("digit", "abc")):
        other = Ceilings()
        shared.exchange(model, kind, other)

        assert other.of(SIZES) == {}


def test_of_instances_that_could_try_more_one_does(
    exchange: Callable[[Ceilings], None],
) -> None:
    now_unix_s = [1_000_000.0]
    first, second = (Ceilings(lambda: now_unix_s[0]) for _ in range(2))
    first.lower(SIZES, "fp32", failed_rows=16)
    exchange(first)
    exchange(second)
    now_unix_s[0] += GROW_AFTER_S
    for ceilings in (first, second):
        for _ in range(GROW_AFTER_RUNS):
            ceilings.fitted(SIZES, "fp32", 8)
        assert ceilings.of(SIZES) == {"fp32": 8}
        assert ceilings.has_news

    exchange(first)
    exchange(second)

    assert first.of(SIZES) == {"fp32": 10}
    assert second.of(SIZES) == {"fp32": 8}
    first.fitted(SIZES, "fp32", 10)
    exchange(first)
    exchange(second)
    assert second.of(SIZES) == {"fp32": 10}


def test_nothing_known_leaves_no_key(
    client: redis.Redis, exchange: Callable[[Ceilings], None]
) -> None:
    exchange(Ceilings())

    assert client.keys("*") == []


def test_what_another_version_wrote_is_left_out(
    client: redis.Redis, exchange: Callable[[Ceilings], None]
) -> None:
    known = Ceilings()
    known.lower(SIZES, "fp32", failed_rows=32)
    exchange(known)
    for field, value in (
        ("x", "1"),
        ("[1]", "{}"),
        ("\xff", "\xff"),
        ('["fp32", [["x", "<f4", ["a"]]]]', "{}"),
        ('["fp32", []]', '{"rows": "many"}'),
        ('["fp16", []]', '{"rows": 4, "since_unix_s": 1.0, "unknown": 1}'),
        ('["fp8", []]', '{"rows": 3.5, "since_unix_s": 1.0}'),
        ('["int8", []]', '{"rows": 3, "since_unix_s": 1.0, "failed": "often"}'),
    ):
        client.hset(KEY, field, value)
    fresh = Ceilings()

    exchange(fresh)

    assert fresh.everything() == known.everything()


def test_a_full_server_keeps_nobody_from_learning(
    client: redis.Redis, exchange: Callable[[Ceilings], None]
) -> None:
    ceilings = Ceilings()
    ceilings.lower(SIZES, "fp32", failed_rows=32)
    client.config_set("maxmemory", "1mb")
    try:
        exchange(ceilings)
    finally:
        client.config_set("maxmemory", "0")

    assert ceilings.of(SIZES) == {"fp32": 16}
    assert client.keys("*") == []
    ceilings.lower(SIZES, "fp16", failed_rows=8)
    exchange(ceilings)
    assert client.hlen(KEY) == 2


def test_a_server_that_is_away_keeps_nobody_from_learning() -> None:
    ceilings = Ceilings()
    ceilings.lower(SIZES, "fp32", failed_rows=32)
    with redis_client("redis://127.0.0.1:1/0") as nobody:
        SharedCeilings(nobody, KEYS).exchange("digits", "abc", ceilings)

    assert ceilings.of(SIZES) == {"fp32": 16}


def learn_more_than_is_kept(shared: SharedCeilings, key_kind: str) -> None:
    """Be six instances, each of which knows as many shapes as it may."""
    for instance in range(6):
        ceilings = Ceilings(functools.partial(float, instance))
        for length in range(MOST_SHAPES):
            sizes = (TensorKey("x", "<f4", (instance * MOST_SHAPES + length,), b""),)
            ceilings.lower(sizes, "fp32", failed_rows=32)
        shared.exchange("digits", key_kind, ceilings)


def test_a_hash_does_not_grow_without_end(client: redis.Redis) -> None:
    shared, fresh = SharedCeilings(client, KEYS), Ceilings()

    learn_more_than_is_kept(shared, "abc")

    assert client.hlen(KEY) <= 4 * MOST_SHAPES
    shared.exchange("digits", "abc", fresh)
    assert {ceiling.rows for ceiling in fresh.everything().values()} == {16}
    assert len(fresh.everything()) == MOST_SHAPES


def test_a_worker_needs_no_right_for_it_that_is_not_documented(
    server: TestServer, client: redis.Redis
) -> None:
    with documented_users(server, client) as urls:
        with redis_client(urls["fleet-worker"]) as worker:
            learn_more_than_is_kept(SharedCeilings(worker, Keys()), "abc")

        assert refusals(client) == []
    assert client.hlen(Keys().ceilings("digits", "abc")) == 4 * MOST_SHAPES
