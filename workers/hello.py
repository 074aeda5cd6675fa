"""The first line a parent writes to its instance: who it is. Shared by both ends of the pipe."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The parent's hold on the instance that the process lives on; the process renews it, too."""

    #: The instance's name in Redis.
    instance: str
    #: The host that the instance belongs to.
    host: str
    #: What the parent signs with.
    token: str
    ttl_s: float
    #: When the process may no longer begin to live on it, by `workers.instances.clock`.
    until_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What the parent says first."""

    #: Celery's node name of the worker.
    node: str
    slot: int
    #: Redis knows this process, and no other ever, by this name.
    consumer: str
    models: list[str]
    lease: Lease
    #: Where status lines go.
    report_fd: int
    log_level: str

    def line(self) -> bytes:
        """Return it as the one line that is written."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def read(cls, line: str) -> Hello:
        said = json.loads(line)
        return cls(**{**said, "lease": Lease(**said["lease"])})
