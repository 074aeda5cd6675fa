"""The names under which Redis knows the instance processes that hold claims.

A name says which process it is and whose, so that a worker beside them sees when both are dead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import redis

from producer.contract.names import GROUP, Keys
from workers.instances import lives


def holder_name(*, node: str, slot: int, number: int, pid: int) -> str:
    """Return a name for the child ``pid`` that no other process ever had or will have."""
    parent = os.getpid()
    which = f"{parent}.{number}.{time.time_ns() // 1_000_000}"
    return f"{node}/{slot}/{which}+{lives.life_of(parent)}+{lives.life_of(pid)}"


def is_dead(name: str) -> bool:
    """Return whether it is certain that a process is dead, and its parent, which would say so."""
    _, *both = name.rpartition("/")[2].split("+")
    return len(both) == 2 and all(map(lives.is_over, both))


def holders(client: redis.Redis, keys: Keys, queues: Iterable[str]) -> set[str]:
    """Return the names of all that hold claims on ``queues``, or did."""
    pipe = client.pipeline(transaction=False)
    for queue in queues:
        for stream in keys.streams(queue):
            pipe.xinfo_consumers(stream, GROUP)
    return {about["name"].decode() for answer in pipe.execute() for about in answer}
