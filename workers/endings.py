"""Answers that wait for the round trip that ends them: packed once, sent until Redis took them,
then counted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import redis

from producer.contract.call import shapes_of
from producer.contract.errors import EngineFailed, Expired, FleetError
from workers.answers import Answer, Answers
from workers.batching.closing import Closed
from workers.delivery.ledger import End, Ending, Entry, Ledger, Letter
from workers.delivery.scripts import Call
from workers.jobs import Job, Unreadable
from workers.runner import Outcome, Prepared
from workers.status import Status
from workers.telemetry.events import TaskEvents

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """Answers of one queue and the call that ends their jobs."""

    answers: tuple[Answer, ...]
    call: Call[list[Ending]]


class Endings:
    """Ends the jobs of one consumer; the claim loop sends the calls."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        results: redis.Redis | None,
        ledger: Ledger,
        answers: Answers,
        events: TaskEvents,
        status: Status,
        worker: str,
    ) -> None:
        #: ``results`` is None when broker and results are one database: then one script does both.
        self._client, self._results, self._ledger = client, results, ledger
        self._answers, self._events, self._status = answers, events, status
        self.worker = worker
        self._waiting: list[_Waiting] = []

    @property
    def held(self) -> list[Entry]:
        """The entries whose end Redis has not confirmed."""
        return [answer.job.entry for waiting in self._waiting for answer in waiting.answers]

    @property
    def calls(self) -> list[Call[list[Ending]]]:
        """What is still to be sent; sending it twice changes nothing."""
        return [waiting.call for waiting in self._waiting]

    def add_answers(self, queue: str, answers: Sequence[Answer]) -> None:
        """Pack ``answers``, or let the tracer store them, and keep the call that ends their jobs.

        A job that the tracer could not end stays unfinished: its start is counted, it runs alone
        next time.
        """
        packed: list[tuple[Answer, bytes | None]] = []
        for answer in answers:
            if not self._answers.needs_tracer(answer.job):
                packed.append(self._pack(answer))
            elif self._owns(answer) and self._answers.trace(answer):
                packed.append((answer, None))
        if not packed:
            return
        ends = [
            End(
                entry=answer.job.entry,
                job_id=answer.job.job_id,
                payload=payload,
                reply_to=answer.job.reply_to,
            )
            for answer, payload in packed
        ]
        if self._results is not None:
            self._store(self._results, ends)
        call = self._ledger.complete(queue, ends, store=self._results is None)
        self._waiting.append(_Waiting(answers=tuple(answer for answer, _ in packed), call=call))

    def settle(self, endings: Sequence[list[Ending]]) -> None:
        """Note that Redis took every waiting call; tell and count each job that was still ours."""
        for waiting, results in zip(self._waiting, endings, strict=True):
            for answer, ending in zip(waiting.answers, results, strict=True):
                if ending is Ending.LOST:
                    logger.warning("job.lost", extra={"job_id": answer.job.job_id})
                else:
                    self._tell(answer)
        self._waiting.clear()

    def bury(self, queue: str, job: Job, error: FleetError, letter: Letter) -> Call[bool]:
        """Return the call that makes a dead letter of ``job`` and stores ``error`` as its
        result.
        """
        about = {"attempts": letter.attempts, "worker": self.worker}
        answer = Answer(job=job, error=error, about=about)
        self._count(answer)
        self._events.received(job)
        self._events.failed(job, error)
        payload = self._answers.pack(answer)
        if self._results is not None:
            self._store(self._results, [End(entry=job.entry, job_id=job.job_id, payload=payload)])
            payload = b""
        return self._ledger.bury(
            queue, job.entry, job.job_id, letter, payload=payload, reply_to=job.reply_to
        )

    def bury_unreadable(self, queue: str, bad: Unreadable) -> Call[bool]:
        """Like `bury`, for an entry of which at most the id could be read."""
        letter = Letter(code=bad.error.code, reason=str(bad.error), attempts=0, worker=self.worker)
        payload = None
        if bad.job_id is not None:
            payload = self._answers.pack_failure(bad.job_id, bad.error, {"worker": self.worker})
            if self._results is not None:
                end = End(entry=bad.entry, job_id=bad.job_id, payload=payload)
                self._store(self._results, [end])
                payload = None
        logger.error("entry.unreadable", extra={"queue": queue, "entry": bad.entry.entry_id})
        return self._ledger.bury(
            queue, bad.entry, bad.job_id, letter, payload=payload, reply_to=bad.reply_to
        )

    def count_batch(
        self,
        model: str,
        closed: Closed,
        prepared: Sequence[Prepared],
        outcomes: Sequence[Outcome],
    ) -> None:
        """Add one batch to the model's totals."""
        counters = self._status.counters[model]
        counters.batches += 1
        counters.rows += sum(job.rows for job in prepared)
        counters.closed[str(closed)] += 1
        # Every job of a batch that ran out of memory carries the batch's count.
        counters.out_of_memory += max((outcome.out_of_memory for outcome in outcomes), default=0)

    def _owns(self, answer: Answer) -> bool:
        return self._ledger.owned(self._client, [answer.job.entry])[0]

    def _pack(self, answer: Answer) -> tuple[Answer, bytes]:
        try:
            return answer, self._answers.pack(answer)
        except Exception as error:  # noqa: BLE001 - it fails its job alone
            failed = EngineFailed(f"The reply could not be packed: {type(error).__name__}.")
            packed = self._answers.pack_failure(answer.job.job_id, failed, answer.about)
            return dataclasses.replace(answer, outputs=None, error=failed), packed

    def _store(self, results: redis.Redis, ends: Sequence[End]) -> None:
        """Store results on their own server, before the entries are acked on the broker."""
        keys = self._ledger.keys
        packed = {keys.result(end.job_id): end.payload for end in ends if end.payload is not None}
        pipe = results.pipeline(transaction=False)
        for key, payload in packed.items():
            pipe.set(key, payload, ex=self._ledger.result_ttl_s, nx=True)
        for (key, payload), stored in zip(packed.items(), pipe.execute(), strict=True):
            # A terminal result that was there before stays, and nobody hears of another.
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
        times = answer.about.get("out_of_memory", 0)
        if times:
            reason = f"OutOfMemory({times}x), answered in {answer.about.get('precision')}"
            self._events.retried(job, reason)
        if error is None:
            shapes = shapes_of(answer.outputs or {})
            runtime_s = answer.about.get("compute_s", 0.0)
            self._events.succeeded(job, runtime_s=runtime_s, shapes=shapes)
        elif answer.state == "REVOKED":
            self._events.revoked(job, expired=isinstance(error, Expired))
        else:
            self._events.failed(job, error)
