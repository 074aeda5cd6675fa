"""``Client``: jobs with replies, for programs that send many or await them; Celery stays unseen."""

from __future__ import annotations

import asyncio
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, Final, NamedTuple

from celery.result import AsyncResult

from producer.collecting import Strangers, as_completed
from producer.contract.app import make_app
from producer.contract.call import parse_call
from producer.contract.cancel import cancel_command
from producer.contract.names import Priority, shadow_of
from producer.contract.patience import Patience
from producer.contract.settings import Settings
from producer.envelope import Submission
from producer.inbox import Inbox
from producer.job import Job
from producer.replies import Reply
from producer.stand_in import stand_in
from producer.tasks import Infer, priority_and_number, register

__all__ = ["Client", "Job", "Reply"]

#: submit_many sends this many jobs, or this many bytes, in one round trip.
_SEND_AT_ONCE: Final = 128
_SEND_AT_ONCE_BYTES: Final = 4 * 1024 * 1024


def _let_go(inbox: Inbox, infer: Infer) -> None:
    """Close what a client has open."""
    inbox.stop()
    infer.publisher.close()


class _Packed(NamedTuple):
    """A job and the Redis command that sends it."""

    job: Job
    command: list[Any]


class Client:
    """Sends jobs and receives their replies; threads may share one."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.id = uuid.uuid4().hex
        app = make_app(settings)
        self._settings = app.settings
        self._infer = register(app)
        self._inbox = Inbox(app, self.id)
        weakref.finalize(self, _let_go, self._inbox, self._infer)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lock(self) -> threading.Lock:
        """Guards the outcomes of this client's jobs."""
        return self._inbox.lock

    @property
    def reply_timeout_s(self) -> float:
        """How long a reply is waited for where the caller does not say."""
        return self._settings.reply_timeout_s

    def close(self) -> None:
        """Stop receiving. Who still waits for a reply gets JobTimeout now; the job is not stopped.

        Nothing of the client is left in Redis a moment later: no connection and no channel. What
        was answered and not read stays for ``result_ttl_s``.
        """
        self._inbox.abandon()
        self._infer.publisher.close()

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        priority: str = Priority.NORMAL,
        expires_s: float | None = None,
        job_id: str | None = None,
    ) -> Job:
        """Send one job. A ``job_id`` sent again while its result or fence lives runs once.

        Sent again after its reply was read, it ends with BadRequest: that reply is gone.
        """
        ids = None if job_id is None else [job_id]
        (job,) = self._submit(model, [inputs], ids, priority=priority, expires_s=expires_s)
        return job

    def submit_many(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        *,
        priority: str = Priority.NORMAL,
        expires_s: float | None = None,
        job_ids: Iterable[str] | None = None,
    ) -> list[Job]:
        """Send a job for each of ``many`` inputs, many in one round trip.

        When it raises, over a bad input or over Redis, the exception has the jobs that were
        accepted before in its attribute ``jobs``. Others may have been accepted when the connection
        was lost: sent again under the same ids they run once, so give ``job_ids``, one for each
        input, if that matters.
        """
        return self._submit(model, many, job_ids, priority=priority, expires_s=expires_s)

    async def infer(
        self, model: str, inputs: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Reply:
        """Send one job and await its reply, without blocking the event loop.

        Raises what `submit` and `Job.reply` raise; ``timeout_s`` means the same as there.
        """
        patience = Patience(timeout_s, self.reply_timeout_s)
        job = await asyncio.to_thread(self.submit, model, inputs)
        return await job.reply_within(patience)

    def cancel(self, job_id: str) -> None:
        """Ask that a job is not started; no worker has to run for that.

        A job that waits ends with Cancelled when an instance comes to it; one that runs keeps its
        outcome, and is not tried again should its process die.
        """
        publisher = self._infer.publisher
        publisher.send(cancel_command(publisher.keys, [job_id]))

    def as_completed(
        self, jobs: Iterable[Job | AsyncResult | str], timeout_s: float | None = None
    ) -> Iterator[Job]:
        """Yield jobs as their replies arrive; also for results of ``infer.delay()``, and for ids.

        Raises JobTimeout when some are missing after ``timeout_s``; without one, when there was no
        reply for FLEET_REPLY_TIMEOUT_S. ``math.inf`` waits for ever.
        """
        here = stand_in()
        results = self._inbox.results if here is None else here.results
        strangers = Strangers(results, lambda job_id: Job(job_id, self))
        patience = Patience(timeout_s, self.reply_timeout_s)
        yield from as_completed(jobs, strangers, patience)

    def _submit(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        ids: Iterable[str] | None,
        *,
        priority: str,
        expires_s: float | None,
    ) -> list[Job]:
        accepted: list[Job] = []
        try:
            for part in self._parts(model, many, ids, priority=priority, expires_s=expires_s):
                self._send(part, accepted)
        except Exception as error:
            error.jobs = accepted  # type: ignore[attr-defined]
            raise
        return accepted

    def _parts(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        ids: Iterable[str] | None,
        *,
        priority: str,
        expires_s: float | None,
    ) -> Iterator[list[_Packed]]:
        """Yield the jobs, packed, in parts that are sent in one round trip each."""
        named, number = priority_and_number(priority)
        part: list[_Packed] = []
        size_bytes = 0
        pairs = zip(many, repeat(None)) if ids is None else zip(many, ids, strict=True)
        for count, (inputs, job_id) in enumerate(pairs):
            call = parse_call((model, inputs), {})
            if not count:
                self._infer.check(call)
            job = self._awaited(job_id) or Job(job_id or str(uuid.uuid4()), self)
            command = self._infer.command(
                Submission(
                    id=job.id,
                    args=(model, inputs),
                    kwargs={},
                    call=call,
                    priority=named,
                    priority_number=number,
                    expires_s=expires_s,
                    shadow=shadow_of(model),
                    headers={"fleet_reply_to": self.id},
                )
            )
            part.append(_Packed(job, command))
            size_bytes += len(command[-1])
            if len(part) >= _SEND_AT_ONCE or size_bytes >= _SEND_AT_ONCE_BYTES:
                yield part
                part, size_bytes = [], 0
        if part:
            yield part

    def _awaited(self, job_id: str | None) -> Job | None:
        """Return the job of this id that was sent before and still waits."""
        job = self._inbox.awaited(job_id) if job_id else None
        return job if isinstance(job, Job) else None

    def _send(self, part: list[_Packed], accepted: list[Job]) -> None:
        """Send a part, and add to ``accepted`` what Redis took of it."""
        self._infer.publisher.admit()
        self._inbox.expect([packed.job for packed in part])
        replies = self._infer.publisher.replies([packed.command for packed in part])
        refusals = [reply for reply in replies if isinstance(reply, Exception)]
        accepted += [
            packed.job
            for packed, reply in zip(part, replies, strict=True)
            if not isinstance(reply, Exception)
        ]
        if refusals:
            raise refusals[0]
