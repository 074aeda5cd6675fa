"""When a batch takes no more jobs, and why: a pure decision, counted as a metric."""

from __future__ import annotations

import dataclasses
import enum


class Closed(enum.StrEnum):
    """Why a batch was run as it was."""

    #: It holds as many rows as one run may.
    FULL = "full"
    #: The queue was empty, and the model does not wait for more.
    EMPTY = "empty"
    #: Its oldest job has waited as long as the model lets it.
    DELAY = "delay"
    #: It holds as many bytes as one run may.
    BYTES = "bytes"
    #: Its job must run alone.
    ALONE = "alone"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What closes a model's batches."""

    max_rows: int
    max_bytes: int
    max_queue_delay_s: float


def why_closed(
    limits: Limits, *, rows: int, nbytes: int, waiting: int, oldest_age_s: float, alone: bool
) -> Closed | None:
    """Return why the batch must run now, or ``None`` to claim more for it.

    ``waiting`` counts the jobs that could still be claimed: with some left, more are claimed
    however old the batch is, since they cost no waiting.
    """
    if rows <= 0:
        return None
    for reason, holds in (
        (Closed.ALONE, alone),
        (Closed.FULL, rows >= limits.max_rows),
        (Closed.BYTES, nbytes >= limits.max_bytes),
    ):
        if holds:
            return reason
    if waiting > 0:
        return None
    if limits.max_queue_delay_s <= 0:
        return Closed.EMPTY
    return Closed.DELAY if oldest_age_s >= limits.max_queue_delay_s else None
