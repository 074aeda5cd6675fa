"""A steady load for many minutes, with a fault now and then, and an eye on memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from tests.chaos.faults import EACH, drawn
from tests.chaos.fleet import Fleet
from tests.chaos.memory import SERVER_PROCESS, Sampler, latest_mb, slopes_mb
from tests.chaos.table import Minute, Report, Round
from tests.chaos.trial import Trial

_CALIBRATE_S: Final = 8.0
_CALIBRATE_WITH: Final = 20_000
_SEND_EVERY_S: Final = 0.5

#: What a process takes while it warms up is no growth.
_FLAT_AFTER_S: Final = 180.0
#: In ten minutes, for any kind of process.
MOST_GROWTH_MB: Final = 1.0


class Soak:
    """One long run over one fleet."""

    def __init__(self, trial: Trial, *, minutes: float, fault_every_s: float, load: float) -> None:
        self._trial, self._load = trial, load
        self._every_s = fault_every_s
        self._faults = drawn(EACH, int(minutes * 60 / fault_every_s), trial.chance)

    def run(self, tell: Callable[[str], object]) -> Report:
        """Let the load go on and faults strike, judge, and return what was measured."""
        full_rate = self._calibrate()
        tell(f"full rate {full_rate:.0f} jobs/s; {self._load:.0%} of it from now on")
        fleet, began_s = self._trial.fleet, time.monotonic()
        with Sampler(fleet) as sampler, Feeder(fleet, full_rate * self._load):
            for number, fault in enumerate(self._faults, 1):
                self._idle_until(began_s + (number - 0.5) * self._every_s)
                each = self._trial.strike(fault, fleet.numbers(1))
                self._trial.judge.check(f"fault {number}")
                self._idle_until(began_s + number * self._every_s)
                minute = self._minute(time.monotonic() - began_s, each, sampler)
                self._trial.report.minutes.append(minute)
                tell(minute.line())
                if self._trial.judge.in_vain:
                    break
        self._judge_memory(sampler)
        return self._trial.end()

    def _minute(self, at_s: float, each: Round, sampler: Sampler) -> Minute:
        return Minute(
            minute=at_s / 60,
            fault=each.fault,
            recovery_s=each.recovery_s,
            jobs_per_s=self._rate(),
            memory_mb=latest_mb(sampler.samples),
        )

    def _judge_memory(self, sampler: Sampler) -> None:
        growth = slopes_mb(sampler.samples, from_age_s=_FLAT_AFTER_S)
        self._trial.report.samples, self._trial.report.growth_mb = sampler.samples, growth
        for kind, grown_mb in growth.items():
            # What an allocator keeps after a peak is the server's own affair; its data are ours.
            if grown_mb > MOST_GROWTH_MB and kind != SERVER_PROCESS:
                self._trial.judge.broken(f"{kind}: {grown_mb:.2f} MB more in ten minutes")

    def _calibrate(self) -> float:
        """Return how many jobs the whole fleet starts in a second when there are always more."""
        judge, account, fleet = self._trial.judge, self._trial.account, self._trial.fleet
        fleet.send(_CALIBRATE_WITH)
        judge.wait(lambda: len(account.starts) > 100, what="the first jobs")
        before, began_s = len(account.starts), time.monotonic()
        while time.monotonic() < began_s + _CALIBRATE_S and fleet.unfinished() > 100:
            time.sleep(0.1)
        judge.look()
        rate = (len(account.starts) - before) / (time.monotonic() - began_s)
        judge.wait(lambda: not account.missing() and not fleet.unfinished(), what="all jobs")
        return rate

    def _idle_until(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            self._trial.judge.look()
            time.sleep(0.25)

    def _rate(self) -> float:
        """Return how many jobs were started in a second, in the last half minute."""
        since_unix_s = time.time() - 30
        starts = self._trial.account.starts.values()
        recent = sum(start.at_unix_s > since_unix_s for each in starts for start in each)
        return recent / 30


class Feeder(threading.Thread):
    """Has the clients send so many jobs a second."""

    def __init__(self, fleet: Fleet, jobs_per_s: float) -> None:
        super().__init__(name="feeder", daemon=True)
        self._fleet, self._jobs_per_s = fleet, jobs_per_s
        self._stopping = threading.Event()

    def __enter__(self) -> Feeder:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join(timeout=10)

    def run(self) -> None:
        sent, began_s = 0, time.monotonic()
        while not self._stopping.wait(_SEND_EVERY_S):
            due = int((time.monotonic() - began_s) * self._jobs_per_s) - sent
            if due > 0:
                self._fleet.send(due)
                sent += due
