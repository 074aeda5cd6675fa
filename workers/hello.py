"""The first line a parent writes to its instance: who it is. Shared by both ends of the pipe."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the parent says first."""

    #: Celery's node name of the worker.
    node: str
    slot: int
    #: Redis knows this process, and no other ever, by this name.
    consumer: str
    models: list[str]
    #: Where status lines go.
    report_fd: int
    log_level: str
