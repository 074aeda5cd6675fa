"""The transport: streams for ``fleet.*``, kombu's own lists for everything else."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import kombu
import msgpack
import pytest
from kombu import Connection
from kombu.asynchronous import Hub

from producer.contract.app import FleetApp, make_app
from producer.contract.message import from_fields
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.incoming import fault_of
from producer.tasks import Infer, register
from producer.transport import TlsTransport

pytestmark = pytest.mark.redis

KEYS = Keys()
NORMAL = KEYS.stream("fleet.digits", Priority.NORMAL)
INPUTS = {"image": [[1.0]]}


@pytest.fixture
def channel(app: FleetApp) -> Iterator[Any]:
    with app.connection_for_write() as connection:
        yield connection.default_channel


def kombu_way(infer: Infer, **options: Any) -> Any:
    """Send through Celery and kombu: an option that the short way does not know."""
    return infer.apply_async(("digits", INPUTS), compression=None, **options)


def test_a_job_sent_through_kombu_is_one_entry_with_its_raw_body(infer: Infer, client: Any) -> None:
    result = kombu_way(infer)

    ((_, fields),) = client.xrange(NORMAL)
    assert fields[b"id"].decode() == result.id
    assert fields[b"rows"] == b"1"
    assert from_fields(fields).body[0] == 1
    assert client.keys() == [NORMAL.encode()]


@pytest.mark.parametrize(
    ("priority", "stream"),
    [
        ("high", Priority.HIGH),
        ("low", Priority.LOW),
        (0, Priority.NORMAL),
        (9, Priority.LOW),
        (None, Priority.NORMAL),
    ],
)
def test_the_priority_chooses_the_stream(
    infer: Infer, client: Any, priority: Any, stream: Priority
) -> None:
    kombu_way(infer, priority=priority)
    infer.apply_async(("digits", INPUTS), priority=priority)

    assert client.xlen(KEYS.stream("fleet.digits", stream)) == 2


def test_a_job_with_a_countdown_waits_in_the_delayed_set(infer: Infer, client: Any) -> None:
    result = infer.apply_async(("digits", INPUTS), countdown=60, priority="high")

    ((packed, due),) = client.zrange(KEYS.delayed("fleet.digits"), 0, -1, withscores=True)
    entry = msgpack.unpackb(packed, raw=True)
    assert due == pytest.approx(time.time() + 60, abs=5)
    assert entry[b"id"] == result.id.encode()
    assert entry[b"priority"] == b"high"
    assert from_fields(entry).headers["eta"]
    assert client.xlen(KEYS.stream("fleet.digits", Priority.HIGH)) == 0


def test_a_queue_has_the_size_of_its_streams(infer: Infer, channel: Any) -> None:
    assert channel._size("fleet.digits") == 0
    assert not channel._has_queue("fleet.digits")

    for priority in ("high", "normal", "low"):
        infer.apply_async(("digits", INPUTS), priority=priority)

    assert channel._size("fleet.digits") == 3
    assert channel._has_queue("fleet.digits")
    assert channel.queue_declare("fleet.digits", passive=True).message_count == 3


def test_a_deleted_queue_leaves_no_key(infer: Infer, channel: Any, client: Any) -> None:
    kombu_way(infer)
    channel._delete("fleet.digits", "", "fleet.digits", "")

    assert client.keys() == []


def test_declaring_a_queue_of_ours_writes_nothing(channel: Any, client: Any) -> None:
    with Connection(
        channel.connection.client.as_uri(include_password=True), transport="fleet"
    ) as connection:
        connection.SimpleQueue("fleet.digits").close()

    assert client.keys() == []


def test_a_task_of_another_queue_is_a_stock_list_message(
    app: FleetApp, settings: Settings, client: Any
) -> None:
    @app.task(name="plain", serializer="json", shared=False)
    def plain() -> None: ...

    plain.apply_async()

    assert client.llen("celery") == 1
    with Connection(settings.broker_url) as connection:
        message = connection.SimpleQueue("celery").get(timeout=2)
        assert message.headers["task"] == "plain"
        message.ack()


def test_a_full_server_is_no_error_to_who_keeps_a_queue_alive(channel: Any, client: Any) -> None:
    if not hasattr(kombu.transport.redis.Channel, "maybe_refresh_binding_expiry"):
        pytest.skip("this kombu lets no binding end")
    queue = kombu.Queue("lasting", kombu.Exchange("control"), expires=10, channel=channel)
    queue.declare()
    queue.consume("tag", callback=lambda _: None)
    bindings = {key: client.smembers(key) for key in client.scan_iter("_kombu.binding.*control*")}
    client.config_set("maxmemory", 1)
    try:
        channel.maybe_refresh_binding_expiry()
    finally:
        client.config_set("maxmemory", 0)

    client.delete(*bindings)
    channel.maybe_refresh_binding_expiry()

    assert {key: client.smembers(key) for key in bindings} == bindings != {}


def test_remote_control_stays_on_lists_and_channels(app: FleetApp, client: Any) -> None:
    assert app.control.inspect(timeout=0.1).ping() is None

    assert client.keys("fleet:*") == []
    assert {client.type(key) for key in client.scan_iter()} <= {b"set", b"zset", b"list"}


@pytest.mark.skipif(not hasattr(kombu.Producer, "batch"), reason="kombu has it from 5.7 on")
def test_a_batch_of_kombu_goes_to_the_streams(infer: Infer, app: FleetApp, client: Any) -> None:
    with app.producer_or_acquire() as producer, producer.batch():
        kombu_way(infer, producer=producer)
        kombu_way(infer, producer=producer)
        assert client.xlen(NORMAL) == 0

    assert client.xlen(NORMAL) == 2


def test_every_key_of_a_fleet_with_a_prefix_has_it(settings: Settings, client: Any) -> None:
    app = make_app(Settings(broker_url=settings.broker_url, prefix="a:"))
    infer = register(app)
    infer.delay("digits", INPUTS)
    kombu_way(infer)
    infer.apply_async(("digits", INPUTS), countdown=60)
    app.send_task("plain", serializer="json")

    assert {key[:2] for key in client.scan_iter()} == {b"a:"}
    assert client.xlen(Keys(prefix="a:").stream("fleet.digits", Priority.NORMAL)) == 2
    infer.publisher.close()
    app.close()


def test_fleets_forces_a_verified_certificate() -> None:
    connection = Connection("fleets://example.org/0", ssl={"ssl_cert_reqs": 0})

    transport = TlsTransport(connection)

    assert transport.client.ssl["ssl_cert_reqs"] == 2
    connection.release()


GOOD: dict[str, Any] = {
    "body": "e30=",
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": {"clock": 1},
    "properties": {
        "delivery_tag": "t",
        "body_encoding": "base64",
        "delivery_info": {"exchange": "e", "routing_key": ""},
    },
}
WITHOUT_SENSE = [
    pytest.param(5, id="a number"),
    pytest.param("x", id="text"),
    pytest.param([GOOD], id="a list"),
    pytest.param({}, id="empty"),
    pytest.param({**GOOD, "properties": None}, id="no properties"),
    pytest.param({**GOOD, "properties": {}}, id="no delivery tag"),
    pytest.param({**GOOD, "properties": {"delivery_tag": []}}, id="a list for a tag"),
    pytest.param({**GOOD, "headers": [1]}, id="headers in a list"),
    pytest.param({**GOOD, "content-type": 1}, id="a number for a content type"),
    pytest.param({**GOOD, "body": {}}, id="a map for a body"),
    pytest.param({**GOOD, "body": "e"}, id="half of base64"),
    pytest.param(
        {**GOOD, "properties": {"delivery_tag": "t", "body_encoding": "rot13"}}, id="rot13"
    ),
    pytest.param(
        {**GOOD, "properties": {"delivery_tag": "t", "delivery_info": "x"}}, id="text for where"
    ),
]
#: JSON that kombu's decoder raises something of its own for.
UNDECODABLE = [
    pytest.param(b"x", id="no JSON"),
    pytest.param(b"\xff", id="no text"),
    pytest.param(b"[" * 100_000, id="deep"),
    pytest.param(b'{"__type__": "decimal", "__value__": "x"}', id="decimal"),
    pytest.param(b'{"__type__": "bytes", "__value__": 5}', id="bytes"),
]


@pytest.mark.parametrize("message", WITHOUT_SENSE)
def test_what_is_no_message_is_told_from_one(message: Any) -> None:
    assert fault_of(message)


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        {"properties": {"delivery_tag": 1}},
        {**GOOD, "headers": None, "body": "{}", "properties": {"delivery_tag": "t"}},
        {**GOOD, "body": "\xe4", "properties": {"delivery_tag": "t", "body_encoding": "UTF-8"}},
    ],
)
def test_what_kombu_takes_in_is_a_message(message: Any) -> None:
    assert fault_of(message) is None


@pytest.mark.parametrize(
    "data",
    [
        *(
            pytest.param(json.dumps(parameters.values[0]).encode(), id=parameters.id)
            for parameters in WITHOUT_SENSE
        ),
        *UNDECODABLE,
    ],
)
def test_what_is_no_message_is_dropped_from_a_queue_and_the_next_is_read(
    app: FleetApp, client: Any, data: bytes, caplog: Any
) -> None:
    client.lpush("stock", data)
    app.send_task("plain", queue="stock", serializer="json")

    with app.connection_for_read() as connection, caplog.at_level(logging.WARNING):
        got: list[str] = []
        consumer = connection.Consumer(
            [connection.SimpleQueue("stock").queue],
            on_message=lambda message: got.append(message.headers["task"]),
            no_ack=True,
        )
        with consumer:
            while not got:
                connection.drain_events(timeout=2)

    assert got == ["plain"]
    assert [record.message for record in caplog.records] == ["message.dropped"]


def test_what_a_receiver_raises_is_not_taken_for_a_bad_message(app: FleetApp) -> None:
    def fail(_: Any) -> None:
        raise ValueError("the receiver's own")

    app.send_task("plain", queue="stock", serializer="json")
    with (
        app.connection_for_read() as connection,
        connection.Consumer([connection.SimpleQueue("stock").queue], on_message=fail, no_ack=True),
        pytest.raises(ValueError, match="own"),
    ):
        connection.drain_events(timeout=2)


def test_a_closed_connection_leaves_nothing_in_the_loop_of_a_worker(app: FleetApp) -> None:
    loop, ticks = Hub(), []
    for _ in range(3):
        connection = app.connection_for_write()
        connection.transport.register_with_event_loop(connection.connection, loop)
        ticks.append(len(loop.on_tick))
        connection.close()

    assert ticks == [1, 1, 1]
    assert not loop.on_tick
    loop.close()
