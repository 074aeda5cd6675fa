"""How late an event loop comes to what is due, which is how long something else blocked it."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import Final

_LOOK_EVERY_S: Final = 0.002


@contextlib.asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """Return a list that fills with the seconds by which a short sleep of the loop was late."""
    late_s: list[float] = []

    async def watch() -> None:
        while True:
            due_s = time.monotonic() + _LOOK_EVERY_S
            await asyncio.sleep(_LOOK_EVERY_S)
            late_s.append(time.monotonic() - due_s)

    task = asyncio.create_task(watch())
    try:
        yield late_s
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def p99_s(late_s: list[float]) -> float:
    return statistics.quantiles(late_s, n=100)[-1]


def told(late_s: list[float]) -> str:
    """Describe what was seen, in milliseconds."""
    p50 = statistics.median(late_s)
    return (
        f"p50 {p50 * 1e3:.2f} ms, p99 {p99_s(late_s) * 1e3:.2f} ms, "
        f"most {max(late_s) * 1e3:.1f} ms of {len(late_s)}"
    )
