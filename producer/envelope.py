"""The message of a job, built without kombu, field for field as Celery's protocol 2 has it."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from celery import Celery
from celery.utils.nodenames import anon_nodename

from producer.contract import wire
from producer.contract.blobs import Blobs
from producer.contract.call import Call, rows_of, shapes_of
from producer.contract.message import Message, to_fields
from producer.contract.names import INFER_TASK, Priority, queue_of
from producer.entries import check_size

#: What follows the arguments in a body when nothing is to be called afterwards.
_NO_CALLBACKS: Final = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}

#: Celery's number for "survives a restart of the broker".
_PERSISTENT: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One job about to be sent, with the options that the short way knows."""

    id: str
    #: The call as Celery's task would get it, and what it means.
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    call: Call
    priority: Priority = Priority.NORMAL
    #: Celery's own number, kept for those who read the message.
    priority_number: int = 0
    expires_s: float | None = None
    ignore_result: bool = False
    shadow: str
    headers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def argsrepr_of(call: Call) -> str:
    """Describe the arguments for events and logs: shapes, never values."""
    return f"({call.model!r}, {shapes_of(call.inputs)})"


def fleet_headers(call: Call, priority: Priority, headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that every job of ours carries beside Celery's, and the caller's."""
    return {
        "fleet_rows": rows_of(call.inputs),
        "fleet_priority": str(priority),
        "fleet_sent": time.time(),
        **headers,
    }


def publish_commands(
    app: Celery, job: Submission, *, blobs: Blobs, max_body_bytes: int
) -> list[Sequence[Any]]:
    """Return the Redis commands that send ``job``, the one that does so last."""
    # Lists: of tuples msgpack would ask what they are to be.
    spilled = blobs.pack([list(job.args), job.kwargs, _NO_CALLBACKS])
    check_size(spilled.nbytes, max_body_bytes)
    headers = _headers(job)
    queue = queue_of(job.call.model or "")
    fields = to_fields(
        Message(
            headers=headers,
            properties=_properties(job, queue=queue, reply_to=app.thread_oid),
            content_type=wire.CONTENT_TYPE,
            content_encoding=wire.CONTENT_ENCODING,
            body=spilled.body,
        ),
        job_id=job.id,
        rows=headers["fleet_rows"],
        blobs=str(spilled.named),
    )
    command: list[Any] = ["XADD", blobs.keys.stream(queue, job.priority), "*"]
    for pair in fields.items():
        command.extend(pair)
    return blobs.commands(spilled, command, ttl_s=blobs.input_ttl_s(expires_in_s=job.expires_s))


def _headers(job: Submission) -> dict[str, Any]:
    expires = None
    if job.expires_s is not None:
        due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=job.expires_s)
        expires = due.isoformat()
    return {
        "lang": "py",
        "task": INFER_TASK,
        "id": job.id,
        "shadow": job.shadow,
        "eta": None,
        "expires": expires,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": job.id,
        "parent_id": None,
        "argsrepr": argsrepr_of(job.call),
        "kwargsrepr": "{}",
        "origin": _origin(),
        "ignore_result": job.ignore_result,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
        **fleet_headers(job.call, job.priority, job.headers),
    }


def _properties(job: Submission, *, queue: str, reply_to: str) -> dict[str, Any]:
    expiration = {} if job.expires_s is None else {"expiration": str(int(job.expires_s * 1000))}
    return {
        "correlation_id": job.id,
        "reply_to": reply_to,
        "delivery_mode": _PERSISTENT,
        **expiration,
        "delivery_info": {"exchange": "", "routing_key": queue},
        "priority": job.priority_number,
    }


_origins: dict[int, str] = {}


def _origin() -> str:
    """Return the name of this process, as Celery gives it."""
    pid = os.getpid()
    if pid not in _origins:
        _origins.clear()
        _origins[pid] = str(anon_nodename())
    return _origins[pid]
