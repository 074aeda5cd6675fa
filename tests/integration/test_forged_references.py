"""References to large arrays that nobody of the fleet wrote: refused as what they are, and nothing
but arrays of the fleet is read or deleted for them.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract import wire
from producer.contract.blobs import Blobs, Spilled
from producer.contract.message import Message, to_fields
from producer.contract.names import INFER_TASK, Keys, Priority, queue_of
from producer.contract.settings import Settings
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

KEYS: Final = Keys()
MODEL: Final = "wide"
WIDTH: Final = 40_000
INPUTS: Final = {"x": np.zeros((1, WIDTH), np.float32)}
STREAM: Final = KEYS.stream(queue_of(MODEL), Priority.NORMAL)
#: Of an array that nobody wrote.
ID: Final = "a" * 32
SIZE: Final = 4 * WIDTH


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("fsspec")
    return tmp_path_factory.mktemp("store") / "arrays"


@pytest.fixture(scope="module")
def worker(server: TestServer, folder: Path) -> Iterator[None]:
    environ = {"FLEET_BLOB_URL": folder.as_uri()}
    model = {**SCRIPTED, "options": {"width": WIDTH}}
    with (
        config_folder({MODEL: model}) as config,
        running_worker(server, config, environ=environ, node="forged"),
    ):
        yield


@pytest.fixture
def broker(server: TestServer, worker: None) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client
        for key in client.scan_iter(f"{KEYS.blob('')}*"):
            client.delete(key)


def message(*, rows: int = 1) -> tuple[str, Message, Spilled]:
    """Return the id and the message of a job with a large array, and that array."""
    inputs = {"x": np.zeros((rows, WIDTH), np.float32)}
    spilled = Blobs.of(Settings()).pack(((MODEL, inputs), {}, None))
    job_id = str(uuid.uuid4())
    headers = {"task": INFER_TASK, "id": job_id}
    fleet = {"content_type": wire.CONTENT_TYPE, "content_encoding": wire.CONTENT_ENCODING}
    return job_id, Message(headers=headers, properties={}, body=spilled.body, **fleet), spilled


def send(broker: redis.Redis, said: Message, job_id: str, field: str) -> None:
    fields: Any = to_fields(said, job_id=job_id, rows=1, blobs=field)
    broker.xadd(STREAM, fields)


def code_of(broker: redis.Redis, job_id: str) -> str:
    """Return the code that a job ends with."""
    key = KEYS.result(job_id)
    stored: Any = wait_until(lambda: broker.get(key), what="a result")
    told: str = json.loads(stored)["result"]["exc_message"][0]
    return told.partition(":")[0]


def refusal(broker: redis.Redis, field: str) -> str:
    """Send a job with a large array whose entry has ``field``; returns the code it ends with."""
    job_id, said, _ = message()
    send(broker, said, job_id, field)
    return code_of(broker, job_id)


@pytest.mark.parametrize(
    "field",
    [
        f"{SIZE} store ../secret",
        f"{SIZE} store /etc/passwd",
        f"{SIZE} redis fleet:journal:x",
        f"{SIZE} file:///etc/passwd {ID}",
        f"{SIZE} s3://bucket/key {ID}",
        f"{SIZE} store {ID}/../../secret",
        f"-1 redis {ID}",
        f"1e9 redis {ID}",
        f"{SIZE} redis {ID}",
        "",
    ],
)
def test_a_reference_whose_entry_names_something_else_is_a_bad_message(
    server: TestServer, broker: redis.Redis, folder: Path, field: str
) -> None:
    secret = folder.parent / "secret"
    secret.write_bytes(bytes(SIZE))
    others = {KEYS.blob("fleet:journal:x"): "here", KEYS.blob("../secret"): "here"}
    for key, text in others.items():
        broker.set(key, text)

    assert refusal(broker, field) == "BAD_MESSAGE"

    # Files are deleted after a job has been answered, and before the next one is.
    with Client(Settings(broker_url=server.url, blob_url=folder.as_uri())) as fleet:
        fleet.submit(MODEL, INPUTS).reply(20)
    assert secret.exists()
    assert all(broker.exists(key) for key in others)


@pytest.mark.parametrize("where", ["redis", "store"])
@pytest.mark.parametrize("size", [SIZE, 10**18 - 1], ids=["its size", "a huge size"])
def test_an_array_that_nobody_wrote_is_missing_for_its_own_job_alone(
    server: TestServer, broker: redis.Redis, folder: Path, where: str, size: int
) -> None:
    job_id, said, spilled = message()
    field = f"{size} {where} {spilled.named.ids[0]}"
    send(broker, said, job_id, field)

    with Client(Settings(broker_url=server.url, blob_url=folder.as_uri())) as fleet:
        beside = fleet.submit(MODEL, INPUTS)
        assert beside.reply(20).outputs["y"].shape == (1, WIDTH)

    assert code_of(broker, job_id) == "ARRAY_MISSING"


def test_what_is_no_string_under_the_key_of_an_array_is_no_array(broker: redis.Redis) -> None:
    job_id, said, spilled = message()
    broker.hset(KEYS.blob(spilled.named.ids[0]), "a", "b")
    send(broker, said, job_id, str(spilled.named))

    assert code_of(broker, job_id) == "ARRAY_MISSING"


def test_an_array_of_another_size_than_its_reference_says_is_a_bad_message(
    broker: redis.Redis,
) -> None:
    job_id, said, spilled = message(rows=30)
    broker.set(KEYS.blob(spilled.named.ids[0]), b"short")
    send(broker, said, job_id, str(spilled.named))

    assert code_of(broker, job_id) == "BAD_MESSAGE"


def test_a_message_through_a_list_cannot_refer_to_an_array(broker: redis.Redis) -> None:
    job_id, said, spilled = message()
    (theirs,) = spilled.named.ids
    broker.set(KEYS.blob(theirs), bytes(SIZE))
    stock = {
        "body": base64.b64encode(said.body).decode(),
        "content-encoding": said.content_encoding,
        "content-type": said.content_type,
        "headers": {**said.headers, "blobs": str(spilled.named)},
        "properties": {"body_encoding": "base64", "blobs": str(spilled.named)},
    }
    broker.lpush(queue_of(MODEL), json.dumps(stock))

    assert code_of(broker, job_id) == "BAD_MESSAGE"
    assert broker.exists(KEYS.blob(theirs))
