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
    READY = "ready"
    #: A model of it cannot be loaded; it serves the others, if any, and tries again.
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
        #: When the running batch began, None between batches; and how long it may run.
        self._batch_began_s: float | None = None
        self._batch_limit_s = 0.0
        #: The stream and entry id of a job that runs alone.
        self._alone = ""
        self.since_s = time.monotonic()
        #: Jobs begun and not ended.
        self.running = 0
        #: Called after a change of state; the reporter sets it.
        self.on_change: Callable[[], None] = lambda: None

    def tick(self) -> None:
        self.tick_s = time.monotonic()

    def batch_begins(self, places: Sequence[str], *, limit_s: float) -> None:
        """Note that jobs run; ``places``: the stream and entry id of each."""
        self._alone = places[0] if len(places) == 1 else ""
        self._batch_limit_s, self.running = limit_s, len(places)
        self._batch_began_s = time.monotonic()

    def batch_ends(self) -> None:
        self._batch_began_s, self.running = None, 0

    def next_line_s(self) -> float:
        """Return when the parent should hear of us again: sooner where a batch nears its limit."""
        began_s = self._batch_began_s
        if began_s is None:
            return _EVERY_S
        left_s = began_s + self._batch_limit_s - time.monotonic()
        return left_s + _SOON_S if 0 < left_s + _SOON_S < _EVERY_S else _EVERY_S

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
        began_s = self._batch_began_s
        report = {
            "state": self.state,
            "text": self.text,
            "for_s": round(now_s - self.since_s, 1),
            "loads": self.loads,
            "running": self.running,
            "silent_s": round(now_s - self.tick_s, 2),
            "batch_s": round(now_s - began_s, 2) if began_s is not None else 0.0,
            "batch_limit_s": self._batch_limit_s,
            "alone": self._alone,
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
