"""Where somebody watches Celery a job goes Celery's own way as far as a message, so that nothing is
missed; from there on it is sent like any other, many in one round trip.

Sentry, OpenTelemetry and their like listen to Celery's signals, or put code of theirs around its
functions, and give a job headers that name the trace it belongs to. All of that runs where the job
is packed, in the context of who sends it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kombu.transport import virtual

from producer.entries import commands_of

if TYPE_CHECKING:
    from producer.envelope import Submission
    from producer.tasks import Infer

#: Takes in each message of the job that is being packed, with the queue it is for.
_TAKE: Final[contextvars.ContextVar[Callable[[str, dict[str, Any]], None]]] = (
    contextvars.ContextVar("take")
)


class CelerysWay:
    """Has Celery and kombu make the messages of jobs. Opens no connection; threads may share it."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        app = infer.fleet
        # The broker's own address: who watches asks a connection where it leads.
        connection = app.connection_for_write().clone(transport=_Transport)
        self._producer = app.amqp.Producer(connection, auto_declare=False)

    def commands(self, job: Submission) -> list[Sequence[Any]]:
        """Return the Redis commands that send ``job``, the one that does so last.

        Raises what ``infer.apply_async`` raises.
        """
        blobs, limit_bytes = self._infer.publisher.blobs, self._infer.fleet.settings.max_body_bytes
        commands: list[Sequence[Any]] = []

        def take(queue: str, message: dict[str, Any]) -> None:
            # In the middle of publishing: nobody is told that a job was sent which is refused.
            found, _ = commands_of(queue, message, blobs=blobs, max_body_bytes=limit_bytes)
            commands.extend(found)

        token = _TAKE.set(take)
        try:
            expires = {} if job.expires_s is None else {"expires": job.expires_s}
            # What is only kept for a moment is not tried again.
            self._infer.hand_on(job, {**expires, "producer": self._producer, "retry": False})
        finally:
            _TAKE.reset(token)
        return commands


class _Channel(virtual.Channel):
    """Hands what is published to whoever has it published."""

    #: Bytes stay bytes.
    body_encoding = None

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        _TAKE.get()(queue, message)

    def _size(self, queue: str) -> int:
        return 0


class _Transport(virtual.Transport):
    Channel = _Channel
    driver_type = driver_name = "redis"
    state = virtual.BrokerState()
