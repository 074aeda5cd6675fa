"""Where replies arrive: a thread that is told of them, and looks beside it.

It reads results in batches, hands each to the job that waits for it, and has what was read deleted.
A job that meets the fence of an earlier one of its id has no reply to wait for, and is told so.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

import redis

from producer.contract.app import FleetApp
from producer.contract.errors import JobTimeout
from producer.contract.names import Keys
from producer.contract.subscription import News, Subscription
from producer.results import FENCE_AFTER_S, Found, Results
from producer.stand_in import stand_in

logger = logging.getLogger(__name__)

#: A publish can be lost, so the keys are read this often beside the subscription.
LOOK_EVERY_S: Final = 1.0
#: Looking may take at most one part in this many of the thread's time.
_LOOK_SHARE: Final = 20
#: How long the thread waits for news before it looks whether it is to stop.
_STEP_S: Final = 0.25
#: How long the end of the process waits until what was read is deleted.
_LINGER_S: Final = 1.5


class Awaited(Protocol):
    """A job that waits for its result."""

    @property
    def id(self) -> str: ...

    @property
    def sender(self) -> object: ...

    def hold_up(self, trouble: BaseException) -> None:
        """Note that the result is there, and why it cannot be read at the moment."""

    @property
    def awaited_since_s(self) -> float:
        """When it was made, in monotonic time."""

    def settle(self, meta: dict[str, Any] | BaseException) -> None:
        """Take the decoded result, or why there is none."""


class Inbox:
    """Settles jobs. The thread starts with the first of them."""

    def __init__(self, app: FleetApp, inbox_id: str) -> None:
        #: Names the channel on which workers tell of replies.
        self.id = inbox_id
        self.results = Results(app)
        self._channel = Keys(prefix=app.settings.prefix).replies(inbox_id).encode()
        self._lock = threading.Lock()
        #: Held from the moment results are read until they are deleted.
        self._reading = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._at_end: multiprocessing.util.Finalize | None = None
        self._pid = os.getpid()
        #: Jobs that nobody holds any more need no reply.
        self._awaited: weakref.WeakValueDictionary[str, Awaited] = weakref.WeakValueDictionary()
        self._disowned = _Disowned(app.settings.result_ttl_s)

    def expect(self, jobs: Iterable[Awaited]) -> None:
        """Wait for the results of ``jobs``; call it before they are sent."""
        if (here := stand_in()) is not None:
            here.expect(jobs)
            return
        with self._lock:
            for job in jobs:
                self._awaited[job.id] = job
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fleet-inbox", daemon=True)
                # Where there may be no more threads, the next job tries again.
                thread.start()
                self._thread = thread
                # Not before: buckets close their sessions when their finalizers are called, and
                # what is registered last is called first.
                atexit.register(self._linger)
                # A child of multiprocessing calls nothing but these.
                self._at_end = multiprocessing.util.Finalize(None, self._linger, exitpriority=0)

    def awaited(self, job_id: str) -> Awaited | None:
        """Return the job of this id that waits here."""
        return self._awaited.get(job_id)

    def dismiss(self, job_id: str) -> None:
        """Wait for this job no longer."""
        self._awaited.pop(job_id, None)

    def disown(self, job_id: str) -> None:
        """Delete the result of a job when it comes: nobody can ask for it."""
        self._disowned.add(job_id)

    def stop(self) -> None:
        """End the thread, and close the connections within a moment."""
        self._stopping.set()
        if self._thread is None:
            self.results.close()

    def _linger(self) -> None:
        """At the end of the process, let the thread delete what it read.

        Jobs are told first, and the last of them may have been what the process waited for; files
        do not expire.
        """
        # In a forked child the thread that would let go of it is missing.
        if self._pid == os.getpid() and self._reading.acquire(timeout=_LINGER_S):
            self._reading.release()

    def abandon(self, sender: object) -> None:
        """Tell whoever waits for a reply to ``sender`` that none will come."""
        self._abandon([job for job in self._waiting() if job.sender is sender])

    def _abandon(self, jobs: Iterable[Awaited]) -> None:
        for job in jobs:
            self.dismiss(job.id)
            job.settle(
                JobTimeout(
                    f"The Client was closed before the reply to job {job.id} came. The job is not "
                    "cancelled: Client().as_completed([id]) finds its result."
                )
            )

    def _run(self) -> None:
        subscription = self.results.subscription()
        subscription.begin([self._channel])
        looks = _Looks()
        in_trouble = False
        try:
            while not self._stopping.is_set():
                try:
                    self._turn(subscription, looks)
                    in_trouble = False
                except Exception as error:  # All jobs wait for this thread: it goes on.
                    if not in_trouble:
                        known = isinstance(error, redis.RedisError | OSError)
                        extra = {"error": type(error).__name__}
                        logger.warning("inbox.trouble", extra=extra, exc_info=not known)
                    in_trouble = True
                    looks.want()
                    self._stopping.wait(_STEP_S)
        finally:
            subscription.close()
            self.results.close()
            atexit.unregister(self._linger)
            if self._at_end is not None:
                self._at_end.cancel()
            # Of Clients that were closed while a thread of theirs was sending.
            self._abandon(self._waiting())

    def _waiting(self) -> list[Awaited]:
        """Return the jobs that wait; quickly, because the lock is asked for by event loops."""
        with self._lock:
            references = self._awaited.valuerefs()
        return [job for each in references if (job := each()) is not None]

    def _turn(self, subscription: Subscription, looks: _Looks) -> None:
        """Wait a moment for news, settle what they are about, and look for more when it is time."""
        told = _ids_in(subscription.news(looks.step_s))
        # None: what was stored before was told to nobody. Or we were told of a result that is not
        # there under that id, which may have a comma in it, or whatever else the message does not
        # carry over. Read all.
        if told is None:
            looks.want(at_once=True)
        elif self._settle(told) + self._forget_disowned(told) < len(told):
            looks.want()
        if looks.due:
            began_s = time.monotonic()
            self._look(began_s)
            looks.note(began_s)

    def _look(self, now_s: float) -> None:
        """Read the results of all that wait, and the fences of those that wait for long."""
        waiting = [(job.id, job.awaited_since_s) for job in self._waiting()]
        overdue = {job_id for job_id, since_s in waiting if now_s - since_s >= FENCE_AFTER_S}
        self._settle([job_id for job_id, _ in waiting], overdue=overdue)

    def _forget_disowned(self, job_ids: Iterable[str]) -> int:
        """Delete the results of those of ``job_ids`` that nobody can ask for; returns how many."""
        disowned = self._disowned.taken_from(job_ids)
        if disowned:
            self.results.discard(disowned)
        return len(disowned)

    def _settle(self, job_ids: Iterable[str], *, overdue: Collection[str] = frozenset()) -> int:
        """Settle those of ``job_ids`` whose outcome is there; returns how many."""
        mine = [job_id for job_id in job_ids if job_id in self._awaited]
        settled = 0
        read: list[Found] = []
        with self._reading:
            try:
                for found in self.results.read(mine, overdue=overdue):
                    if found.held_up:
                        if job := self._awaited.get(found.job_id):
                            job.hold_up(found.held_up)
                        continue
                    settled += 1
                    if found.stored:
                        read.append(found)
                    job = self._awaited.pop(found.job_id, None)
                    if job is not None:
                        job.settle(found.meta)
            finally:
                if read:
                    self.results.forget(read)
        return settled


class _Disowned:
    """Ids of jobs whose results nobody can ask for, as long as a result would be kept."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        #: When each was added, in monotonic time; the oldest first.
        self._added_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, job_id: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._added_s[job_id] = now
            while (oldest := next(iter(self._added_s))) != job_id:
                if now - self._added_s[oldest] <= self._kept_s:
                    break
                del self._added_s[oldest]

    def taken_from(self, job_ids: Iterable[str]) -> list[str]:
        """Return those of ``job_ids`` that are here, and are not here any more."""
        with self._lock:
            return [job_id for job_id in job_ids if self._added_s.pop(job_id, None) is not None]


class _Looks:
    """When to read the keys of all that wait: once in a while, and soon when there is a reason."""

    def __init__(self) -> None:
        self._at_s, self._free_s = time.monotonic() + LOOK_EVERY_S, 0.0
        self._wanted = False

    @property
    def step_s(self) -> float:
        """How long the thread may wait for news."""
        if not self._wanted:
            return _STEP_S
        return min(_STEP_S, max(0.0, self._free_s - time.monotonic()))

    @property
    def due(self) -> bool:
        now = time.monotonic()
        return now >= self._at_s or (self._wanted and now >= self._free_s)

    def want(self, *, at_once: bool = False) -> None:
        """Have the next look soon; or now, whatever the last one took."""
        self._wanted = True
        if at_once:
            self._free_s = 0.0

    def note(self, began_s: float) -> None:
        """Note that all was read, from ``began_s`` until now."""
        took_s = time.monotonic() - began_s
        self._free_s = began_s + _LOOK_SHARE * took_s
        self._at_s, self._wanted = max(self._free_s, began_s + LOOK_EVERY_S), False


def _ids_in(news: list[News] | None) -> set[str] | None:
    """Return the ids of jobs that ``news`` are about; None when there could be none."""
    if news is None:
        return None
    return {job_id for each in news for job_id in each.data.decode(errors="replace").split(",")}
