"""Where coroutines put jobs: a thread sends them, so that no event loop waits for Redis.

It sends all that wait in one round trip. So a slow Redis delays each by one or two of its answers,
however many there are, and the loop's own threads stay free for others.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from kombu.exceptions import OperationalError

from producer.contract.cancel import cancel_command
from producer.inbox import Inbox
from producer.job import Job
from producer.publisher import Publisher
from producer.sending import Packed, Sending, in_parts

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Outgoing:
    """A job that is to be sent, as long as somebody waits for it."""

    job: Job
    model: str
    inputs: Mapping[str, Any]
    #: Of the coroutine: what watches it there is to see the job as its.
    context: contextvars.Context = dataclasses.field(default_factory=contextvars.copy_context)
    #: Set by who waits; once it is off it stays off.
    wanted: bool = True
    #: Set by the thread: the job may be in Redis.
    sent: bool = False


class Outbox:
    """Sends the jobs of coroutines. The thread starts with the first of them."""

    def __init__(self, sending: Sending, inbox: Inbox, publisher: Publisher) -> None:
        self._sending, self._inbox, self._publisher = sending, inbox, publisher
        # Its put() may be called anywhere, also by a finalizer in the middle of another put().
        self._waiting: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, outgoing: Outgoing) -> None:
        """Have a job sent; its outcome is also that it could not be."""
        self._inbox.expect([outgoing.job])
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fleet-outbox", daemon=True)
                thread.start()
                self._thread = thread
        self._waiting.put(outgoing)

    def withdraw(self, outgoing: Outgoing) -> None:
        """Note that nobody can ask for the reply any more.

        A job that waits here is not sent. One that was sent is cancelled, and its result deleted
        when it comes.
        """
        outgoing.wanted = False
        self._inbox.dismiss(outgoing.job.id)
        if outgoing.sent:
            self._inbox.disown(outgoing.job.id)
        self._waiting.put(outgoing)

    def stop(self) -> None:
        """End the thread, once it has done what was asked before."""
        self._waiting.put(None)

    def _run(self) -> None:
        while self._turn():
            pass
        self._publisher.close()

    def _turn(self) -> bool:
        """Do all that is to be done, or wait for something; nothing is held afterwards."""
        taken = [self._waiting.get()]
        while taken[-1] is not None:
            try:
                taken.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        todo = [outgoing for outgoing in taken if outgoing is not None]
        # Withdrawn after they were sent: they come a second time.
        withdrawn = [each for each in todo if each.sent and not each.wanted]
        self._send([each for each in todo if not each.sent])
        if withdrawn:
            self._cancel([each.job.id for each in withdrawn])
        return len(todo) == len(taken)

    def _send(self, todo: list[Outgoing]) -> None:
        """Send jobs; an error is an outcome. When Redis is away, all that are left are told so."""
        told: set[str] = set()
        try:
            for part in in_parts(self._wanted(todo)):
                replies = self._sending.send(part)
                for packed, reply in zip(part, replies, strict=True):
                    told.add(packed.job.id)
                    if isinstance(reply, Exception):
                        packed.job.settle(reply)
        except BaseException as error:  # noqa: BLE001  it is told to whoever awaits the jobs
            for outgoing in todo:
                if outgoing.job.id not in told:
                    outgoing.job.settle(error)

    def _wanted(self, todo: list[Outgoing]) -> Iterator[Packed]:
        """Yield the jobs that are still wanted, packed."""
        for outgoing in todo:
            # In this order: whoever withdraws it now knows whether it has to be cancelled.
            outgoing.sent = True
            outgoing.sent = outgoing.wanted and not outgoing.job.done
            packed = self._packed(outgoing) if outgoing.sent else None
            if packed is not None:
                yield packed

    def _packed(self, outgoing: Outgoing) -> Packed | None:
        """Pack a job; None when it is at fault, which is its outcome."""
        try:
            self._sending.check(outgoing.model, outgoing.inputs)
            pack = self._sending.pack
            return outgoing.context.run(pack, outgoing.job, outgoing.model, outgoing.inputs)
        except OperationalError:
            raise
        except BaseException as error:  # noqa: BLE001  it is told to whoever awaits the job
            outgoing.job.settle(error)
            return None

    def _cancel(self, job_ids: list[str]) -> None:
        try:
            self._publisher.send(cancel_command(self._publisher.keys, job_ids))
        except Exception as error:  # noqa: BLE001  then the jobs run for nobody
            logger.info("outbox.not_cancelled", extra={"error": type(error).__name__})
