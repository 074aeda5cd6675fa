"""Many replies in the order they come: of jobs, and of what is known by a result or an id alone."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import redis
from celery.result import AsyncResult

from producer.contract.errors import JobTimeout
from producer.contract.patience import Patience
from producer.job import Job
from producer.results import FENCE_AFTER_S, Found, Results

logger = logging.getLogger(__name__)

#: How often results are looked for that nobody tells us of.
_LOOK_FIRST_S: Final = 0.005
_LOOK_LAST_S: Final = 0.05
#: As long as Redis cannot be reached.
_LOOK_IN_TROUBLE_S: Final = 0.5
#: No step is longer, however long the wait.
_LONGEST_STEP_S: Final = 3600.0


class Strangers:
    """Jobs known by their results or ids alone. Nobody tells us of them: they are looked for."""

    def __init__(self, results: Results, adopt: Callable[[str], Job]) -> None:
        #: ``adopt`` makes a job of an id.
        self._results, self._adopt = results, adopt
        self._originals: dict[str, AsyncResult | str] = {}
        self._fences_at = time.monotonic() + FENCE_AFTER_S
        #: How long to wait before the next look.
        self.look_s = _LOOK_FIRST_S
        #: Why one that is there cannot be read at the moment.
        self.trouble: BaseException | None = None

    def __len__(self) -> int:
        return len(self._originals)

    def add(self, original: AsyncResult | str) -> None:
        self._originals[original if isinstance(original, str) else str(original.id)] = original

    def look(self) -> list[Job]:
        """Read the results that are there; return their jobs, which are no strangers any more."""
        found: list[Job] = []
        read: list[Found] = []
        self.trouble = None
        try:
            for each in self._results.read(list(self._originals), overdue=self._overdue()):
                if each.held_up:
                    self.trouble = each.held_up
                    continue
                found.append(self._settled(each.job_id, each.meta))
                if each.stored and isinstance(self._originals[each.job_id], str):
                    read.append(each)
                del self._originals[each.job_id]
            self.look_s = _LOOK_FIRST_S if found else min(_LOOK_LAST_S, self.look_s * 1.5)
            self._results.forget(read)
        except redis.AuthenticationError:
            raise
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            logger.info("results.unreachable", extra={"error": type(error).__name__})
            self.look_s = _LOOK_IN_TROUBLE_S
        return found

    def _overdue(self) -> frozenset[str]:
        """Return the ids whose fences are looked for this time."""
        now = time.monotonic()
        if now < self._fences_at:
            return frozenset()
        self._fences_at = now + FENCE_AFTER_S
        return frozenset(self._originals)

    def _settled(self, job_id: str, meta: dict[str, Any] | BaseException) -> Job:
        job = self._adopt(job_id)
        original = self._originals[job_id]
        if isinstance(original, AsyncResult) and isinstance(meta, dict):
            # Its own get() is answered from here; the key stays, as always with get().
            original._maybe_set_cache(meta)
        job.settle(meta)
        return job


def as_completed(
    jobs: Iterable[Job | AsyncResult | str],
    strangers: Strangers,
    patience: Patience,
    standing: Callable[[], str],
) -> Iterator[Job]:
    """Yield jobs as their replies arrive; raises JobTimeout when ``patience`` is over.

    ``standing`` tells what keeps jobs waiting, as workers say.
    """
    done: queue.SimpleQueue[Job] = queue.SimpleQueue()
    told: list[Job] = []
    try:
        for job in jobs:
            if isinstance(job, Job):
                told.append(job)
                job.when_done(done.put)
            else:
                strangers.add(job)
        waiting = len(told)
        while waiting or strangers:
            # Before the look: what arrives in time is never missed.
            late = not patience.left_s
            found = len(strangers)
            yield from strangers.look()
            found -= len(strangers)
            step_s = min(patience.left_s, strangers.look_s if strangers else _LONGEST_STEP_S)
            for job in _taken(done, step_s, wait=bool(waiting), or_sleep=bool(strangers)):
                waiting, found = waiting - 1, found + 1
                yield job
            if found:
                patience.renew()
            elif late:
                held_up = [job.trouble for job in told if not job.done] + [strangers.trouble]
                trouble = next(filter(None, held_up), None)
                words = standing() if patience.was_long and not trouble else ""
                raise _in_vain(waiting + len(strangers), patience, str(trouble or ""), words)
    finally:
        for job in told:
            job.no_longer(done.put)


def _in_vain(missing: int, patience: Patience, trouble: str, words: str) -> JobTimeout:
    """Return the error that says why: ``trouble`` of reading, or the ``words`` of workers."""
    why = trouble or (
        f"{words}They wait, run, or are lost with a Redis that was emptied: `fleet queue` says "
        "what waits."
    )
    return JobTimeout(
        f"{missing} jobs have no reply after {patience}. {why} Ask again, or give them longer: "
        "timeout_s=math.inf waits for ever."
    )


def _taken(
    done: queue.SimpleQueue[Job], step_s: float, *, wait: bool, or_sleep: bool
) -> Iterator[Job]:
    """Yield what is in ``done``; when that is nothing, wait for up to ``step_s``."""
    try:
        if wait:
            yield done.get(timeout=step_s)
        elif or_sleep:
            time.sleep(step_s)
        while True:
            yield done.get_nowait()
    except queue.Empty:
        return
