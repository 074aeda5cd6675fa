"""The bridge script on a real server: what stock Celery apps put into lists goes into the streams,
whole and once.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producer.contract.errors import BadMessage
from producer.contract.message import MAX_LIST_ENVELOPE_BYTES, from_fields
from producer.contract.names import FREE, GROUP, Keys, Priority
from tests.support.servers import TestServer
from workers.delivery import ledger as delivery
from workers.delivery.bridge import Bridge, Moved, bridge
from workers.delivery.ledger import Ledger, Wish
from workers.delivery.scripts import send

pytestmark = pytest.mark.scripts

KEYS = Keys()
QUEUE = "fleet.m"
NORMAL = KEYS.stream(QUEUE, Priority.NORMAL)
BODY = "W10="


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    # Jobs are left unfinished here on purpose.
    client.flushall()


def message(job: object = "j", *, body: str = BODY, priority: object = 0, **headers: Any) -> bytes:
    """Return what kombu puts into a list for one call of the task."""
    return json.dumps(
        {
            "body": body,
            "content-encoding": "utf-8",
            "content-type": "application/json",
            "headers": {"task": "fleet.infer", "id": job, **headers},
            "properties": {"body_encoding": "base64", "priority": priority, "delivery_tag": "t"},
        }
    ).encode()


def push(broker: redis.Redis, *messages: bytes, number: int = 0) -> None:
    """Put messages where kombu puts those of a priority."""
    broker.lpush(KEYS.lists(QUEUE)[(0, 3, 6, 9).index(number)], *messages)


def move(broker: redis.Redis, *, keys: Keys = KEYS, at_most: int = 100) -> Moved:
    return send(broker, bridge(keys, QUEUE, now_unix_s=time.time(), at_most=at_most))[0]  # type: ignore[no-any-return]


def entries(broker: redis.Redis, stream: str = NORMAL) -> list[dict[bytes, bytes]]:
    found: Any = broker.xrange(stream)
    return [fields for _, fields in found]


def waiting(broker: redis.Redis) -> int:
    return sum(broker.llen(key) for key in KEYS.lists(QUEUE))


def test_a_message_is_moved_as_it_came(broker: redis.Redis) -> None:
    sent = message("j", fleet_rows=7)
    push(broker, sent)

    moved = move(broker)

    assert moved == Moved(messages=1, more=False, foreign=())
    assert entries(broker) == [{b"id": b"j", b"rows": b"7", b"raw": sent}]
    assert not broker.exists(*KEYS.lists(QUEUE))


def test_what_celery_itself_sends_is_found_and_read(
    broker: redis.Redis, server: TestServer
) -> None:
    with Celery(broker=server.url, set_as_current=False) as stock:
        for number in (0, 2, 3, 5, 9):
            stock.send_task("fleet.infer", queue=QUEUE, task_id=f"p{number}", priority=number)

    assert move(broker).messages == 5

    jobs = {
        priority: [fields[b"id"] for fields in entries(broker, KEYS.stream(QUEUE, priority))]
        for priority in Priority
    }
    assert jobs == {"high": [], "normal": [b"p0"], "low": [b"p2", b"p3", b"p5", b"p9"]}
    read = from_fields(entries(broker)[0])
    assert json.loads(read.body)[:2] == [[], {}]
    assert read.headers["id"] == "p0"
    assert broker.delete("_kombu.binding.fleet.m") == 1


def test_the_header_of_the_fleet_chooses_the_stream(broker: redis.Redis) -> None:
    push(broker, *(message(name, fleet_priority=name) for name in ("high", "low", "other")))

    move(broker)

    assert [fields[b"id"] for fields in entries(broker)] == [b"other"]
    for priority in (Priority.HIGH, Priority.LOW):
        stream = KEYS.stream(QUEUE, priority)
        assert [fields[b"id"] for fields in entries(broker, stream)] == [priority.encode()]


def test_messages_keep_their_order_the_first_list_first(broker: redis.Redis) -> None:
    push(broker, message("third"), number=3)
    push(broker, message("first"))
    push(broker, message("second"))

    move(broker)

    assert [fields[b"id"] for fields in entries(broker)] == [b"first", b"second", b"third"]


UNREADABLE = {
    "no JSON": b"\x80\x04K*.",
    "empty": b"",
    "cut off": message("j")[:-10],
    "too deep": message("j", nested=0).replace(
        b'"nested": 0', b'"nested": ' + b"[" * 5000 + b"]" * 5000
    ),
    "half a character": message("j").replace(b'"j"', rb'"\ud800"'),
    "no map": b"[1, 2]",
    "a number": b"7",
    "headers without sense": b'{"headers": [1], "properties": null}',
    "headers that are nothing": b'{"body": "", "headers": null, "properties": {"priority": {}}}',
    "an id that is a number": message(7),
    "an empty id": message(""),
    "too much beside the body": message("j", stamp="x" * MAX_LIST_ENVELOPE_BYTES),
}


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_goes_on_without_an_id(broker: redis.Redis, sent: bytes) -> None:
    push(broker, sent)

    assert move(broker).messages == 1

    assert entries(broker) == [{b"rows": b"1", b"raw": sent}]
    assert waiting(broker) == 0


def test_what_cannot_be_read_has_the_priority_of_its_list(broker: redis.Redis) -> None:
    push(broker, b"junk", number=6)

    move(broker)

    assert len(entries(broker, KEYS.stream(QUEUE, Priority.LOW))) == 1


@pytest.mark.parametrize("rows", [0, -3, "8", 1e300, None, [], {}, True])
def test_rows_that_make_no_sense_are_one(broker: redis.Redis, rows: object) -> None:
    push(broker, message("j", fleet_rows=rows))

    move(broker)

    assert entries(broker)[0][b"rows"] == b"1"


def test_a_large_body_is_not_read(broker: redis.Redis) -> None:
    sent = message("large", body="A" * (12 * MAX_LIST_ENVELOPE_BYTES), shown='a "quoted" word')
    push(broker, sent)

    move(broker)

    (fields,) = entries(broker)
    assert fields[b"id"] == b"large"
    assert fields[b"raw"] == sent
    assert len(from_fields(fields).body) == 9 * MAX_LIST_ENVELOPE_BYTES


def test_a_body_may_stand_anywhere_and_hold_quotes(broker: redis.Redis) -> None:
    sent = json.loads(message("j"))
    sent["properties"] = {"priority": 0}
    sent["body"] = '[[], {"a": "\\""}, {}]'
    for each in (sent, dict(reversed(sent.items()))):
        push(broker, json.dumps(each, separators=(",", ":")).encode())

    move(broker)

    found = entries(broker)
    assert [fields[b"id"] for fields in found] == [b"j", b"j"]
    assert [from_fields(fields).body.decode() for fields in found] == [sent["body"]] * 2


def test_a_call_moves_so_many_messages_and_says_that_more_wait(broker: redis.Redis) -> None:
    push(broker, *(message(f"j{number}") for number in range(5)))
    push(broker, message("last"), number=9)

    moved = [move(broker, at_most=3) for _ in range(3)]

    assert [(each.messages, each.more) for each in moved] == [(3, True), (3, False), (0, False)]


def test_a_call_stops_behind_so_many_bytes(broker: redis.Redis) -> None:
    push(broker, *(message(f"j{number}", body="A" * (3 << 20)) for number in range(5)))

    moved = [move(broker).messages for _ in range(4)]

    assert moved == [2, 2, 1, 0]


ETAS = {
    "2021-03-04T05:06:07+00:00": None,
    "2999-02-28T23:59:59.250000+00:00": 32477241599.25,
    "2999-12-31T23:59:00+01:30": 32503679940 - 5400,
    "2999-12-31T23:59:00-0800": 32503679940 + 8 * 3600,
    "2999-12-31 23:59Z": 32503679940,
    "2999-12-31T23:59:00": 32503679940,
    "2999-13-31T23:59:00+00:00": None,
    "2999-12-32T23:59:00+00:00": None,
    "2999-12-31T24:59:00+00:00": None,
    "2999-12-31T23:59:00+1": None,
    "tomorrow": None,
    "": None,
}


@pytest.mark.parametrize(("eta", "due_unix_s"), ETAS.items())
def test_a_job_with_an_eta_waits_in_the_delayed_set(
    broker: redis.Redis, eta: str, due_unix_s: float | None
) -> None:
    push(broker, message("j", eta=eta))

    move(broker)

    found: Any = broker.zrange(KEYS.delayed(QUEUE), 0, -1, withscores=True)
    assert [score for _, score in found] == ([] if due_unix_s is None else [due_unix_s])
    assert len(entries(broker)) == (1 if due_unix_s is None else 0)


@pytest.mark.parametrize("eta", [7, None, {}, [], True])
def test_an_eta_that_is_no_text_is_due_at_once(broker: redis.Redis, eta: object) -> None:
    push(broker, message("j", eta=eta))

    move(broker)

    assert len(entries(broker)) == 1


def test_etas_are_read_as_python_reads_them(broker: redis.Redis) -> None:
    chance = random.Random(7)
    expected = []
    for _ in range(500):
        zone = datetime.timezone(datetime.timedelta(minutes=chance.randrange(-14 * 60, 14 * 60)))
        due = datetime.datetime.fromtimestamp(chance.uniform(2e9, 2e11), zone)
        expected.append(due.timestamp())
        push(broker, message(due.isoformat(), eta=due.isoformat()))

    move(broker, at_most=500)

    found: Any = broker.zrange(KEYS.delayed(QUEUE), 0, -1, withscores=True)
    assert [score for _, score in found] == pytest.approx(sorted(expected), abs=1e-4, rel=0)


def test_a_delayed_message_reaches_its_stream_when_it_is_due(broker: redis.Redis) -> None:
    due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    sent = message("j", eta=due.isoformat(), priority=9, fleet_rows=3)
    push(broker, sent)
    move(broker)

    early = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=due.timestamp() - 1))[0]
    late = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=due.timestamp() + 1))[0]

    low = KEYS.stream(QUEUE, Priority.LOW)
    assert (early, late) == (0, 1)
    assert entries(broker, low) == [{b"id": b"j", b"rows": b"3", b"raw": sent}]


def test_a_key_that_holds_no_list_is_left_alone_and_named(broker: redis.Redis) -> None:
    broker.set(KEYS.lists(QUEUE)[0], "somebody's own", ex=60)
    push(broker, message("j"), number=3)

    moved = move(broker)

    assert moved == Moved(messages=1, more=False, foreign=(QUEUE,))
    assert broker.get(QUEUE) == b"somebody's own"


def test_a_foreign_key_is_told_once(broker: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    broker.set(KEYS.lists(QUEUE)[0], "somebody's own", ex=60)
    lists = Bridge(client=broker, keys=KEYS)

    more = [lists.move([QUEUE, "fleet.other"]) for _ in range(3)]

    assert more == [False] * 3
    assert [record.message for record in caplog.records] == ["list.foreign"]


def test_a_message_that_its_stream_refuses_stays_in_its_list(broker: redis.Redis) -> None:
    broker.delete(NORMAL)
    broker.set(NORMAL, "no stream", ex=60)
    push(broker, message("high", fleet_priority="high"), message("stuck"), message("behind"))

    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        move(broker)

    assert len(entries(broker, KEYS.stream(QUEUE, Priority.HIGH))) == 1
    assert waiting(broker) == 2
    broker.delete(NORMAL)
    assert move(broker).messages == 2


def test_messages_are_moved_on_a_full_server(broker: redis.Redis) -> None:
    eta = "2999-01-01T00:00:00+00:00"
    push(broker, message("later", eta=eta), message("now"))
    broker.config_set("maxmemory", 1)
    try:
        moved = move(broker)
        due = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=4e10))[0]
    finally:
        broker.config_set("maxmemory", 0)

    assert (moved.messages, due) == (2, 1)
    assert sorted(fields[b"id"] for fields in entries(broker)) == [b"later", b"now"]


def test_a_prefix_is_before_every_key(broker: redis.Redis, server: TestServer) -> None:
    with Celery(broker=server.url, set_as_current=False) as stock:
        stock.conf.broker_transport_options = {"global_keyprefix": "team:"}
        for number in (0, 9):
            stock.send_task("fleet.infer", queue=QUEUE, priority=number)
    push(broker, message("theirs"))

    assert move(broker, keys=Keys(prefix="team:")).messages == 2

    assert len(entries(broker, "team:fleet:stream:fleet.m:normal")) == 1
    assert len(entries(broker, "team:fleet:stream:fleet.m:low")) == 1
    assert waiting(broker) == 1


def test_a_claim_counts_the_bytes_of_a_message(broker: redis.Redis) -> None:
    push(broker, *(message(f"j{number}", body="A" * 2000) for number in range(4)))
    move(broker)
    who = Ledger(keys=KEYS, consumer="a", result_ttl_s=60, max_attempts=3)

    claimed = send(
        broker, who.claim([Wish(queue=QUEUE, max_rows=32, max_bytes=5000, max_entries=32)])
    )[0]

    assert len(claimed.entries) == 2
    assert claimed.entries[0].nbytes > 2000
    assert broker.xpending(NORMAL, GROUP)["consumers"][-1]["name"] == FREE.encode()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
ENVELOPES = st.dictionaries(
    st.sampled_from(["body", "headers", "properties", "content-type", "content-encoding"]),
    JUNK
    | st.dictionaries(
        st.sampled_from(["id", "eta", "fleet_rows", "fleet_priority", "priority", "compression"]),
        JUNK,
    ),
)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.binary(max_size=60) | ENVELOPES.map(lambda each: json.dumps(each).encode()))
def test_whatever_lies_in_a_list_is_moved_and_is_a_message_or_a_bad_one(
    broker: redis.Redis, sent: bytes
) -> None:
    push(broker, sent)

    moved = move(broker)

    assert (moved.messages, waiting(broker)) == (1, 0)
    found = [fields for key in KEYS.streams(QUEUE) for fields in entries(broker, key)]
    assert [fields[b"raw"] for fields in found] == [sent] or broker.zcard(KEYS.delayed(QUEUE)) == 1
    broker.delete(*KEYS.streams(QUEUE), KEYS.delayed(QUEUE))
    with contextlib.suppress(BadMessage):
        from_fields({b"raw": sent})
