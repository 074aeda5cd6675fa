"""What a script does when the server refuses a part of it: nothing of a job gets lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis

from producer.contract.names import GROUP, Keys, Priority
from workers.delivery import ledger as delivery
from workers.delivery.ledger import End, Ending, Ledger, Wish
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS = Keys()
QUEUE = "fleet.m"
STREAM = KEYS.stream(QUEUE, Priority.NORMAL)
LEDGER = Ledger(keys=KEYS, consumer="a", result_ttl_s=60, max_attempts=3)


@pytest.fixture
def limited(client: redis.Redis) -> Iterator[redis.Redis]:
    """Return a client whose user may do everything, but not reach results nor add to a stream."""
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    client.execute_command("ACL", "SETUSER", "limited", "on", ">x", "~fleet:*", "+@all", "-xadd")
    port = client.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port, username="limited", password="x") as other:
        yield other
    client.acl_deluser("limited")
    client.flushall()


def test_a_job_whose_result_is_refused_stays_with_its_holder(
    client: redis.Redis, limited: redis.Redis
) -> None:
    client.xadd(STREAM, {"id": "j", "rows": 1, "env": "env", "body": "body"})
    wish = Wish(queue=QUEUE, max_rows=1, max_bytes=1, max_entries=1)
    (claimed,) = send(client, LEDGER.claim([wish]))
    call = LEDGER.complete(QUEUE, [End(entry=claimed.entries[0], job_id="j", payload=b"done")])

    with pytest.raises(redis.ResponseError, match=r"complete\.lua"):
        send(limited, call)

    pending: Any = client.xpending(STREAM, GROUP)
    assert pending["pending"] == 1
    assert client.xlen(STREAM) == 1
    assert send(client, call) == [[Ending.STORED]]
    assert client.get(KEYS.result("j")) == b"done"


def test_a_delayed_job_that_its_stream_refuses_waits_on(
    client: redis.Redis, limited: redis.Redis
) -> None:
    fields = {"id": "j", "rows": "1", "env": b"e", "body": b"b", "priority": "normal"}
    client.zadd(KEYS.delayed(QUEUE), {msgpack.packb(fields, use_bin_type=False): 1.0})
    call = delivery.move_due(KEYS, QUEUE, now_unix_s=2.0)

    with pytest.raises(redis.ResponseError, match=r"move_due\.lua"):
        send(limited, call)

    assert client.zcard(KEYS.delayed(QUEUE)) == 1
    assert send(client, call) == [1]
    assert client.xlen(STREAM) == 1


def test_a_delayed_job_that_cannot_be_read_holds_up_no_other(
    client: redis.Redis, limited: redis.Redis
) -> None:
    fields = {"id": "j", "rows": "1", "env": b"e", "body": b"b", "priority": "high"}
    client.zadd(
        KEYS.delayed(QUEUE),
        {b"\xc1": 1.0, b"\x05": 1.5, msgpack.packb(fields, use_bin_type=False): 2.0},
    )

    moved = send(client, delivery.move_due(KEYS, QUEUE, now_unix_s=3.0))

    unreadable: Any = client.xrange(KEYS.stream(QUEUE, Priority.LOW))
    assert moved == [3]
    assert [entry[b"raw"] for _, entry in unreadable] == [b"\xc1", b"\x05"]
    assert client.xlen(KEYS.stream(QUEUE, Priority.HIGH)) == 1
