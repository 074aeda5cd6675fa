"""What an instance tells its parent, once a second and at every change of state: one JSON line
each.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from workers.batching.closing import Closed

#: Seconds between two lines without news.
_EVERY_S: Final = 1.0

#: A batch that reached its limit is told of so soon after it.
_SOON_S: Final = 0.05


class State(enum.StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    LOADING = "loading"
    #: With a text where it serves some models, and tries again to load another.
    READY = "ready"
    #: No model of it can be loaded; it tries again.
    BROKEN = "broken"
    DRAINING = "draining"


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Totals of one model in one process, from its start."""

    jobs: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Runs of the engine that were answered, and the rows in them.
    batches: int = 0
    rows: int = 0
    #: Runs that ran out of memory.
    out_of_memory: int = 0
    #: Runs in a lower precision with answers that were not finite.
    non_finite: int = 0
    #: Engines that were opened anew because memory broke them.
    reopened: int = 0
    #: Time from a claim to the end of its batch, everything but waiting for work.
    busy_s: float = 0.0
    #: Claims by the reason that closed them.
    closed: dict[str, int] = dataclasses.field(
        default_factory=lambda: {str(reason): 0 for reason in Closed}
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class Lap:
    """A batch that runs: how long it has, and how long it may. Its clock can stand still."""

    #: The stream and entry id of each of its jobs.
    places: tuple[str, ...]
    model: str
    limit_s: float
    #: Monotonic clock; moved by as long as the lap's own stood still.
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    stands_since_s: float | None = None

    def stop(self) -> None:
        """Count no time until `go`: the batch waits for another."""
        self.stands_since_s = time.monotonic()

    def go(self) -> None:
        if self.stands_since_s is not None:
            self.began_s += time.monotonic() - self.stands_since_s
            self.stands_since_s = None

    def ran_s(self, now_s: float) -> float:
        return (self.stands_since_s or now_s) - self.began_s

    def left_s(self, now_s: float) -> float:
        """Return how long it may still run; less than nothing where it is over its limit."""
        return self.limit_s - self.ran_s(now_s)


class Status:
    """The instance's own state, written by its main thread and read by the reporting one."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.text = ""
        self.loads = 0
        self.counters: dict[str, Counters] = collections.defaultdict(Counters)
        self.models: dict[str, Mapping[str, Any]] = {}
        #: Last sign of life of the claim loop; a parent kills an instance that is silent too long.
        self.tick_s = time.monotonic()
        #: The batches that run: one in the engine, and those whose replies are made.
        self._laps: tuple[Lap, ...] = ()
        self.since_s = time.monotonic()
        #: Called after a change of state; the reporter sets it.
        self.on_change: Callable[[], None] = lambda: None

    def tick(self) -> None:
        self.tick_s = time.monotonic()

    def batch_begins(self, places: Sequence[str], *, model: str, limit_s: float) -> Lap:
        """Note that jobs run; ``places``: the stream and entry id of each."""
        lap = Lap(places=tuple(places), model=model, limit_s=limit_s)
        self._laps = (*self._laps, lap)
        return lap

    def batch_ends(self, lap: Lap) -> None:
        self._laps = tuple(each for each in self._laps if each is not lap)

    def next_line_s(self) -> float:
        """Return when the parent should hear of us again: sooner where a batch nears its limit."""
        now_s = time.monotonic()
        lap = self._nearest(now_s)
        if lap is None:
            return _EVERY_S
        left_s = lap.left_s(now_s)
        return left_s + _SOON_S if 0 < left_s + _SOON_S < _EVERY_S else _EVERY_S

    def _nearest(self, now_s: float) -> Lap | None:
        """Return the batch that is nearest to its limit, of those whose clock does not stand."""
        going = [lap for lap in self._laps if lap.stands_since_s is None]
        return min(going, key=lambda lap: lap.left_s(now_s), default=None)

    def become(self, state: State, text: str = "") -> None:
        changed = state is not self.state
        if changed:
            self.since_s = time.monotonic()
        self.state, self.text = state, text
        self.tick()
        if changed:
            self.on_change()

    def line(self) -> bytes:
        """Return the status as one line; ages instead of times, for clocks of two processes
        differ.
        """
        now_s = time.monotonic()
        lap = self._nearest(now_s)
        report = {
            "state": self.state,
            "text": self.text,
            "for_s": round(now_s - self.since_s, 1),
            "loads": self.loads,
            # Jobs begun and not ended.
            "running": sum(len(each.places) for each in self._laps),
            "silent_s": round(now_s - self.tick_s, 2),
            # Of the batch that is nearest to its limit, where several run.
            "batch_s": round(lap.ran_s(now_s), 2) if lap else 0.0,
            "batch_limit_s": lap.limit_s if lap else 0.0,
            "batch_model": lap.model if lap else "",
            # The stream and entry id of a job that has no batch-mates.
            "alone": lap.places[0] if lap and len(lap.places) == 1 else "",
            "models": dict(self.models),
            "counters": {
                name: dataclasses.asdict(counters)
                for name, counters in self.counters.copy().items()
            },
        }
        return json.dumps(report).encode() + b"\n"


class Reporter(threading.Thread):
    """Sends the status to the parent through ``report_fd`` until the process ends."""

    def __init__(self, status: Status, report_fd: int) -> None:
        super().__init__(name="reporter", daemon=True)
        self._status, self._report_fd = status, report_fd
        self._writing = threading.Lock()
        # At once, and before the loop goes on: the parent must know that an instance was ready
        # before the first job can kill it.
        status.on_change = self.send

    def run(self) -> None:
        while True:
            self.send()
            slept_s = time.monotonic()
            time.sleep(self._status.next_line_s())
            if time.monotonic() - slept_s > 2 * _EVERY_S:
                # The whole process stood still: that is no silence of its loop.
                self._status.tick()

    def send(self) -> None:
        """Write one line; blocks only while the parent does not read."""
        with self._writing:
            line = self._status.line()
            while line:
                line = line[os.write(self._report_fd, line) :]
