"""Celery's own receiver of events, as `celery events` and Flower run it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TypeAlias

from celery import Celery

Event: TypeAlias = dict[str, Any]


class Listener:
    """Celery's receiver in a thread, as `celery events` and Flower run it."""

    def __init__(self, app: Celery) -> None:
        self.events: list[Event] = []
        self._app, self._ready, self._end = app, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._end.set()
        self._thread.join(10)

    def of(self, *job_ids: str) -> list[Event]:
        return [event for event in self.events if event.get("uuid") in job_ids]

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.events.append})
            with receiver.consumer_context() as (own, _, _):
                while not self._end.is_set():
                    with contextlib.suppress(TimeoutError):
                        own.drain_events(timeout=0.2)
                    # The first turn subscribes: what was told before it is not heard.
                    self._ready.set()
