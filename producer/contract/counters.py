"""Adding up counters: instances to a worker, workers to a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def add_counters(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two counters; nested ones, such as close reasons, are summed key by
    key.
    """
    total = dict(left)
    for name, value in right.items():
        if isinstance(value, Mapping):
            total[name] = add_counters(total.get(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
    return total
