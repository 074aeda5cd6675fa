"""``Client``: jobs with replies, for programs that send many or await them; Celery stays unseen."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from itertools import repeat
from typing import Any

from celery.result import AsyncResult

from producer.asking import Asking
from producer.collecting import Strangers, as_completed
from producer.contract.cancel import cancel_command
from producer.contract.errors import JobTimeout
from producer.contract.names import Priority
from producer.contract.patience import Patience
from producer.contract.settings import Settings
from producer.job import Job
from producer.mailroom import Mailroom, mailroom
from producer.outbox import Outgoing
from producer.replies import Reply
from producer.sending import Packed, in_parts
from producer.stand_in import stand_in

__all__ = ["Client", "Job", "Reply"]


class Client:
    """Sends jobs and receives their replies; threads and event loops may share one.

    Those of one process that have the same settings share their threads and connections.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings.from_env()
        self._mailroom: Mailroom | None = mailroom(self._settings)
        self._pid = os.getpid()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """What workers tell its replies by; clients that share connections have the same."""
        return self._room.inbox.id

    @property
    def reply_timeout_s(self) -> float:
        """How long a reply is waited for where the caller does not say."""
        return self._settings.reply_timeout_s

    def close(self) -> None:
        """Stop receiving. Who still waits for a reply gets JobTimeout now; the job is not stopped.

        Nothing of the process's last client is left in Redis a moment later: no connection and no
        channel. What was answered and not read stays for ``result_ttl_s``.
        """
        room, self._mailroom = self._mailroom, None
        if room is not None and self._pid == os.getpid():
            room.inbox.abandon(self)

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
        """Send one job and await its reply; the event loop waits for nothing.

        Raises what `submit` and `Job.reply` raise; ``timeout_s`` is for sending and the reply
        together. When it is over, or the task that awaits is cancelled, nobody can ask for the
        reply any more: the job is cancelled as `cancel` does it, or not sent at all.
        """
        patience = Patience(timeout_s, self.reply_timeout_s)
        # Held until the end: it closes when nobody holds it.
        room = self._room
        outgoing = Outgoing(Job(str(uuid.uuid4()), self), model, inputs)
        room.outbox.put(outgoing)
        try:
            return await outgoing.job.reply_within(patience)
        except JobTimeout:
            if outgoing.job.done:
                raise
            raise JobTimeout(
                f"{model} gave no reply within {patience}; the job is cancelled. "
                f"{outgoing.job.why_it_waits} Give it longer: timeout_s=math.inf waits for ever."
            ) from None
        finally:
            if not outgoing.job.done:
                room.outbox.withdraw(outgoing)

    def cancel(self, job_id: str) -> None:
        """Ask that a job is not started; no worker has to run for that.

        A job that waits ends with Cancelled when an instance comes to it; one that runs keeps its
        outcome, and is not tried again should its process die.
        """
        publisher = self._room.publisher
        publisher.send(cancel_command(publisher.keys, [job_id]))

    def standing(self) -> Future[str]:
        """Return what keeps jobs waiting, as workers say; asked when a wait is over."""
        room = self._mailroom
        # It may have been closed by now: whoever waited in vain is told all the same.
        return (Asking(self._settings) if room is None else room.asking).standing()

    def as_completed(
        self, jobs: Iterable[Job | AsyncResult | str], timeout_s: float | None = None
    ) -> Iterator[Job]:
        """Yield jobs as their replies arrive; also for results of ``infer.delay()``, and for ids.

        Raises JobTimeout when some are missing after ``timeout_s``; without one, when there was no
        reply for FLEET_REPLY_TIMEOUT_S. ``math.inf`` waits for ever.
        """
        here = stand_in()
        results = self._room.inbox.results if here is None else here.results
        strangers = Strangers(results, lambda job_id: Job(job_id, self))
        patience = Patience(timeout_s, self.reply_timeout_s)
        yield from as_completed(jobs, strangers, patience, lambda: self.standing().result())

    @property
    def _room(self) -> Mailroom:
        """The mailroom of this process, which may be forked from the one that made this client."""
        if self._mailroom is None:
            raise RuntimeError("This Client is closed: nobody would receive the replies.")
        if self._pid != os.getpid():
            self._mailroom, self._pid = mailroom(self._settings), os.getpid()
        return self._mailroom

    def _submit(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        ids: Iterable[str] | None,
        *,
        priority: str,
        expires_s: float | None,
    ) -> list[Job]:
        room = self._room
        accepted: list[Job] = []
        try:
            jobs = self._packed(room, model, many, ids, priority=priority, expires_s=expires_s)
            for part in in_parts(jobs):
                room.inbox.expect([packed.job for packed in part])
                replies = room.sending.send(part)
                pairs = list(zip(part, replies, strict=True))
                refusals = [reply for reply in replies if isinstance(reply, Exception)]
                accepted += [p.job for p, reply in pairs if not isinstance(reply, Exception)]
                if refusals:
                    raise refusals[0]
        except Exception as error:
            error.jobs = accepted  # type: ignore[attr-defined]
            raise
        return accepted

    def _packed(
        self,
        room: Mailroom,
        model: str,
        many: Iterable[Mapping[str, Any]],
        ids: Iterable[str] | None,
        *,
        priority: str,
        expires_s: float | None,
    ) -> Iterator[Packed]:
        """Yield the jobs, packed."""
        pairs = zip(many, repeat(None)) if ids is None else zip(many, ids, strict=True)
        for count, (inputs, job_id) in enumerate(pairs):
            if not count:
                room.sending.check(model, inputs)
            job = self._job(room, job_id)
            yield room.sending.pack(job, model, inputs, priority=priority, expires_s=expires_s)

    def _job(self, room: Mailroom, job_id: str | None) -> Job:
        """Return the job of this id that was sent before and still waits, or a new one."""
        waiting = room.inbox.awaited(job_id) if job_id else None
        if isinstance(waiting, Job):
            # Who sent it last is who can close it.
            waiting.sender = self
            return waiting
        return Job(job_id or str(uuid.uuid4()), self)
