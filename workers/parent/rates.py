"""How many jobs of each model a worker answers in a second, from the totals of its instances."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: The time a rate is taken over: instances report once a second, so less would be noise.
_WINDOW_S: Final = 10.0


class Rates:
    """Remembers the totals of the last seconds; one thread looks, every few seconds."""

    def __init__(self) -> None:
        self._looks: collections.deque[tuple[float, Mapping[str, int]]] = collections.deque()

    def look(self, instances: Sequence[Mapping[str, Any]], *, now_s: float) -> dict[str, float]:
        """Return the jobs answered a second by model, from the look that is a window ago to this.

        Empty at the first look. ``now_s`` is of the monotonic clock.
        """
        self._looks.append((now_s, _answered(instances)))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= _WINDOW_S:
            self._looks.popleft()
        (first_s, first), (last_s, last) = self._looks[0], self._looks[-1]
        if last_s <= first_s:
            return {}
        return {
            model: round((jobs - first.get(model, 0)) / (last_s - first_s), 2)
            for model, jobs in last.items()
        }


def _answered(instances: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the jobs of every model; a slot's totals outlive its processes, so they only grow."""
    jobs: collections.Counter[str] = collections.Counter()
    for instance in instances:
        for model, counters in instance["counters"].items():
            jobs[model] += int(counters.get("jobs", 0))
    return dict(jobs)
