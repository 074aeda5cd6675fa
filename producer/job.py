"""``Job``: one job that was sent, and how its sender learns what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from producer.contract.errors import JobTimeout
from producer.contract.patience import Patience
from producer.replies import Outcome, Reply, outcome_of

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Who sent a job, and receives its reply."""

    @property
    def reply_timeout_s(self) -> float:
        """How long a reply is waited for where the caller does not say."""
        ...

    def cancel(self, job_id: str) -> None: ...

    def standing(self) -> Future[str]:
        """What keeps jobs waiting, as workers say."""
        ...


class Job:
    """A job that was sent. ``await`` it, or ask for its ``reply()``."""

    def __init__(self, job_id: str, sender: Sender) -> None:
        self.id = job_id
        #: When it was made, in monotonic time.
        self.awaited_since_s = time.monotonic()
        self.sender = sender
        #: Why its reply, which is there, cannot be read at the moment.
        self.trouble: BaseException | None = None
        #: What workers said of themselves when the last wait was over.
        self._standing = ""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._on_done: list[Callable[[Job], object]] = []

    def __repr__(self) -> str:
        return f"Job({self.id!r}, {'done' if self.done else 'waiting'})"

    @property
    def done(self) -> bool:
        """Whether the reply, or the error, is here."""
        return self._outcome is not None

    def reply(self, timeout_s: float | None = None) -> Reply:
        """Wait for the reply; raises the error the job ended with, or JobTimeout.

        Without ``timeout_s`` it waits for FLEET_REPLY_TIMEOUT_S; ``math.inf`` waits for ever.
        """
        patience = self._patience(timeout_s)
        if self._outcome is None:
            arrived = threading.Event()
            with self._telling(lambda _: arrived.set()):
                arrived.wait(min(patience.left_s, threading.TIMEOUT_MAX))
        self._standing = ""
        if self._is_unexplained(patience):
            self._standing = self.sender.standing().result()
        return self._result(patience)

    async def reply_within(self, patience: Patience) -> Reply:
        """As `reply`, without blocking the event loop."""
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()

            def tell(_: Job) -> None:
                # The loop may be closed by now, and then nobody waits.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_wake, arrived)

            with self._telling(tell), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience.left_s):
                    await arrived
        self._standing = ""
        if self._is_unexplained(patience):
            self._standing = await asyncio.wrap_future(self.sender.standing())
        return self._result(patience)

    def __await__(self) -> Generator[Any, None, Reply]:
        return self.reply_within(self._patience(None)).__await__()

    def cancel(self) -> None:
        """Ask that the job is not started; see ``Client.cancel``."""
        self.sender.cancel(self.id)

    def when_done(self, call: Callable[[Job], object]) -> None:
        """Call ``call(job)`` when the outcome is here: now, or later in the inbox's thread.

        What it raises later is logged.
        """
        if self._pid != os.getpid():
            # Of the parent's, which may have been locked when it forked.
            self._pid, self._lock = os.getpid(), threading.Lock()
            self.settle(_of_another_process(self))
        with self._lock:
            if self._outcome is None:
                self._on_done.append(call)
                return
        call(self)

    def no_longer(self, call: Callable[[Job], object]) -> None:
        """Take back one `when_done` of ``call``."""
        with self._lock, contextlib.suppress(ValueError):
            self._on_done.remove(call)

    @property
    def why_it_waits(self) -> str:
        """What is known of why there is no reply, in a sentence."""
        return str(
            self.trouble
            or f"{self._standing}It waits, runs, or is lost with a Redis that was emptied: "
            "`fleet queue` says what waits."
        )

    def hold_up(self, trouble: BaseException) -> None:
        """Note why the reply cannot be read yet: whoever waits in vain is told."""
        self.trouble = trouble

    def settle(self, meta: dict[str, Any] | BaseException) -> None:
        """Take the decoded result, or why there is none. The first outcome stays."""
        outcome = outcome_of(meta) if isinstance(meta, dict) else meta
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            calls, self._on_done = self._on_done, []
        for call in calls:
            try:
                call(self)
            except BaseException:  # All other jobs wait for this thread.
                logger.exception("job.callback_failed", extra={"job_id": self.id})

    @contextlib.contextmanager
    def _telling(self, call: Callable[[Job], object]) -> Iterator[None]:
        """Have ``call`` called if the outcome comes within the block; nothing of it is left."""
        self.when_done(call)
        try:
            yield
        finally:
            self.no_longer(call)

    def _patience(self, timeout_s: float | None) -> Patience:
        return Patience(timeout_s, self.sender.reply_timeout_s)

    def _is_unexplained(self, patience: Patience) -> bool:
        """Whether nothing is here, not even a reason, and somebody waited long for it."""
        return self._outcome is None and self.trouble is None and patience.was_long

    def _result(self, patience: Patience) -> Reply:
        if self._outcome is None:
            raise JobTimeout(
                f"Job {self.id} has no reply after {patience}. {self.why_it_waits} Ask again, "
                "cancel() it, or give it longer: timeout_s=math.inf waits for ever."
            )
        if isinstance(self._outcome, Reply):
            return self._outcome
        # The same error may be raised many times; it must not drag all tracebacks along.
        raise self._outcome.with_traceback(None)


def _of_another_process(job: Job) -> JobTimeout:
    return JobTimeout(
        f"Job {job.id} was sent by the process that this one was forked from, and its reply goes "
        "there. Wait for it there, or send the job here."
    )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
