"""Where replies arrive: a thread that is told of them, and looks beside it.

It reads results in batches, hands each to the job that waits for it, deletes what was read and
leaves a fence, so that the same job id is not run again. A job that meets the fence of an earlier
one of its id has no reply to wait for, and is told so.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol

import redis
from kombu.exceptions import OperationalError

from producer.contract.app import FleetApp
from producer.contract.blobs import Named, named_in
from producer.contract.errors import BadMessage, JobTimeout
from producer.contract.names import Keys
from producer.contract.settings import reading_options, redis_client
from producer.contract.subscription import News, Subscription
from producer.replies import answered_before, read_meta
from producer.stand_in import stand_in

logger = logging.getLogger(__name__)

#: Results are read this many at a time.
READ_AT_ONCE: Final = 256

#: A publish can be lost, so the keys are read this often beside the subscription.
LOOK_EVERY_S: Final = 1.0
#: A job that waits longer may have an id that was answered before: its fence is looked for as well.
FENCE_AFTER_S: Final = 1.0
#: Looking may take at most one part in this many of the thread's time.
_LOOK_SHARE: Final = 20
#: How long the thread waits for news before it looks whether it is to stop.
_STEP_S: Final = 0.25

#: Deletes results and leaves fences; the deletion first, because a full Redis then allows the rest.
#: A result that is gone by now leaves none: its job was requeued, and a fence would end it.
#: KEYS: the results, then their fences. ARGV: how long a fence lives.
_FORGET: Final = """
local half = #KEYS / 2
for i = 1, half do
    if redis.call('DEL', KEYS[i]) == 1 then
        redis.call('SET', KEYS[half + i], '1', 'EX', ARGV[1])
    end
end
"""


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


class Found(NamedTuple):
    """What a look found out about one job."""

    job_id: str
    #: The decoded result; an error when it cannot be decoded, or was read before.
    meta: dict[str, Any] | BaseException
    #: Whether there is a result to be forgotten.
    stored: bool
    #: Its large arrays.
    named: tuple[Named, ...] = ()
    #: Why it cannot be read at the moment; it is to be read again.
    held_up: Exception | None = None


class Results:
    """Reads and deletes results of the fleet, many at a time."""

    def __init__(self, app: FleetApp) -> None:
        settings = app.settings
        self._backend = app.backend
        self._keys = Keys(prefix=settings.prefix)
        self._fence_ttl_s = settings.fence_ttl_s
        options = reading_options()
        self._results = redis_client(settings.result_url, **options)
        self._broker = None if settings.one_server else redis_client(settings.broker_url, **options)

    def read(
        self, job_ids: Iterable[str], *, overdue: Collection[str] = frozenset()
    ) -> Iterator[Found]:
        """Yield what is there; of the ``overdue``, also that only a fence is there."""
        remaining = iter(job_ids)
        while chunk := list(islice(remaining, READ_AT_ONCE)):
            late = [job_id for job_id in chunk if job_id in overdue]
            payloads, fences = self._fetch(chunk, late)
            fenced = {job_id for job_id, fence in zip(late, fences, strict=True) if fence}
            for job_id, payload in zip(chunk, payloads, strict=True):
                meta = self._decoded(payload) if payload is not None else None
                if isinstance(meta, OperationalError):
                    yield Found(job_id, {}, stored=False, held_up=meta)
                elif meta is not None:
                    yield Found(job_id, meta, stored=True, named=named_in(payload))
                elif payload is None and job_id in fenced:
                    yield Found(job_id, answered_before(job_id), stored=False)

    def _fetch(
        self, job_ids: Sequence[str], late: Sequence[str]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the results of ``job_ids`` and the fences of ``late``; one trip to each server."""
        results = [self._keys.result(job_id) for job_id in job_ids]
        fences = [self._keys.fence(job_id) for job_id in late]
        if self._broker is None:
            values: Any = self._results.mget([*results, *fences])
            return values[: len(results)], values[len(results) :]
        # The fences first: a worker stores the result before the fence of a job it completes, so
        # whoever sees a fence then finds the result, unless it was read and deleted.
        fenced: Any = self._broker.mget(fences) if fences else ()
        values = self._results.mget(results)
        return values, fenced

    def _decoded(self, payload: bytes) -> dict[str, Any] | BaseException | None:
        try:
            return read_meta(self._backend, payload)
        except redis.RedisError:
            # Of its large arrays: they are read in another trip.
            raise
        except OperationalError as error:
            # Their folder or bucket failed: the result stays, and the next look tries again.
            logger.warning("results.unreadable", extra={"error": str(error)})
            trouble: Exception = error
            return trouble
        except Exception as error:  # noqa: BLE001  one bad result must not hide the others
            return BadMessage(f"The result cannot be read: {error}")

    def forget(self, read: Sequence[Found]) -> None:
        """Delete results that were read, and fence their ids."""
        for start in range(0, len(read), READ_AT_ONCE):
            chunk = read[start : start + READ_AT_ONCE]
            results = [self._keys.result(found.job_id) for found in chunk]
            fences = [self._keys.fence(found.job_id) for found in chunk]
            self._delete(results, fences)
            # After the results: whoever finds one finds its arrays.
            self._backend.blobs.remove(
                self._results, [named for found in chunk for named in found.named]
            )

    def discard(self, job_ids: Sequence[str]) -> None:
        """Delete results that nobody will read, and fence their ids."""
        for start in range(0, len(job_ids), READ_AT_ONCE):
            chunk = job_ids[start : start + READ_AT_ONCE]
            payloads, _ = self._fetch(chunk, ())
            self.forget(
                [
                    Found(job_id, {}, stored=True, named=named_in(payload) if payload else ())
                    for job_id, payload in zip(chunk, payloads, strict=True)
                ]
            )

    def _delete(self, results: Sequence[str], fences: Sequence[str]) -> None:
        if self._broker is None:
            keys = [*results, *fences]
            self._results.eval(_FORGET, len(keys), *keys, str(self._fence_ttl_s))
            return
        with self._broker.pipeline(transaction=False) as pipe:
            for fence in fences:
                pipe.set(fence, "1", ex=self._fence_ttl_s)
            pipe.execute()
        self._results.delete(*results)

    def subscription(self) -> Subscription:
        """Return an unused subscription on the server that workers publish replies on."""
        return Subscription(self._broker or self._results)

    def close(self) -> None:
        """Close the connections; a later look opens them again."""
        for client in filter(None, (self._results, self._broker)):
            client.close()


class Inbox:
    """Settles jobs. The thread starts with the first of them."""

    def __init__(
        self, app: FleetApp, inbox_id: str, *, at_end: Callable[[], object] = lambda: None
    ) -> None:
        """``at_end`` is called when the thread ends."""
        #: Names the channel on which workers tell of replies.
        self.id = inbox_id
        self.results, self._at_end = Results(app), at_end
        self._channel = Keys(prefix=app.settings.prefix).replies(inbox_id).encode()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
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
                self._thread = threading.Thread(target=self._run, name="fleet-inbox", daemon=True)
                self._thread.start()

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
            self._at_end()
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
