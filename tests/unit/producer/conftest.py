"""A real server for the app side's tests, and a thread that answers jobs in a worker's place.

The thread reads real stream entries and stores real results in Celery's format; there is no batch,
no claim and no model, which have tests of their own.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from celery import states

from producer.client import Client
from producer.contract.app import FleetApp, make_app
from producer.contract.blobs import named_in
from producer.contract.call import Call, parse_call
from producer.contract.errors import Cancelled, Expired
from producer.contract.message import Message, from_fields
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client
from producer.contract.wire import loads
from producer.tasks import Infer, register
from tests.support.servers import TestServer, running_server

Answer = Callable[[Call], Any]


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    """A server of these tests alone: they look at all connections and channels there are."""
    with running_server(binary=getattr(request, "param", None)) as running:
        yield running


@pytest.fixture
def settings(server: TestServer) -> Iterator[Settings]:
    settings = Settings(broker_url=server.url)
    client = redis_client(settings.broker_url)
    client.flushall()
    yield settings
    client.flushall()
    client.close()


@pytest.fixture
def client(settings: Settings) -> Iterator[Any]:
    client = redis_client(settings.broker_url)
    yield client
    client.close()


@pytest.fixture
def app(settings: Settings) -> Iterator[FleetApp]:
    app = make_app(settings)
    yield app
    app.backend.waiter.close()
    app.backend.client.close()
    app.close()


@pytest.fixture
def infer(app: FleetApp) -> Iterator[Infer]:
    task = register(app)
    yield task
    task.publisher.close()


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Client]:
    with Client(settings) as fleet:
        yield fleet


class Worker(threading.Thread):
    """Answers every job of some queues until it is stopped."""

    def __init__(self, settings: Settings, app: FleetApp, queues: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.messages: list[Message] = []
        self.announces = True
        self.answer: Answer = lambda call: dict(call.inputs)
        self._app = app
        self._keys = Keys(prefix=settings.prefix)
        self._streams = [key for queue in queues for key in self._keys.streams(queue)]
        # Connected before the thread runs: some tests count the connections that are open.
        self._client: Any = redis_client(settings.broker_url)
        self._client.ping()
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()
        self.join(5)

    def run(self) -> None:
        cursor: dict[str, str | bytes] = dict.fromkeys(self._streams, "0-0")
        while not self._stopping.is_set():
            for stream, entries in self._client.xread(cursor, block=20) or ():
                for entry_id, fields in entries:
                    cursor[stream.decode()] = entry_id
                    self._serve(from_fields(fields))
        self._client.close()

    def _serve(self, message: Message) -> None:
        self.messages.append(message)
        blobs = self._app.backend.blobs.read(self._client, named_in(message.body))
        args, kwargs, _ = loads(message.body, blobs)
        call = parse_call(args, kwargs)
        state, value = states.SUCCESS, None
        try:
            value = self.answer(call)
        except (Expired, Cancelled) as error:
            state, value = states.REVOKED, error
        except Exception as error:  # noqa: BLE001  whatever a model may raise
            state, value = states.FAILURE, error
        store_result(
            self._app,
            self._client,
            str(message.headers["id"]),
            state,
            value,
            fleet={"model": call.model, "precision": "fp32", "batch_size": 3, "attempts": 1},
        )
        reply_to = message.headers.get("fleet_reply_to")
        if reply_to and self.announces:
            self._client.publish(self._keys.replies(reply_to), str(message.headers["id"]))


def store_result(
    app: FleetApp,
    client: Any,
    job_id: str,
    state: str,
    value: Any,
    *,
    fleet: Mapping[str, Any] | None = None,
) -> None:
    """Store a result as Celery's backend would, its large arrays as a worker does."""
    backend = app.backend
    request = types.SimpleNamespace(group=None, children=[], fleet=fleet)
    meta = backend._get_result_meta(backend.encode_result(value, state), state, None, request)
    meta["task_id"] = job_id
    payload = backend.encode(meta)
    spilled = backend.blobs.spill(payload if isinstance(payload, bytes) else payload.encode())
    backend.blobs.keep(client, spilled, ttl_s=60)
    client.set(backend.get_key_for_task(job_id), spilled.body, ex=60)
    client.publish(backend.get_key_for_task(job_id), spilled.body)


@pytest.fixture
def worker(settings: Settings) -> Iterator[Worker]:
    """A worker that answers ``digits`` with its inputs; tests may set another ``answer``."""
    app = make_app(settings)
    worker = Worker(settings, app, ("fleet.digits",))
    worker.start()
    yield worker
    worker.stop()
    app.close()
