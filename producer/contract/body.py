"""What a message's body holds, and which bodies are not opened at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kombu.serialization import loads

from producer.contract import wire
from producer.contract.errors import BadMessage
from producer.contract.message import Message
from producer.contract.names import INFER_TASK
from producer.contract.wire import CONTENT_TYPE

#: What a body may be packed as; pickle is never among them.
JSON: Final = "application/json"
_ACCEPTED: Final = frozenset({CONTENT_TYPE, JSON})

#: What a body may be encoded as; Python knows codecs that unpack a byte into a thousand.
_ENCODINGS: Final = frozenset({"binary", "utf-8", "us-ascii"})

#: JSON takes up to fifty times its size while it is read, and this much of it a second or so.
_MAX_JSON_BYTES: Final = 8 * 1024 * 1024


def read_body(message: Message, blobs: Mapping[str, bytes | None]) -> tuple[Any, Any, Any]:
    """Return ``args``, ``kwargs`` and ``embed`` of a message; BadMessage says why not.

    ``blobs`` are its large arrays, by id; where one is None, its reference stands in its place.
    """
    if why := _why_refused(message):
        raise BadMessage(why)
    try:
        if message.content_type == CONTENT_TYPE:
            body = wire.loads(message.body, blobs)
        else:
            body = loads(
                message.body, message.content_type, message.content_encoding, accept=[JSON]
            )
        args, kwargs, embed = body
    except BadMessage:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is unreadable
        raise BadMessage(f"The body cannot be read: {type(error).__name__}.") from None
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise BadMessage("The body is not (args, kwargs, embed).")
    return args, kwargs, embed


def _why_refused(message: Message) -> str:
    """Return why a message's body is not opened, as far as what is around it tells."""
    if message.headers.get("task") != INFER_TASK:
        return f"The entry is not a call of {INFER_TASK}."
    if message.content_type not in _ACCEPTED:
        return (
            f"Content type {str(message.content_type)[:80]!r} is not accepted; send "
            f"{CONTENT_TYPE} or application/json."
        )
    if message.headers.get("compression"):
        return "The body is compressed, which is not accepted; turn task_compression off."
    if message.content_encoding.lower() not in _ENCODINGS:
        return f"Content encoding {message.content_encoding[:80]!r} is not accepted; send utf-8."
    if message.content_type == JSON and len(message.body) > _MAX_JSON_BYTES:
        return (
            f"The JSON body has {len(message.body):,} bytes; at most {_MAX_JSON_BYTES:,} are read. "
            f"Send arrays as {CONTENT_TYPE}."
        )
    return ""
