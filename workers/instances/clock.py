"""The clock that leases are measured by on this side: it also runs while the machine sleeps.

The same for all processes of a host, so a parent may tell a time of it to an instance.
"""

from __future__ import annotations

import time


def now_s() -> float:
    """Return the seconds since the machine started, its sleep among them where it counts that."""
    # macOS has no such clock, and its other one does the same.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
