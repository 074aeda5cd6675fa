"""Where the replies of one Client arrive: a thread that is told of them, and looks beside it.

It reads results in batches, hands each to the job that waits for it, deletes what was read and
leaves a fence, so that the same job id is not run again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol

import redis

from producer.contract.app import FleetApp
from producer.contract.errors import BadMessage
from producer.contract.names import Keys
from producer.contract.settings import redis_client
from producer.replies import read_meta

logger = logging.getLogger(__name__)

#: Results are read this many at a time.
READ_AT_ONCE: Final = 256

#: A publish can be lost, so the keys are read this often beside the subscription.
LOOK_EVERY_S: Final = 1.0
#: Looking may take at most one part in this many of the thread's time.
_LOOK_SHARE: Final = 20
#: How long the thread waits for news before it looks whether it is to stop.
_STEP_S: Final = 0.25
_RECONNECT_S: Final = (0.05, 2.0)

#: Deletes results and leaves fences; the deletion first, because a full Redis then allows the rest.
#: KEYS: the results, then their fences. ARGV: how long a fence lives.
_FORGET: Final = """
local half = #KEYS / 2
redis.call('DEL', unpack(KEYS, 1, half))
for i = half + 1, #KEYS do redis.call('SET', KEYS[i], '1', 'EX', ARGV[1]) end
"""


class Awaited(Protocol):
    """A job that waits for its result."""

    @property
    def id(self) -> str: ...

    def settle(self, meta: dict[str, Any] | BaseException) -> None:
        """Take the decoded result, or why it cannot be read."""
        ...


class Results:
    """Reads and deletes results of the fleet, many at a time."""

    def __init__(self, app: FleetApp) -> None:
        settings = app.settings
        self._backend = app.backend
        self._keys = Keys(prefix=settings.prefix)
        self._fence_ttl_s = settings.fence_ttl_s
        self._results = redis_client(settings.result_url)
        self._broker = None if settings.one_server else redis_client(settings.broker_url)

    def read(self, job_ids: Iterable[str]) -> Iterator[tuple[str, dict[str, Any] | BaseException]]:
        """Yield those that are there, decoded; one that cannot be decoded as its error."""
        remaining = iter(job_ids)
        while chunk := list(islice(remaining, READ_AT_ONCE)):
            payloads: Sequence[Any] = self._results.mget([self._keys.result(i) for i in chunk])
            for job_id, payload in zip(chunk, payloads, strict=True):
                if payload is None:
                    continue
                try:
                    meta = read_meta(self._backend, payload)
                except Exception as error:  # noqa: BLE001  one bad result must not hide the others
                    yield job_id, BadMessage(f"The result cannot be read: {error}")
                    continue
                if meta is not None:
                    yield job_id, meta

    def forget(self, job_ids: Sequence[str]) -> None:
        """Delete results that were read, and fence their ids."""
        for start in range(0, len(job_ids), READ_AT_ONCE):
            chunk = job_ids[start : start + READ_AT_ONCE]
            results = [self._keys.result(job_id) for job_id in chunk]
            fences = [self._keys.fence(job_id) for job_id in chunk]
            if self._broker is None:
                keys = [*results, *fences]
                self._results.eval(_FORGET, len(keys), *keys, str(self._fence_ttl_s))
                continue
            with self._broker.pipeline(transaction=False) as pipe:
                for fence in fences:
                    pipe.set(fence, "1", ex=self._fence_ttl_s)
                pipe.execute()
            self._results.delete(*results)

    def subscription(self) -> Any:
        """Return an unused subscription on the server that workers publish replies on."""
        return (self._broker or self._results).pubsub()


class Inbox:
    """Settles the jobs of one Client. The thread starts with the first of them."""

    def __init__(self, app: FleetApp, client_id: str) -> None:
        self.results = Results(app)
        self._channel = Keys(prefix=app.settings.prefix).replies(client_id)
        self._reset()

    def _reset(self) -> None:
        """Begin anew: a forked child has neither the thread nor the parent's jobs."""
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        #: Jobs that nobody holds any more need no reply.
        self._awaited: weakref.WeakValueDictionary[str, Awaited] = weakref.WeakValueDictionary()

    def expect(self, jobs: Iterable[Awaited]) -> None:
        """Wait for the results of ``jobs``; call it before they are sent."""
        if self._pid != os.getpid():
            self._reset()
        with self.lock:
            for job in jobs:
                self._awaited[job.id] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fleet-inbox", daemon=True)
                self._thread.start()

    def awaited(self, job_id: str) -> Awaited | None:
        """Return the job of this id that waits here."""
        return self._awaited.get(job_id)

    def stop(self) -> None:
        """End the thread; jobs that still wait are not settled any more."""
        self._stopping.set()

    def _run(self) -> None:
        pause_s, longest_s = _RECONNECT_S
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                with contextlib.closing(self.results.subscription()) as subscription:
                    self._listen(subscription)
            except (redis.RedisError, OSError) as error:
                if self._stopping.is_set():
                    return
                logger.warning("inbox.reconnect", extra={"error": type(error).__name__})
                if time.monotonic() - began > longest_s:
                    pause_s = _RECONNECT_S[0]
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, longest_s)

    def _listen(self, subscription: Any) -> None:
        subscription.subscribe(self._channel)
        look_at = time.monotonic() + LOOK_EVERY_S
        while not self._stopping.is_set():
            told = self._news(subscription)
            if told is None or time.monotonic() >= look_at:
                began = time.monotonic()
                self._settle(list(self._awaited.keys()))
                took_s = time.monotonic() - began
                look_at = began + max(LOOK_EVERY_S, _LOOK_SHARE * took_s)
            else:
                self._settle(told)

    def _news(self, subscription: Any) -> list[str] | None:
        """Return the ids we were told of, or None when the subscription has just begun.

        What was stored before that moment was told to nobody, so all keys must be read then.
        """
        told: list[str] = []
        message = subscription.get_message(timeout=_STEP_S)
        while message is not None:
            if message["type"] == "subscribe":
                return None
            if message["type"] == "message":
                told += message["data"].decode().split(",")
            message = subscription.get_message(timeout=0)
        return told

    def _settle(self, job_ids: Iterable[str]) -> None:
        mine = [job_id for job_id in dict.fromkeys(job_ids) if job_id in self._awaited]
        if not mine:
            return
        read: list[str] = []
        try:
            for job_id, meta in self.results.read(mine):
                read.append(job_id)
                job = self._awaited.pop(job_id, None)
                if job is not None:
                    job.settle(meta)
        finally:
            if read:
                self.results.forget(read)
