"""When a fleet is whole again: every instance has started jobs since, and a probe was answered."""

from __future__ import annotations

import contextlib
import time
from typing import Final

from kombu.exceptions import OperationalError

from producer.client import Client, Job
from producer.contract.errors import FleetError
from producer.contract.settings import Settings
from tests.chaos.account import Account
from tests.chaos.fleet import Fleet
from tests.chaos.sender import MODEL, inputs_of, text_of

#: The error of the measured times.
LOOK_EVERY_S: Final = 0.25


class Probes:
    """Jobs of the storm's own, beside those of the clients; they count like any other."""

    def __init__(self, fleet: Fleet, account: Account) -> None:
        self._fleet, self._account = fleet, account
        shape = fleet.shape
        self._client = Client(
            Settings(
                broker_url=fleet.server.url,
                result_ttl_s=shape.result_ttl_s,
                fence_ttl_s=shape.fence_ttl_s,
            )
        )
        self._waiting: dict[str, Job] = {}
        self._answered_unix_s = 0.0

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def whole(self, since_unix_s: float) -> bool:
        """Return whether the fleet is whole; send more of them when it is not."""
        pids = self._fleet.instance_pids()
        last = self._account.last_start_unix_s
        served = pids is not None and all(last.get(pid, 0.0) > since_unix_s for pid in pids)
        if served and self._answered_unix_s > since_unix_s:
            return True
        self._send(2 * self._fleet.shape.instances * len(self._fleet.workers))
        return False

    def _send(self, count: int) -> None:
        first = self._fleet.numbers(count)
        numbers = range(first, first + count)
        with contextlib.suppress(FleetError, OperationalError):
            sent_unix_s = time.time()
            jobs = self._client.submit_many(MODEL, [inputs_of(number) for number in numbers])
            for number, job in zip(numbers, jobs, strict=True):
                self._account.accept(job.id, number)
                self._waiting[job.id] = job
                job.when_done(lambda job: self._read(job, sent_unix_s))

    def _read(self, job: Job, sent_unix_s: float) -> None:
        try:
            text = text_of(job.reply(0).outputs)
            self._answered_unix_s = max(self._answered_unix_s, sent_unix_s)
        except Exception as error:  # noqa: BLE001  whatever it ended with is its outcome
            text = type(error).__name__
        self._account.answered(job.id, text)
        self._waiting.pop(job.id, None)
