"""``Client``: jobs with replies, for programs that send many or await them; Celery stays unseen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Final

from celery.result import AsyncResult

from producer.contract.app import make_app
from producer.contract.call import parse_call
from producer.contract.cancel import cancel_command
from producer.contract.errors import JobTimeout
from producer.contract.names import Priority, shadow_of
from producer.contract.settings import Settings
from producer.envelope import Submission
from producer.inbox import FENCE_AFTER_S, Inbox
from producer.replies import Outcome, Reply, outcome_of
from producer.tasks import priority_and_number, register

__all__ = ["Client", "Job", "Reply"]

logger = logging.getLogger(__name__)

#: submit_many sends this many jobs, or this many bytes, in one round trip.
_SEND_AT_ONCE: Final = 128
_SEND_AT_ONCE_BYTES: Final = 4 * 1024 * 1024

#: How often results are looked for that nobody tells us of.
_LOOK_FIRST_S: Final = 0.005
_LOOK_LAST_S: Final = 0.05


class Job:
    """A job that was sent. ``await`` it, or ask for its ``reply()``."""

    def __init__(self, job_id: str, client: Client) -> None:
        self.id = job_id
        #: When it was made, in monotonic time.
        self.awaited_since_s = time.monotonic()
        self._client = client
        self._outcome: Outcome | None = None
        self._on_done: list[Callable[[Job], object]] = []

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {'done' if self.done else 'waiting'})"

    @property
    def done(self) -> bool:
        """Whether the reply, or the error, is here."""
        return self._outcome is not None

    def reply(self, timeout_s: float | None = None) -> Reply:
        """Wait for the reply; raises the error the job ended with, or JobTimeout."""
        if self._outcome is None:
            arrived = threading.Event()
            self.when_done(lambda _: arrived.set())
            if not arrived.wait(timeout_s):
                raise JobTimeout(
                    f"Job {self.id} has no reply after {timeout_s} s. It is still queued or "
                    "running: ask again, or cancel() it."
                )
        return self._result()

    def cancel(self) -> None:
        """Ask that the job is not started; see ``Client.cancel``."""
        self._client.cancel(self.id)

    def __await__(self) -> Generator[Any, None, Reply]:
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def tell(_: Job) -> None:
                # The loop may be closed by now, and then nobody waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, arrived)

            self.when_done(tell)
            yield from arrived
        return self._result()

    def when_done(self, call: Callable[[Job], object]) -> None:
        """Call ``call(job)`` when the outcome is here: now, or later in the inbox's thread.

        What it raises later is logged.
        """
        with self._client.lock:
            if self._outcome is None:
                self._on_done.append(call)
                return
        call(self)

    def settle(self, meta: dict[str, Any] | BaseException) -> None:
        """Take the decoded result, or why there is none. The first outcome stays."""
        outcome = outcome_of(meta) if isinstance(meta, dict) else meta
        with self._client.lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            calls, self._on_done = self._on_done, []
        for call in calls:
            try:
                call(self)
            except BaseException:  # All other jobs wait for this thread.
                logger.exception("job.callback_failed", extra={"job_id": self.id})

    def _result(self) -> Reply:
        if isinstance(self._outcome, Reply):
            return self._outcome
        assert self._outcome is not None
        # The same error may be raised many times; it must not drag all tracebacks along.
        raise self._outcome.with_traceback(None)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Client:
    """Sends jobs and receives their replies; threads may share one."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.id = uuid.uuid4().hex
        app = make_app(settings)
        self._settings = app.settings
        self._infer = register(app)
        self._inbox = Inbox(app, self.id)
        weakref.finalize(self, self._inbox.stop)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lock(self) -> threading.Lock:
        """Guards the outcomes of this client's jobs."""
        return self._inbox.lock

    def close(self) -> None:
        """Stop receiving. Jobs without a reply get none any more."""
        self._inbox.stop()
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
        (job,) = self._submit(
            model, [inputs], priority=priority, expires_s=expires_s, job_id=job_id
        )
        return job

    def submit_many(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        *,
        priority: str = Priority.NORMAL,
        expires_s: float | None = None,
    ) -> list[Job]:
        """Send a job for each of ``many`` inputs, many in one round trip."""
        return self._submit(model, many, priority=priority, expires_s=expires_s, job_id=None)

    async def infer(
        self, model: str, inputs: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> Reply:
        """Send one job and await its reply, without blocking the event loop."""
        job = await asyncio.to_thread(self.submit, model, inputs)
        try:
            async with asyncio.timeout(timeout_s):
                return await job
        except TimeoutError as error:
            if isinstance(error, JobTimeout):
                raise
            raise JobTimeout(f"Job {job.id} has no reply after {timeout_s} s.") from None

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

        Raises JobTimeout when some are missing after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        done: queue.SimpleQueue[Job] = queue.SimpleQueue()
        strangers: dict[str, AsyncResult | str] = {}
        waiting = 0
        for job in jobs:
            if isinstance(job, Job):
                job.when_done(done.put)
                waiting += 1
            else:
                strangers[job if isinstance(job, str) else str(job.id)] = job
        look_s = _LOOK_FIRST_S
        fences_at = time.monotonic() + FENCE_AFTER_S
        while True:
            # Before the look: what arrives by the deadline is never missed.
            now = time.monotonic()
            late = deadline is not None and now >= deadline
            at_fences = now >= fences_at
            if at_fences:
                fences_at = now + FENCE_AFTER_S
            found = self._look(strangers, at_fences=at_fences)
            yield from found
            if not waiting and not strangers:
                return
            look_s = _LOOK_FIRST_S if found else min(_LOOK_LAST_S, look_s * 1.5)
            step_s = _step_s(deadline, look_s if strangers else None)
            for job in _taken(done, step_s, wait=bool(waiting)):
                waiting -= 1
                found.append(job)
                yield job
            if late and not found:
                missing = waiting + len(strangers)
                raise JobTimeout(f"{missing} jobs have no reply after {timeout_s} s.")

    def _look(self, strangers: dict[str, Any], *, at_fences: bool) -> list[Job]:
        """Read results that nobody tells us of; take those that are there out of ``strangers``."""
        found: list[Job] = []
        read: list[str] = []
        overdue = frozenset(strangers) if at_fences else frozenset()
        for job_id, meta, stored in self._inbox.results.read(strangers, overdue=overdue):
            job = Job(job_id, self)
            original = strangers[job_id]
            if isinstance(original, AsyncResult):
                if isinstance(meta, dict):
                    # Its own get() is answered from here; the key stays, as always with get().
                    original._maybe_set_cache(meta)
            elif stored:
                read.append(job_id)
            job.settle(meta)
            found.append(job)
        for job in found:
            del strangers[job.id]
        if read:
            self._inbox.results.forget(read)
        return found

    def _submit(
        self,
        model: str,
        many: Iterable[Mapping[str, Any]],
        *,
        priority: str,
        expires_s: float | None,
        job_id: str | None,
    ) -> list[Job]:
        named, number = priority_and_number(priority)
        jobs: list[Job] = []
        commands: list[list[Any]] = []
        size_bytes = 0
        for inputs in many:
            call = parse_call((model, inputs), {})
            if not jobs:
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
            jobs.append(job)
            commands.append(command)
            size_bytes += len(command[-1])
            if len(commands) >= _SEND_AT_ONCE or size_bytes >= _SEND_AT_ONCE_BYTES:
                self._send(jobs[-len(commands) :], commands)
                commands, size_bytes = [], 0
        if commands:
            self._send(jobs[-len(commands) :], commands)
        return jobs

    def _awaited(self, job_id: str | None) -> Job | None:
        """Return the job of this id that was sent before and still waits."""
        job = self._inbox.awaited(job_id) if job_id else None
        return job if isinstance(job, Job) else None

    def _send(self, jobs: list[Job], commands: list[list[Any]]) -> None:
        self._inbox.expect(jobs)
        self._infer.publisher.send(*commands)


def _step_s(deadline: float | None, step_s: float | None) -> float | None:
    """Return how long to wait: ``step_s``, but not beyond ``deadline``."""
    if deadline is None:
        return step_s
    left_s = max(0.0, deadline - time.monotonic())
    return left_s if step_s is None else min(step_s, left_s)


def _taken(done: queue.SimpleQueue[Job], step_s: float | None, *, wait: bool) -> Iterator[Job]:
    """Yield what is in ``done``; when that is nothing, wait for up to ``step_s``."""
    try:
        if wait:
            yield done.get(timeout=step_s)
        elif step_s:
            time.sleep(step_s)
        while True:
            yield done.get_nowait()
    except queue.Empty:
        return
