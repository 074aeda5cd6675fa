"""Messages made to break the worker: each is a dead letter, and nobody else notices."""

from __future__ import annotations

import base64
import bz2
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import FleetError
from producer.contract.message import Message, to_fields
from producer.contract.names import GROUP, Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import Do, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"
KEYS = Keys()
DEAD = KEYS.dead(f"fleet.{MODEL}")
STREAM = KEYS.stream(f"fleet.{MODEL}", Priority.NORMAL)
TEXT = json.dumps([[MODEL, {"x": row(job=1).tolist()}], {}, {}]).encode()


@pytest.fixture(scope="module", autouse=True)
def one_worker(server: TestServer) -> Iterator[None]:
    """Run one worker for all messages; its processes outlive them."""
    with server.client() as client:
        client.flushall()
    with (
        config_folder({MODEL: {**SCRIPTED, "options": {}}}) as folder,
        running_worker(server, folder, node="malformed") as worker,
    ):
        pids = (worker.pid, worker.instance_pids())
        yield
        assert (worker.pid, worker.instance_pids()) == pids


def code_of(server: TestServer, job_id: str, **changes: Any) -> str:
    """Put an entry into the stream as no app of ours would; return the code its job ends with."""
    parts: dict[str, Any] = {
        "headers": {"id": job_id, "task": "fleet.infer"},
        "properties": {},
        "content_type": wire.CONTENT_TYPE,
        "content_encoding": "binary",
        **changes,
    }
    with server.client() as client:
        client.xadd(STREAM, to_fields(Message(**parts), job_id=job_id, rows=1))
    infer = register(make_app(Settings(broker_url=server.url)))
    try:
        infer.AsyncResult(job_id).get(timeout=10)
    except FleetError as error:
        return error.code
    return "ok"


@pytest.mark.parametrize(
    "embed", [{"chain": [7]}, {"errbacks": 7}, {"callbacks": [7]}, {"chord": [1]}, 7], ids=str
)
@pytest.mark.parametrize("do", [Do.OK, Do.RAISE])
def test_a_canvas_that_cannot_be_followed(server: TestServer, embed: object, do: Do) -> None:
    body = wire.dumps(((MODEL, {"x": row(do, job=1)}), {}, embed))

    code = code_of(server, f"canvas-{do}-{embed}", body=body)

    assert code == "BAD_MESSAGE"


@pytest.mark.parametrize(
    "headers", [{"children": 7}, {"get": 1, "update": 2}, {"argsrepr": "x" * 100_000}], ids=str
)
def test_headers_that_would_shadow_what_celery_needs(
    server: TestServer, headers: dict[str, Any]
) -> None:
    body = wire.dumps(((MODEL, {"x": row(job=1)}), {}, {}))
    job_id = f"headers-{next(iter(headers))}"

    code = code_of(
        server, job_id, body=body, headers={"id": job_id, "task": "fleet.infer", **headers}
    )

    assert code == "ok"


def test_json_that_is_too_large_or_too_deep(server: TestServer) -> None:
    as_json = {"content_type": "application/json", "content_encoding": "utf-8"}
    large = b"[" + b"{}," * 3_000_000 + b"{}]"
    deep = b"[" * 100_000 + b"]" * 100_000

    codes = [
        code_of(server, name, body=body, **as_json)
        for name, body in (("large", large), ("deep", deep))
    ]

    assert codes == ["BAD_MESSAGE"] * 2


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (b'"fleet_reply_to": "\xed\xa0\x80"', "BAD_MESSAGE"),
        (b'"fleet_reply_to": "\\ud800"', "BAD_MESSAGE"),
        (b'"timelimit": [1' + b"0" * 400 + b", null]", "ok"),
    ],
    ids=["a surrogate in bytes", "a surrogate escaped", "a limit beyond all numbers"],
)
def test_a_header_from_a_list_that_cannot_be_passed_on(
    server: TestServer, header: bytes, code: str
) -> None:
    fleet = Client(Settings(broker_url=server.url))
    mates = [fleet.submit(MODEL, {"x": row(job=number)}) for number in (1, 2, 3)]
    message = (
        b'{"body": "%s", "content-type": "application/json", "content-encoding": "utf-8", '
        b'"headers": {"id": "odd", "task": "fleet.infer", %s}, '
        b'"properties": {"body_encoding": "base64"}}' % (base64.b64encode(TEXT), header)
    )
    with server.client() as client:
        client.delete(KEYS.result("odd"))
        client.lpush(f"fleet.{MODEL}", message)

        ended = wait_until(
            lambda: client.get(KEYS.result("odd")) or not_named(client, message),
            what="the answer, or a dead letter without an id",
        )

    assert [mate.reply(10).attempts for mate in mates] == [1, 1, 1]
    assert (b"SUCCESS" in ended) is (code == "ok")


def not_named(client: redis.Redis, message: bytes) -> bytes:
    """Return why the message became a dead letter, if it did."""
    letters: Any = client.xrange(DEAD)
    reasons = [f[b"code"] for _, f in letters if f.get(b"original:raw") == message]
    return reasons[0] if reasons else b""


def test_an_entry_with_thousands_of_fields_becomes_a_dead_letter(server: TestServer) -> None:
    with server.client() as client:
        fields: Any = {"id": "wide"} | {f"field{number}": "x" for number in range(4500)}
        client.xadd(STREAM, fields)

        letters: list[Any] = wait_until(
            lambda: [fields for _, fields in client.xrange(DEAD) if fields[b"job"] == b"wide"],
            what="the dead letter",
        )

    assert letters[0][b"original:field7"] == b"x"


#: A number that no two flipped bits turn into one of the engine's orders.
_HARMLESS: Final = 1e-30

_HEADERS: Final = (
    *("id", "eta", "expires", "retries", "timelimit", "group", "group_index", "root_id", "origin"),
    *("parent_id", "lang", "argsrepr", "kwargsrepr", "ignore_result", "stamps", "stamped_headers"),
    *("shadow", "replaced_task_nesting", "fleet_reply_to", "fleet_priority"),
)
_STRANGE: Final[tuple[Any, ...]] = (
    *(None, True, 7, -1.5, 2**63, "", "x" * 300, b"\xff", [], [1, "a"], {}, {"a": [None]}),
)


def damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes cut off, with one or two bits flipped, or at random."""
    match chance.randrange(4):
        case 0:
            return data[: chance.randrange(len(data))]
        case 1:
            return chance.randbytes(chance.randrange(200))
        case 2:
            return data[:1] + chance.randbytes(chance.randrange(200))
    flipped = bytearray(data)
    for _ in range(chance.randint(1, 2)):
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def damaged_entry(chance: random.Random, job_id: str) -> dict[Any, Any]:
    """Return an entry's fields, one of them not as any app of ours writes it."""
    headers: dict[str, Any] = {"id": job_id, "task": "fleet.infer"}
    part = chance.choice(("body", "body", "body", "env", "headers", "rows", "id"))
    if part == "headers":
        names = chance.sample(_HEADERS, chance.randint(1, 4))
        headers |= {name: chance.choice(_STRANGE) for name in names}
    x = np.full((1, 3), _HARMLESS, np.float32)
    message = Message(
        headers=headers,
        properties={},
        content_type=wire.CONTENT_TYPE,
        content_encoding="binary",
        body=wire.dumps(((MODEL, {"x": x}), {}, {})),
    )
    fields = to_fields(message, job_id=job_id, rows=1)
    if part in ("body", "env"):
        fields[part] = damaged(chance, fields[part])
    elif part == "rows":
        fields["rows"] = chance.choice((b"", b"-5", b"1e9", b"9" * 40, b"x", b"0", b"\xff"))
    elif part == "id" and chance.random() < 0.3:
        del fields["id"]
    elif part == "id":
        fields["id"] = job_id.encode() + b"\xff"
    return fields


def test_two_thousand_damaged_entries_each_end_as_an_answer_or_a_dead_letter(
    server: TestServer,
) -> None:
    chance = random.Random(4)
    ids = [f"damaged-{number}" for number in range(2000)]
    with server.client() as client:
        added = {client.xadd(STREAM, damaged_entry(chance, job_id)): job_id for job_id in ids}

        wait_until(lambda: not client.xlen(STREAM), what="every entry to end", timeout_s=40)

        letters: Any = client.xrange(Keys().dead(f"fleet.{MODEL}"))
        dead = {fields[b"entry"] for _, fields in letters} & added.keys()
        answered = {job_id for job_id in ids if client.exists(Keys().result(job_id))}
        unended = [job for entry, job in added.items() if entry not in dead and job not in answered]
    assert not unended
    # Otherwise they were not damaged enough, or too much.
    assert 500 < len(dead) < 1500


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("utf-8", TEXT), ("zlib", zlib.compress(TEXT)), ("bz2", bz2.compress(TEXT))],
    ids=["utf-8", "zlib", "bz2"],
)
def test_only_text_is_decoded_for_a_few_bytes_could_unpack_to_gigabytes(
    server: TestServer, encoding: str, body: bytes
) -> None:
    code = code_of(
        server,
        f"encoded-{encoding}",
        body=body,
        content_type="application/json",
        content_encoding=encoding,
    )

    assert code == ("ok" if encoding == "utf-8" else "BAD_MESSAGE")


def test_a_good_job_after_all_of_it_is_answered(server: TestServer) -> None:
    fleet = Client(Settings(broker_url=server.url))

    assert fleet.submit(MODEL, {"x": row(job=2)}).reply(10).attempts == 1
    with server.client() as client:
        assert client.xpending(STREAM, GROUP)["pending"] == 0
