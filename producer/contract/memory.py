"""How full a server is, from what INFO or a refusal says of its memory, and when it is too full for
new jobs.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import redis

from producer.contract.errors import Overloaded

#: What is asked; a user or a managed server may refuse it.
INFO_MEMORY: Final = ("INFO", "memory")

_FIELD: Final = re.compile(rb"^(maxmemory|used_memory|mem_not_counted_for_evict):(\d+)", re.M)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a server uses of what it may use."""

    #: As the server counts it when it looks whether it is full.
    used_bytes: int
    #: 0: as much as there is.
    max_bytes: int

    def is_above(self, watermark: float) -> bool:
        """Return whether more than this part of it is used."""
        return bool(self.max_bytes) and self.used_bytes > watermark * self.max_bytes


def read_memory(reply: Any) -> Memory | None:
    """Return what a reply to ``INFO memory`` says; None when it is an error or leaves it out."""
    fields = dict(_FIELD.findall(reply)) if isinstance(reply, bytes) else {}
    if b"maxmemory" not in fields or b"used_memory" not in fields:
        return None
    uncounted = int(fields.get(b"mem_not_counted_for_evict", 0))
    return Memory(
        used_bytes=int(fields[b"used_memory"]) - uncounted, max_bytes=int(fields[b"maxmemory"])
    )


def too_full(memory: Memory, watermark: float) -> Overloaded:
    """Return the error of a job that is not sent, so that workers keep room for answers."""
    return Overloaded(
        f"Redis uses {memory.used_bytes / memory.max_bytes:.0%} of its maxmemory "
        f"({memory.max_bytes:,} bytes) and takes no new jobs above {watermark:.0%} "
        "(FLEET_MEMORY_WATERMARK). Send again later, add workers, or give Redis more memory."
    )


def is_full(error: Exception) -> bool:
    """Return whether Redis refused a write because its memory is used up."""
    return isinstance(error, redis.ResponseError) and (
        type(error).__name__ == "OutOfMemoryError" or "OOM command not allowed" in str(error)
    )


def overloaded() -> Overloaded:
    """Return the error of a job that a full Redis did not take."""
    return Overloaded(
        "Redis is full (maxmemory) and takes no new jobs. Send again later, add workers, "
        "or give Redis more memory."
    )
