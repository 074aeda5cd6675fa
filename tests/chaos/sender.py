"""A client process of the storm: sends jobs as it is told, and notes what it was promised and got.

Run as ``python -m tests.chaos.sender FOLDER NAME``. A line on standard input, ``FIRST COUNT``,
says how many jobs to send, numbered from FIRST. Each way an app has of sending a job is used. Three
files say what happened; a line is written by one system call, so a kill leaves whole lines only:

- ``NAME.accepted``: ``number id`` of a job, after the call that sent it has returned;
- ``NAME.outcomes``: ``id answer``, after its answer was read;
- ``NAME.troubles``: what else a call raised. It is tried again, as an app would.
"""

from __future__ import annotations

import os
import queue
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from celery import exceptions
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from producer.client import Client, Job
from producer.contract.errors import FleetError, Overloaded
from producer.tasks import infer
from tests.support.engines import Do, row

MODEL: Final = "scripted"

#: Of the numbers given to a sender, what each job may use up in tries.
NUMBERS_A_JOB: Final = 4

_CHUNK: Final = 50
_AGAIN_S: Final = 0.25


def inputs_of(number: int) -> dict[str, Any]:
    """Return the inputs of the job with this number."""
    return {"x": row(Do.OK, number % 997, number)}


def text_of(outputs: Any) -> str:
    """Return an answer as one word."""
    return "/".join(f"{value:.0f}" for value in np.ravel(outputs["y"]))


def answer_of(number: int) -> str:
    """Return the one right answer to the job with this number, as one word."""
    return text_of({"y": 2 * inputs_of(number)["x"]})


class Sender:
    """Sends and reads for as long as its process lives."""

    def __init__(self, folder: Path, name: str) -> None:
        self._files = {
            kind: os.open(folder / f"{name}.{kind}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            for kind in ("accepted", "outcomes", "troubles")
        }
        self._chance = random.Random(name)
        self._client = Client()
        #: A job that nobody holds gets no reply.
        self._waiting: dict[str, Job] = {}
        self._results: queue.SimpleQueue[AsyncResult] = queue.SimpleQueue()
        threading.Thread(target=self._get, name="get", daemon=True).start()

    def send(self, first: int, count: int) -> None:
        """Send ``count`` jobs; a call that fails is made again, with new jobs."""
        numbers = iter(range(first, first + NUMBERS_A_JOB * count))
        left = count
        while left > 0:
            chunk = [n for n, _ in zip(numbers, range(min(left, _CHUNK)), strict=False)]
            if not chunk:
                return
            way = self._chance.choices((self._many, self._one_by_one, self._delay), (8, 1, 1))[0]
            left -= way(chunk)

    def _many(self, numbers: list[int]) -> int:
        # When this fails it is unknown which were taken, under ids that nobody was told.
        jobs = self._tried(
            lambda: self._client.submit_many(MODEL, (inputs_of(number) for number in numbers))
        )
        for number, job in zip(numbers, jobs or (), strict=False):
            self._accepted(number, job)
        return len(jobs or ())

    def _one_by_one(self, numbers: list[int]) -> int:
        for number in numbers:
            job = None
            while job is None:
                # The same id again: it runs once, however often it was taken.
                job = self._tried(
                    lambda: self._client.submit(
                        MODEL,
                        inputs_of(number),  # noqa: B023  called at once
                        job_id=f"own-{number}",  # noqa: B023
                    )
                )
            self._accepted(number, job)
        return len(numbers)

    def _delay(self, numbers: list[int]) -> int:
        accepted = 0
        for number in numbers:
            result = self._tried(lambda: infer.delay(MODEL, inputs_of(number)))  # noqa: B023
            if result is not None:
                self._note("accepted", f"{number} {result.id}")
                self._results.put(result)
                accepted += 1
        return accepted

    def _tried(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Overloaded, OperationalError) as error:
            self._trouble("send", error)
            time.sleep(_AGAIN_S)
            return None

    def _accepted(self, number: int, job: Job) -> None:
        self._note("accepted", f"{number} {job.id}")
        self._waiting[job.id] = job
        job.when_done(self._read)

    def _read(self, job: Job) -> None:
        try:
            text = text_of(job.reply(0).outputs)
        except Exception as error:  # noqa: BLE001  whatever it ended with is its outcome
            text = _word(error)
        self._note("outcomes", f"{job.id} {text}")
        self._waiting.pop(job.id, None)

    def _get(self) -> None:
        """Read the results of `delay`, as an app does: one after the other."""
        while True:
            result = self._results.get()
            while (text := self._got(result)) is None:
                time.sleep(_AGAIN_S)
            self._note("outcomes", f"{result.id} {text}")

    def _got(self, result: AsyncResult) -> str | None:
        try:
            return text_of(result.get(timeout=5))
        except FleetError as error:
            return _word(error)
        except exceptions.TimeoutError:
            return None
        except Exception as error:  # noqa: BLE001  the result may come yet
            self._trouble("get", error)
            return None

    def _trouble(self, call: str, error: Exception) -> None:
        # Without its numbers, so that the same trouble is counted as one.
        text = re.sub(r"[0-9][0-9,]*", "N", str(error)[:80])
        self._note("troubles", f"{call} {_word(error)} {text!r}")

    def _note(self, kind: str, line: str) -> None:
        os.write(self._files[kind], f"{line}\n".encode())


def _word(error: BaseException) -> str:
    return str(getattr(error, "code", type(error).__name__))


def _orders(lines: Iterator[str]) -> Iterator[tuple[int, int]]:
    for line in lines:
        first, count = line.split()
        yield int(first), int(count)


if __name__ == "__main__":
    sender = Sender(Path(sys.argv[1]), sys.argv[2])
    for order in _orders(sys.stdin):
        sender.send(*order)
