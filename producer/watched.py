"""Sending where somebody watches Celery: its own way, job by job, so that nothing is missed.

Sentry, OpenTelemetry and their like listen to Celery's signals, or put code of theirs around its
functions, and give a job headers that name the trace it belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kombu.pools import ProducerPool

if TYPE_CHECKING:
    from producer.envelope import Submission
    from producer.tasks import Infer


class CelerysWay:
    """Sends jobs through Celery and kombu, over connections that nobody else has."""

    def __init__(self, infer: Infer) -> None:
        self._infer = infer
        app = infer.fleet
        # Not the app's: kombu shares that between all apps of the process, and never closes it.
        connections = app.connection_for_write().Pool(app.conf.broker_pool_limit)
        self._producers = ProducerPool(connections, app.conf.broker_pool_limit)
        self._connections = connections

    def send(self, job: Submission) -> None:
        """Send ``job``; raises what ``infer.apply_async`` raises."""
        expires = {} if job.expires_s is None else {"expires": job.expires_s}
        with self._producers.acquire(block=True) as producer:
            self._infer.hand_on(job, {**expires, "producer": producer})

    def close(self) -> None:
        """Close the connections; nothing can be sent afterwards."""
        self._producers.force_close_all()
        self._connections.force_close_all()
