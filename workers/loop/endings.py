"""Answers that wait for the round trip that ends them: packed once, sent until Redis took them,
then counted.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Final

import redis
from kombu.exceptions import OperationalError

from producer.contract.blobs import Spilled
from producer.contract.errors import EngineFailed, Expired, FleetError
from producer.contract.names import model_of
from workers.batching.closing import Closed
from workers.delivery.ledger import End, Ending, Entry, Ledger, Letter
from workers.delivery.scripts import Call
from workers.loading import retry_gap_s
from workers.loop.answers import Answer, Answers
from workers.loop.jobs import Job, Unreadable
from workers.loop.large_arrays import LargeArrays
from workers.runner import Counters
from workers.status import Status
from workers.telemetry.events import TaskEvents

logger = logging.getLogger(__name__)

#: A reply that is larger is refused: Redis takes no value above 512 MiB, and no client wants one.
_MAX_REPLY_BYTES: Final = 64 * 1024 * 1024

#: How Redis begins what it says of itself.
_STATE: Final = re.compile(r"[A-Z]{3,} ")

#: Replies that one call carries; a server reads a call as a whole before it runs it.
_CALL_BYTES: Final = 64 * 1024 * 1024


@dataclasses.dataclass(slots=True, kw_only=True)
class _Waiting:
    """One answer on its way: through the tracer or packed, then stored, then ended in Redis."""

    queue: str
    answer: Answer
    #: What `complete` stores; None when it lies under its key already.
    payload: bytes | None = None
    #: The same with its large arrays, until they are where its reader looks for them.
    large: Spilled | None = None
    #: Whether it went through the tracer or was packed.
    packed: bool = False
    #: Whether nothing but the ending itself is left to do.
    stored: bool = False
    #: Whether somebody else answered it, and may have told of it.
    known: bool = False
    #: How often its callbacks could not be sent, and when they are tried again. Monotonic clock.
    failures: int = 0
    retry_at_s: float = 0.0


def _will_pass(error: Exception) -> bool:
    """Return whether the same may work later: what Redis says of its own state begins with a code,
    such as MISCONF; what it says of the data of one job will be said again, for ever.
    """
    if type(error) is redis.ResponseError:
        return _STATE.match(str(error)) is not None and "WRONGTYPE" not in str(error)
    return isinstance(error, redis.RedisError | OperationalError)


class Endings:
    """Ends the jobs of one consumer; the claim loop sends the calls."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        results: redis.Redis | None,
        ledger: Ledger,
        answers: Answers,
        arrays: LargeArrays,
        events: TaskEvents,
        status: Status,
        worker: str,
    ) -> None:
        #: ``results`` is None when broker and results are one database: then one script does both.
        self._client, self._results, self._ledger = client, results, ledger
        self._answers, self._arrays = answers, arrays
        self._events, self._status = events, status
        self.worker = worker
        self._waiting: list[_Waiting] = []

    @property
    def empty(self) -> bool:
        """Whether nothing waits to be ended."""
        return not self._waiting

    @property
    def entries(self) -> list[Entry]:
        """The entries of what waits to be ended: they are still ours."""
        return [waiting.answer.job.entry for waiting in self._waiting]

    def add_answers(self, queue: str, answers: Sequence[Answer]) -> None:
        """Keep ``answers`` until Redis has confirmed the end of their jobs."""
        self._waiting += [_Waiting(queue=queue, answer=answer) for answer in answers]

    def end_stored(self, queue: str, jobs: Sequence[Job]) -> list[Job]:
        """End those of ``jobs`` that have a result on its own server; returns them.

        Whoever stored it died before the broker knew.
        """
        if self._results is None or not jobs:
            return []
        pipe = self._results.pipeline(transaction=False)
        for job in jobs:
            pipe.exists(self._ledger.keys.result(job.job_id))
        stored = [job for job, there in zip(jobs, pipe.execute(), strict=True) if there]
        self._waiting += [
            _Waiting(queue=queue, answer=Answer(job=job), packed=True, stored=True, known=True)
            for job in stored
        ]
        return stored

    def calls(self) -> list[Call[list[Ending]]]:
        """Return the calls that end what waits; sending them twice changes nothing.

        Packs, traces and stores what was not yet; may raise what redis-py raises, and goes on where
        it was at the next call.
        """
        now_s = time.monotonic()
        self._prepare(
            [each for each in self._waiting if not each.stored and each.retry_at_s <= now_s]
        )
        return [self._call(part) for part in self._parts()]

    def settle(self, endings: Sequence[list[Ending]]) -> None:
        """Note that Redis took every call; tell and count each job that was still ours."""
        results = (ending for part in endings for ending in part)
        ended = self._ordered()
        gone: list[Entry] = []
        for waiting, ending in zip(ended, results, strict=True):
            if ending is Ending.LOST:
                logger.warning("job.lost", extra={"job_id": waiting.answer.job.job_id})
                continue
            gone.append(waiting.answer.job.entry)
            if not waiting.known:
                self._tell(waiting.answer)
        self._waiting = [each for each in self._waiting if not each.stored]
        self._arrays.remove(gone)

    def _prepare(self, fresh: Sequence[_Waiting]) -> None:
        """Pack or trace each of ``fresh``, and store those whose results have their own server."""
        self._drop_lost([each for each in fresh if self._guarded(each)])
        for waiting in fresh:
            if waiting.packed or waiting.stored:
                continue
            if self._answers.needs_tracer(waiting.answer.job):
                waiting.packed = self._traced(waiting)
            else:
                waiting.answer, packed = self._pack(waiting.answer)
                self._take(waiting, packed)
                waiting.packed = True
        self._keep([each for each in fresh if each.large is not None and not each.stored])
        apart = [each for each in fresh if each.payload is not None]
        if self._results is not None and apart:
            payloads = {each.answer.job.job_id: each.payload or b"" for each in apart}
            self._store(self._results, payloads)
            for waiting in apart:
                waiting.payload = None
        for waiting in fresh:
            waiting.stored = waiting.stored or waiting.packed

    def _take(self, waiting: _Waiting, packed: Spilled | None) -> None:
        """Take in what is to be stored as the result."""
        waiting.payload = packed.body if packed else None
        waiting.large = packed if packed and packed.blobs else None

    def _keep(self, large: Sequence[_Waiting]) -> None:
        """Write large arrays: a reply that refers to them is stored after them."""
        self._arrays.keep([waiting.large for waiting in large if waiting.large])
        for waiting in large:
            waiting.large = None

    def _traced(self, waiting: _Waiting) -> bool:
        """Let Celery end the job of ``waiting``; one that it cannot end now holds no other up.

        A full Redis takes no callbacks, and yet must be drained of all that has none.
        """
        try:
            if self._results is not None:
                # Celery sends callbacks before it stores: not for a server that is away.
                self._results.ping()
            waiting.answer, packed = self._trace(waiting.answer)
            self._take(waiting, packed)
        except (redis.RedisError, OperationalError) as error:
            waiting.failures += 1
            gap_s = retry_gap_s(waiting.failures)
            waiting.retry_at_s = time.monotonic() + gap_s
            logger.warning(
                "job.callbacks_wait",
                extra={
                    "job_id": waiting.answer.job.job_id,
                    "error": type(error).__name__,
                    "retry_in_s": gap_s,
                },
            )
            return False
        return True

    def _guarded(self, waiting: _Waiting) -> bool:
        """Whether something happens to the answer before `complete` looks who owns its job."""
        return self._results is not None or self._answers.needs_tracer(waiting.answer.job)

    def _drop_lost(self, guarded: Sequence[_Waiting]) -> None:
        """Leave those that are no longer ours to `complete`, which says that they are lost."""
        if not guarded:
            return
        entries = [waiting.answer.job.entry for waiting in guarded]
        for waiting, ours in zip(guarded, self._ledger.owned(self._client, entries), strict=True):
            if not ours:
                # Whoever lost a claim does not answer for it.
                waiting.stored, waiting.payload = True, None

    def _trace(self, answer: Answer) -> tuple[Answer, Spilled | None]:
        """Let Celery end the job; one whose callbacks cannot be sent at all fails for that.

        The tracer stores the failure itself where it can; ours stands only where there is none.
        """
        try:
            if self._answers.trace(answer):
                # The tracer stores no result that nobody wants; `begin` knows the job by it.
                ignored = answer.job.headers.get("ignore_result")
                return self._pack(answer) if ignored else (answer, None)
            text = "its callbacks could not be sent"
        except Exception as error:
            if _will_pass(error):
                raise
            text = f"its callbacks could not be sent: {type(error).__name__}"
        failed = EngineFailed(f"The job was answered, but {text}.")
        failure = self._answers.pack_failure(answer.job.job_id, failed, answer.about)
        return dataclasses.replace(answer, outputs=None, error=failed), failure

    def _ordered(self) -> list[_Waiting]:
        """Return what is ready to be ended, each queue's together, in the order of `_parts`."""
        ready = [waiting for waiting in self._waiting if waiting.stored]
        queues = dict.fromkeys(waiting.queue for waiting in ready)
        return [each for queue in queues for each in ready if each.queue == queue]

    def _parts(self) -> list[list[_Waiting]]:
        """Return what is ready in parts of one queue and a bounded size, one for each call."""
        parts: list[list[_Waiting]] = []
        size = 0
        for waiting in self._ordered():
            size += len(waiting.payload or b"")
            if not parts or parts[-1][0].queue != waiting.queue or size > _CALL_BYTES:
                parts.append([])
                size = len(waiting.payload or b"")
            parts[-1].append(waiting)
        return parts

    def _call(self, part: Sequence[_Waiting]) -> Call[list[Ending]]:
        ends = [
            End(
                entry=waiting.answer.job.entry,
                job_id=waiting.answer.job.job_id,
                payload=waiting.payload,
                reply_to=waiting.answer.job.reply_to,
            )
            for waiting in part
        ]
        return self._ledger.complete(part[0].queue, ends)

    def bury(self, queue: str, job: Job, error: FleetError) -> Call[bool]:
        """Return the call that makes a dead letter of ``job`` and stores ``error`` as its result.

        Chords and errbacks hear of it first: they fire at least once.
        """
        letter = Letter(code=error.code, reason=str(error), attempts=job.starts, worker=self.worker)
        about = {"model": model_of(queue), "attempts": letter.attempts, "worker": self.worker}
        answer = Answer(job=job, error=error, about=about)
        self._count(answer)
        self._events.received(job)
        self._events.failed(job, error)
        traced = self._answers.needs_tracer(job)
        answer, packed = self._trace(answer) if traced else self._pack(answer)
        payload = packed.body if packed else None
        if self._results is not None and payload is not None:
            self._store(self._results, {job.job_id: payload})
            payload = None
        return self._ledger.bury(
            queue, job.entry, job.job_id, letter, payload=payload, reply_to=job.reply_to
        )

    def bury_unreadable(self, queue: str, bad: Unreadable) -> Call[bool]:
        """Like `bury`, for an entry of which at most the id could be read."""
        letter = Letter(
            code=bad.error.code,
            reason=str(bad.error),
            attempts=max(0, bad.entry.reads - 1),
            worker=self.worker,
        )
        payload = None
        if bad.job_id is not None:
            about = {"worker": self.worker}
            payload = self._answers.pack_failure(bad.job_id, bad.error, about).body
            if self._results is not None:
                self._store(self._results, {bad.job_id: payload})
                payload = None
        logger.error("entry.unreadable", extra={"queue": queue, "entry": bad.entry.entry_id})
        return self._ledger.bury(
            queue, bad.entry, bad.job_id, letter, payload=payload, reply_to=bad.reply_to
        )

    def count_batch(self, model: str, closed: Closed, done: Counters) -> None:
        """Add what the engine has done for one claim to the model's totals.

        Jobs of different shapes, and of more rows than fit, take several runs.
        """
        counters = self._status.counters[model]
        counters.batches += done.batches
        counters.rows += done.rows
        counters.closed[str(closed)] += 1
        counters.out_of_memory += done.out_of_memory
        counters.non_finite += done.non_finite
        counters.reopened += done.reopened

    def _pack(self, answer: Answer) -> tuple[Answer, Spilled]:
        try:
            packed = self._answers.pack(answer)
            if packed.nbytes <= _MAX_REPLY_BYTES:
                return answer, packed
            text = (
                f"The reply has {packed.nbytes:,} bytes, more than the {_MAX_REPLY_BYTES:,} that "
                "are stored. Send fewer rows in one job."
            )
        except Exception as error:  # noqa: BLE001 - it fails its job alone
            text = f"The reply could not be packed: {type(error).__name__}."
        failed = EngineFailed(text)
        packed = self._answers.pack_failure(answer.job.job_id, failed, answer.about)
        return dataclasses.replace(answer, outputs=None, error=failed), packed

    def _store(self, results: redis.Redis, payloads: Mapping[str, bytes]) -> None:
        """Store results by job id on their own server, before the entries are acked on the broker.

        A terminal result that is there, or the fence of one that was read, stays; and nobody hears
        of another. One round trip for each step, whatever the number.
        """
        keys = self._ledger.keys
        pipe = self._client.pipeline(transaction=False)
        for job_id in payloads:
            pipe.exists(keys.fence(job_id))
        fenced = pipe.execute()
        wanted = {
            keys.result(job_id): payload
            for (job_id, payload), fence in zip(payloads.items(), fenced, strict=True)
            if not fence
        }
        pipe = results.pipeline(transaction=False)
        for key, payload in wanted.items():
            pipe.set(key, payload, ex=self._ledger.result_ttl_s, nx=True)
        for (key, payload), stored in zip(wanted.items(), pipe.execute(), strict=True):
            if stored:
                pipe.publish(key, payload)
        pipe.execute()

    def _count(self, answer: Answer) -> None:
        counters = self._status.counters[str(answer.about.get("model", ""))]
        counters.jobs += 1
        if answer.error is None:
            counters.succeeded += 1
        else:
            counters.failed += 1

    def _tell(self, answer: Answer) -> None:
        self._count(answer)
        job, error = answer.job, answer.error
        if reason := answer.why_retried:
            self._events.retried(job, reason)
        if error is None:
            runtime_s = answer.about.get("compute_s", 0.0)
            self._events.succeeded(job, runtime_s=runtime_s, shapes=answer.shapes)
        elif answer.state == "REVOKED":
            self._events.revoked(job, expired=isinstance(error, Expired))
        else:
            self._events.failed(job, error)
