"""A message of kombu's as the Redis commands that put it where it waits: into a stream, or into the
set of those that are not due yet.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack
from kombu.compression import decompress

from producer.contract import wire
from producer.contract.blobs import Blobs, Named, Spilled
from producer.contract.errors import BadRequest
from producer.contract.message import Message, to_fields
from producer.contract.names import PRIORITIES, Priority

#: Properties that say something about one hop of a message and nothing about the job.
_HOP_PROPERTIES: Final = ("body_encoding", "delivery_tag", "argsrepr", "kwargsrepr")


def commands_of(
    queue: str, given: Mapping[str, Any], *, blobs: Blobs, max_body_bytes: int
) -> tuple[list[Sequence[Any]], Named]:
    """Return the commands that put the message ``given``, its large arrays first, where it waits;
    and these arrays.
    """
    message = _message_of(given)
    check_size(len(message.body), max_body_bytes)
    ours = message.content_type == wire.CONTENT_TYPE
    spilled = blobs.spill(message.body) if ours else Spilled(body=message.body)
    headers = message.headers
    fields = to_fields(
        dataclasses.replace(message, body=spilled.body),
        job_id=str(headers.get("id", "")),
        rows=int(headers.get("fleet_rows", 1)),
        blobs=str(spilled.named),
    )
    priority = priority_of(headers, message.properties.get("priority"))
    now_unix_s = time.time()
    due, expires = _unix_s(headers.get("eta")), _unix_s(headers.get("expires"))
    expires_in_s = None if expires is None else expires - now_unix_s
    if due is not None and due > now_unix_s:
        command: list[Any] = [
            *("ZADD", blobs.keys.delayed(queue), due, pack_delayed(fields, priority))
        ]
        ttl_s = blobs.input_ttl_s(due_in_s=due - now_unix_s, expires_in_s=expires_in_s)
    else:
        pairs = [part for pair in fields.items() for part in pair]
        command = ["XADD", blobs.keys.stream(queue, priority), "*", *pairs]
        ttl_s = blobs.input_ttl_s(expires_in_s=expires_in_s)
    return blobs.commands(spilled, command, ttl_s=ttl_s), spilled.named


def _message_of(given: Mapping[str, Any]) -> Message:
    """Return what kombu made of a message, unpacked as far as the entry carries it."""
    headers, properties = dict(given["headers"]), dict(given["properties"])
    body = given["body"]
    if properties.get("body_encoding") == "base64":
        body = base64.b64decode(body)
    elif isinstance(body, str):
        body = body.encode()
    # The app's task_compression: arrays hardly shrink, and a worker opens no bomb.
    if compression := headers.pop("compression", None):
        body = decompress(body, compression)
    for name in _HOP_PROPERTIES:
        properties.pop(name, None)
    return Message(
        headers=headers,
        properties=properties,
        content_type=given["content-type"],
        content_encoding=given["content-encoding"],
        body=body,
    )


def priority_of(headers: Mapping[str, Any], number: object) -> Priority:
    """Return a job's priority: our header when it is there, else Celery's number."""
    name = headers.get("fleet_priority", number)
    if isinstance(name, str) and name in PRIORITIES:
        return Priority(name)
    return Priority.LOW if isinstance(number, int) and number > 0 else Priority.NORMAL


def _unix_s(moment: object) -> float | None:
    """Return when a header ``eta`` or ``expires`` says; None when it says nothing."""
    if not isinstance(moment, str):
        return None
    found = datetime.datetime.fromisoformat(moment)
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    return found.timestamp()


def pack_delayed(fields: Mapping[str, Any], priority: Priority) -> bytes:
    """Pack a stream entry that waits in the delayed set, with the stream it will go to."""
    # The old string type for bytes too: the script that moves it, Redis's own Lua, knows no other.
    packed: bytes = msgpack.packb({**fields, "priority": str(priority)}, use_bin_type=False)
    return packed


def check_size(size_bytes: int, limit_bytes: int) -> None:
    """Refuse a packed job that is larger than the fleet takes."""
    if size_bytes > limit_bytes:
        raise BadRequest(
            f"The packed job has {size_bytes:,} bytes; the limit is {limit_bytes:,} "
            "(FLEET_MAX_BODY_BYTES). Send fewer rows per job."
        )
