"""Waiting for something to become true, in place of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    look: Callable[[], T | None], *, what: str, timeout_s: float = 20.0, every_s: float = 0.02
) -> T:
    """Return the first true value of ``look``; fail with ``what`` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}; last seen: {found!r}")
        time.sleep(every_s)
