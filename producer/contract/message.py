"""A job as a stream entry: what the transport writes and an instance reads. Nothing is decoded
here but the envelope.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgpack

from producer.contract.errors import BadMessage
from producer.contract.names import Field


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


def to_fields(message: Message, *, job_id: str, rows: int) -> dict[str, Any]:
    """Return the fields of the stream entry for ``message``, in writing order."""
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
    }


def from_fields(fields: Mapping[bytes, bytes]) -> Message:
    """Read the envelope of a stream entry.

    Raises BadMessage when it is not one of ours; the entry's id field may be readable all the
    same.
    """
    try:
        envelope = msgpack.unpackb(fields[Field.ENVELOPE.encode()], raw=False)
        content_type, content_encoding, headers, properties = envelope
        body = fields[Field.BODY.encode()]
    except KeyError as missing:
        raise BadMessage(f"The stream entry has no field {missing.args[0]!r}.") from None
    except Exception as error:  # noqa: BLE001 - whatever the bytes are, they are unreadable
        raise BadMessage(f"The entry's envelope cannot be read: {type(error).__name__}.") from None
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
