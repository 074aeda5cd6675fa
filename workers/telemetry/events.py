"""Celery's task events of one instance: collected, sent many at once, never in a job's way."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from celery import Celery
from celery.events import EventDispatcher

from workers.loop.jobs import Job, shapes_shown
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

#: Far above the events of one batch, so that only `flush` sends.
_NEVER_BY_COUNT: Final = 1_000_000

#: While one short batch follows the other events are sent no more often: that costs a round trip,
#: and no one looks so often. Each of them says when it was.
_EVERY_S: Final = 0.05

#: Characters of a sender's text that an event carries.
_LONGEST_TEXT: Final = 1024


class TaskEvents:
    """Received and started at begin, one outcome at complete, arguments as shapes only."""

    def __init__(self, app: Celery, *, node: str, enabled: bool) -> None:
        self._app, self._node, self._enabled = app, node, enabled
        self._dispatcher: EventDispatcher | None = None
        #: When they were sent last. Monotonic clock.
        self._sent_s = 0.0

    def received(self, job: Job) -> None:
        headers = job.headers
        self._add(
            "task-received",
            job,
            name=_short(headers.get("shadow") or headers.get("task")),
            args=_short(shapes_shown(job)),
            kwargs="{}",
            root_id=headers.get("root_id"),
            parent_id=headers.get("parent_id"),
            retries=headers.get("retries") or 0,
            eta=headers.get("eta"),
            expires=headers.get("expires"),
        )

    def started(self, job: Job) -> None:
        self._add("task-started", job)

    def retried(self, job: Job, reason: str) -> None:
        """The job's batch ran out of memory and was answered smaller, in the same start."""
        self._add("task-retried", job, exception=reason, traceback="")

    def succeeded(self, job: Job, *, runtime_s: float, shapes: str) -> None:
        """``runtime_s`` is the batch's: jobs that ran together report the same."""
        self._add("task-succeeded", job, result=shapes, runtime=runtime_s)

    def failed(self, job: Job, error: Exception) -> None:
        self._add("task-failed", job, exception=repr(error), traceback="")

    def revoked(self, job: Job, *, expired: bool) -> None:
        self._add("task-revoked", job, terminated=False, signum=None, expired=expired)

    def flush_when_due(self) -> None:
        """Send what was collected, unless some was sent a moment ago."""
        if time.monotonic() - self._sent_s >= _EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send what was collected; an event that cannot be sent is dropped, as Celery's are."""
        if self._dispatcher is None:
            return
        self._sent_s = time.monotonic()
        try:
            self._dispatcher.flush()
        except Exception as error:  # noqa: BLE001 - events are lossy
            logger.warning("events.dropped", extra={"error": said(error)})
            self.reconnect()

    def _add(self, kind: str, job: Job, **fields: Any) -> None:
        if not self._enabled:
            return
        if self._dispatcher is None:
            self._dispatcher = EventDispatcher(
                self._app.connection_for_write(),
                hostname=self._node,
                app=self._app,
                buffer_while_offline=False,
                buffer_group=frozenset({"task"}),
                buffer_limit=_NEVER_BY_COUNT,
            )
        self._dispatcher.send(kind, uuid=job.job_id, **fields)

    def reconnect(self) -> None:
        """Leave the connection, and what was collected, behind: the next event opens another."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.close()
            dispatcher.connection.collect()


def _short(text: object) -> str:
    """Return a sender's words at a length that suits an event: others share the message."""
    return str(text)[:_LONGEST_TEXT]
