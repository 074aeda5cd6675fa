"""A job as a stream entry: what the transport writes, or a worker moved from a list, and an
instance reads. Nothing is decoded here but the envelope.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgpack

from producer.contract.errors import BadMessage
from producer.contract.names import Field

#: The most bytes of a message from a list that are read beside its body. The headers of Celery take
#: a thousand; JSON made to harm takes up to a hundred times its size while it is read.
MAX_LIST_ENVELOPE_BYTES: Final = 1024 * 1024

#: How kombu, and whoever writes as it does, begins a message in a list.
_BODY_FIRST: Final = re.compile(rb'\{"body": ?"')

#: What a sender's app shows of the arguments, values among them: nobody here may see those.
_ARGUMENTS_SHOWN: Final = ("argsrepr", "kwargsrepr")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One Celery message (protocol 2), its body still packed."""

    #: Celery's headers: ``id``, ``task``, ``expires``, ``root_id`` and the rest.
    headers: Mapping[str, Any]
    #: Celery's properties: ``correlation_id``, ``reply_to``, ``priority`` and the rest.
    properties: Mapping[str, Any]
    content_type: str
    content_encoding: str
    #: ``(args, kwargs, embed)``, serialized as ``content_type`` says.
    body: bytes


def to_fields(message: Message, *, job_id: str, rows: int, blobs: str = "") -> dict[str, Any]:
    """Return the fields of the stream entry for ``message``, in writing order.

    ``blobs`` names the arrays that are not in the body.
    """
    envelope = [
        message.content_type,
        message.content_encoding,
        dict(message.headers),
        dict(message.properties),
    ]
    return {
        str(Field.ID): job_id,
        str(Field.ROWS): rows,
        str(Field.ENVELOPE): msgpack.packb(envelope, use_bin_type=True, default=str),
        str(Field.BODY): message.body,
        **({str(Field.BLOBS): blobs} if blobs else {}),
    }


def from_fields(fields: Mapping[bytes, bytes]) -> Message:
    """Read the envelope of a stream entry.

    Raises BadMessage when it is not one of ours; the entry's id field may be readable all the
    same.
    """
    raw = fields.get(Field.RAW.encode())
    parts = _of_a_list(raw) if raw is not None else _of_the_transport(fields)
    content_type, content_encoding, headers, properties, body = parts
    if not (
        isinstance(content_type, str)
        and isinstance(content_encoding, str)
        and isinstance(headers, dict)
        and isinstance(properties, dict)
    ):
        raise BadMessage("The entry's envelope has parts of the wrong type.")
    return Message(
        headers=headers,
        properties=properties,
        content_type=content_type,
        content_encoding=content_encoding,
        body=body,
    )


def _of_the_transport(fields: Mapping[bytes, bytes]) -> tuple[Any, Any, Any, Any, bytes]:
    """Return content type and encoding, headers, properties and body of an entry of our own."""
    try:
        envelope = msgpack.unpackb(fields[Field.ENVELOPE.encode()], raw=False)
        content_type, content_encoding, headers, properties = envelope
        body = fields[Field.BODY.encode()]
    except KeyError as missing:
        raise BadMessage(f"The stream entry has no field {missing.args[0]!r}.") from None
    except Exception as error:  # noqa: BLE001 - whatever the bytes are, they are unreadable
        raise BadMessage(f"The entry's envelope cannot be read: {type(error).__name__}.") from None
    return content_type, content_encoding, headers, properties, body


def _of_a_list(raw: bytes) -> tuple[Any, Any, Any, Any, bytes]:
    """Return the same of a message as kombu writes it into a list."""
    body, envelope = _split(raw)
    if len(envelope) > MAX_LIST_ENVELOPE_BYTES:
        raise BadMessage(
            f"The message has {len(envelope):,} bytes beside its body; at most "
            f"{MAX_LIST_ENVELOPE_BYTES:,} are read. A large body must come first in it."
        )
    try:
        # Strictly: what Python reads of JSON bytes may hold text that nothing can write again.
        message = json.loads(envelope.decode())
        json.dumps(message, ensure_ascii=False).encode()
        text = message["body"]
        content_type, content_encoding = message["content-type"], message["content-encoding"]
        headers, properties = dict(message["headers"]), dict(message["properties"])
        if body is None:
            body = text.encode()
    except KeyError as missing:
        raise BadMessage(f"The message has no {missing.args[0]!r:.40}.") from None
    except Exception as error:  # noqa: BLE001 - whatever the bytes are, they are unreadable
        raise BadMessage(f"The message cannot be read: {type(error).__name__}.") from None
    for name in _ARGUMENTS_SHOWN:
        headers.pop(name, None)
    return content_type, content_encoding, headers, properties, _decoded(body, properties)


def _split(raw: bytes) -> tuple[bytes | None, bytes]:
    """Return a message's body, where it comes first and is plain text, and the JSON around it.

    `bridge.lua` does the same: a body may be large, and reading all of it as JSON is for nothing.
    """
    opened = _BODY_FIRST.match(raw)
    closed = raw.find(b'"', opened.end()) if opened else -1
    if opened is None or closed < 0 or raw.find(b"\\", opened.end(), closed) >= 0:
        return None, raw
    return raw[opened.end() : closed], b'{"body": ""' + raw[closed + 1 :]


def _decoded(body: bytes, properties: Mapping[str, Any]) -> bytes:
    """Return the bytes that kombu packed into a message's text."""
    encoding = properties.get("body_encoding")
    if encoding is None or encoding == "utf-8":
        return body
    if encoding != "base64":
        raise BadMessage(f"The body's encoding is none of kombu's: {encoding!r:.40}.")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError:
        raise BadMessage("The body is not base64.") from None
