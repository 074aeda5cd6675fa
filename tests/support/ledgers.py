"""Jobs, claims, starts and outcomes of one queue, by the scripts alone: no process is there."""

from __future__ import annotations

from typing import Any

import redis

from producer.contract.names import Keys, Priority
from workers.delivery.ledger import (
    Claimed,
    End,
    Ending,
    Entry,
    Ledger,
    Verdict,
    Wish,
)
from workers.delivery.scripts import send

KEYS = Keys()
QUEUE = "fleet.m"
#: When a call that is meant however late it is read is read too late.
NEVER = 4e9


def ledger(consumer: str) -> Ledger:
    return Ledger(keys=KEYS, consumer=consumer, result_ttl_s=60, max_attempts=3)


def add(
    broker: redis.Redis,
    job: str | None,
    *,
    rows: int = 1,
    priority: Priority = Priority.NORMAL,
    body: bytes = b"body",
) -> str:
    fields: Any = {"rows": rows, "env": b"env", "body": body}
    if job is not None:
        fields["id"] = job
    added: Any = broker.xadd(KEYS.stream(QUEUE, priority), fields)
    return str(added.decode())


def claim(
    broker: redis.Redis, who: Ledger, *, rows: int = 32, size: int = 1 << 20
) -> Claimed | None:
    wish = Wish(queue=QUEUE, max_rows=rows, max_bytes=size, max_entries=rows)
    return send(broker, who.claim([wish]))[0]  # type: ignore[no-any-return]


def ids(claimed: Claimed | None) -> list[str | None]:
    return [entry.job_id for entry in claimed.entries] if claimed else []


def begin(broker: redis.Redis, who: Ledger, claimed: Claimed) -> list[tuple[Verdict, int]]:
    jobs = [(entry, entry.job_id or "", ()) for entry in claimed.entries]
    return send(broker, who.begin(QUEUE, jobs))[0]  # type: ignore[no-any-return]


def complete(
    broker: redis.Redis, who: Ledger, entries: tuple[Entry, ...], payload: bytes = b"done"
) -> list[Ending]:
    ends = [End(entry=entry, job_id=entry.job_id or "", payload=payload) for entry in entries]
    return send(broker, who.complete(QUEUE, ends))[0]  # type: ignore[no-any-return]


def left(broker: redis.Redis) -> int:
    return sum(broker.xlen(stream) for stream in KEYS.streams(QUEUE))
