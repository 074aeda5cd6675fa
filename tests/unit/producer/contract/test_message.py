"""A message from a list: what kombu writes is read; anything else is refused in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from producer.contract.errors import BadMessage
from producer.contract.message import MAX_LIST_ENVELOPE_BYTES, Message, from_fields


def raw(**changes: Any) -> bytes:
    """Return a message as kombu writes it; a part that is None is left out."""
    parts = {
        "body": "W1tdLCB7fSwge31d",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"id": "j", "task": "fleet.infer"},
        "properties": {"body_encoding": "base64", "delivery_tag": "t"},
        **changes,
    }
    return json.dumps({name: part for name, part in parts.items() if part is not None}).encode()


def read(message: bytes) -> Message:
    return from_fields({b"id": b"j", b"rows": b"1", b"raw": message})


def test_a_message_of_kombu_is_read() -> None:
    message = read(raw())

    assert message.body == b"[[], {}, {}]"
    assert message.headers == {"id": "j", "task": "fleet.infer"}
    assert (message.content_type, message.content_encoding) == ("application/json", "utf-8")
    assert message.properties["delivery_tag"] == "t"


@pytest.mark.parametrize("encoding", [None, "utf-8"])
def test_a_body_may_be_plain_text(encoding: str | None) -> None:
    text = '[[], {"ä": "\\""}, {}]'

    message = read(raw(body=text, properties={"body_encoding": encoding}))

    assert message.body.decode() == text


def test_what_a_senders_app_shows_of_the_arguments_is_dropped() -> None:
    headers = {"id": "j", "argsrepr": "('secret',)", "kwargsrepr": "{}", "origin": "host"}

    assert read(raw(headers=headers)).headers == {"id": "j", "origin": "host"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (b"", "JSONDecodeError"),
        (b"\x80\x04K*.", "UnicodeDecodeError"),
        (b"7", "TypeError"),
        (b"[" * 100_000, "RecursionError"),
        (raw()[:-5], "JSONDecodeError"),
        (raw(body=None), "no 'body'"),
        (raw(headers=None), "no 'headers'"),
        (raw(headers=7), "TypeError"),
        (raw(body=7), "AttributeError"),
        (raw(**{"content-type": 7}), "parts of the wrong type"),
        (raw(body="not base64!"), "not base64"),
        (raw(body="W10"), "not base64"),
        (raw(properties={"body_encoding": "hex"}), "none of kombu's: 'hex'"),
        (raw(properties={"body_encoding": "x" * 9999}), "none of kombu's"),
        (raw(headers={"stamp": "x" * MAX_LIST_ENVELOPE_BYTES}), "beside its body"),
        (b'{"x": 1, ' + raw(body="A" * MAX_LIST_ENVELOPE_BYTES)[1:], "beside its body"),
    ],
)
def test_what_is_no_message_is_refused_in_one_line(message: bytes, text: str) -> None:
    with pytest.raises(BadMessage, match=text) as refused:
        read(message)

    assert len(str(refused.value)) < 200
