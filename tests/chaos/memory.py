"""Memory of the processes under test over time, and whether it is flat."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import redis

from tests.chaos.fleet import Fleet
from tests.chaos.processes import memory_bytes

SERVER_PROCESS: Final = "Redis, process"

_SAMPLE_EVERY_S: Final = 10.0
_MINUTE_S: Final = 60.0
_MB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The memory of one process at one moment."""

    kind: str
    pid: int
    #: Since the process was first seen.
    age_s: float
    nbytes: int


class Sampler(threading.Thread):
    """Looks at parents, instances and the server now and then."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(name="memory", daemon=True)
        self.samples: list[Sample] = []
        self._fleet = fleet
        self._born_s: dict[int, float] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join(timeout=10)

    def run(self) -> None:
        while not self._stopping.wait(_SAMPLE_EVERY_S):
            parents = self._fleet.parents_of_instances()
            for pid in parents:
                self._note("instance", pid, memory_bytes(pid))
            for pid in set(parents.values()):
                self._note("parent", pid, memory_bytes(pid))
            self._note_server()

    def _note_server(self) -> None:
        try:
            with self._fleet.server.client() as client:
                info: Any = client.info("memory")
        except redis.RedisError:
            return
        # Its data outlive the process; what the process itself takes does not.
        self._note("Redis, data", 0, int(info["used_memory"]))
        self._note(SERVER_PROCESS, self._fleet.server.pid or 0, int(info["used_memory_rss"]))

    def _note(self, kind: str, pid: int, nbytes: int | None) -> None:
        now_s = time.monotonic()
        born_s = self._born_s.setdefault(pid, now_s)
        if nbytes is not None:
            self.samples.append(Sample(kind=kind, pid=pid, age_s=now_s - born_s, nbytes=nbytes))


def latest_mb(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the memory of each kind at the end, the largest of its processes, in MB."""
    last = {(sample.kind, sample.pid): sample for sample in samples[-20:]}
    largest: dict[str, float] = {}
    for sample in last.values():
        largest[sample.kind] = max(largest.get(sample.kind, 0.0), sample.nbytes / _MB)
    return largest


def slopes_mb(samples: Iterable[Sample], *, from_age_s: float) -> dict[str, float]:
    """Return for each kind how memory grows, in MB in ten minutes, from that age of a process on.

    The least of every minute counts: a burst of work is no growth. Processes of a kind are compared
    by age, each with itself.
    """
    least: dict[tuple[str, int], dict[int, int]] = collections.defaultdict(dict)
    for sample in samples:
        if sample.age_s >= from_age_s:
            minutes = least[sample.kind, sample.pid]
            minute = int(sample.age_s // _MINUTE_S)
            minutes[minute] = min(minutes.get(minute, sample.nbytes), sample.nbytes)
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for (kind, _), minutes in least.items():
        covariance, variance = _moments(minutes)
        sums[kind][0] += covariance
        sums[kind][1] += variance
    return {kind: 10 * up / across / _MB for kind, (up, across) in sums.items() if across}


def _moments(points: Mapping[int, int]) -> tuple[float, float]:
    """Return the sums of which the slope through ``points`` is the quotient."""
    middle = sum(points) / len(points)
    mean = sum(points.values()) / len(points)
    covariance = sum((x - middle) * (y - mean) for x, y in points.items())
    return covariance, sum((x - middle) ** 2 for x in points)
