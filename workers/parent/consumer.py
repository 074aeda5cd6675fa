"""Celery's consumer without tasks: it keeps the connection, remote control, events and
heartbeats.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any, ClassVar, Final

import redis
from celery.utils.sysinfo import load_average
from celery.worker import heartbeat
from celery.worker.consumer import Consumer
from celery.worker.consumer.heart import Heart as HeartStep
from celery.worker.state import SOFTWARE_INFO, all_total_count

from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

#: What Redis refuses it may allow again, when a right is granted or a disk has room.
_REFUSED_PAUSE_S: Final = 1.0


class Heart(heartbeat.Heart):
    """Heartbeats that count what the instances run: the parent itself holds no requests."""

    def __init__(self, consumer: Any, interval_s: float | None) -> None:
        super().__init__(consumer.timer, consumer.event_dispatcher, interval_s)
        self._pool = consumer.pool

    def _send(self, event: str, retry: bool = True) -> Any:
        return self.eventer.send(
            event,
            freq=self.interval,
            active=self._pool.running(),
            processed=all_total_count[0],
            loadavg=load_average(),
            retry=retry,
            **SOFTWARE_INFO,
        )


class FleetHeartStep(HeartStep):
    """Celery's step with our heart in it."""

    name = HeartStep.name

    def start(self, c: Any) -> None:
        c.heart = Heart(c, self.heartbeat_interval)
        c.heart.start()


class FleetConsumer(Consumer):
    """Consumes no queue: `fleet.*` belongs to the instances, every other queue to other workers.

    Mingle and gossip, which share revoked ids between workers, are left out: a revoked job is
    marked in Redis, where every instance looks before it starts one.
    """

    class Blueprint(Consumer.Blueprint):
        default_steps: ClassVar = [
            *(step for step in Consumer.Blueprint.default_steps if not step.endswith(":Heart")),
            "workers.parent.consumer:FleetHeartStep",
        ]

    def __init__(
        self, *args: Any, worker_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(
            *args,
            worker_options={
                **(worker_options or {}),
                "without_mingle": True,
                "without_gossip": True,
            },
            **options,
        )

    def on_connection_error_before_connected(self, exc: Exception) -> None:
        super().on_connection_error_before_connected(exc)
        _leave_in_peace(exc)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        # Celery's own line names the class of the error, and not the command that was refused.
        logger.warning("redis.trouble", extra={"error": said(exc)})
        super().on_connection_error_after_connected(exc)
        # A reconnect leaves cycles behind. A parent allocates so little that Python would collect
        # them after 60 reconnects, when they hold 8 MB.
        gc.collect()
        _leave_in_peace(exc)


def _leave_in_peace(error: Exception) -> None:
    """Wait before a refused command is tried again: Celery would do that many times a second."""
    if isinstance(error, redis.ResponseError):
        time.sleep(_REFUSED_PAUSE_S)
