"""Dead letters: jobs that will not be tried again, read from where `bury.lua` put them.

A letter keeps the original entry; what is shown of it is its size, never what it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import redis

from producer.contract.errors import BadMessage
from producer.contract.message import from_fields
from producer.contract.names import Keys, model_of

_ORIGINAL: Final = b"original:"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Why one job will not be tried again."""

    #: Of the letter, not of the job: what commands name it by.
    letter_id: str
    queue: str
    #: Empty when the entry had no id that could be read.
    job_id: str
    code: str
    reason: str
    attempts: int
    #: The worker that gave it up.
    worker: str
    buried_unix_s: float
    #: The original entry, unopened.
    entry: dict[bytes, bytes] = dataclasses.field(repr=False)

    def about(self) -> dict[str, Any]:
        """Return everything but the payload, fit for JSON."""
        shown = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "entry"
        }
        sizes = {name.decode(errors="replace"): len(value) for name, value in self.entry.items()}
        return {**shown, "model": model_of(self.queue), "sizes_bytes": sizes, **self._sender()}

    def _sender(self) -> dict[str, Any]:
        """Return what the envelope says of who sent the job and what its arguments looked like."""
        try:
            headers = from_fields(self.entry).headers
        except BadMessage:
            return {"readable": False}
        said = {name: headers.get(name) for name in ("origin", "argsrepr", "task")}
        return {"readable": True, **said}


def queues(client: redis.Redis, keys: Keys) -> list[str]:
    """Return the queues that have dead letters."""
    prefix = keys.dead("")
    found: Any = client.scan_iter(match=f"{prefix}*", count=1000)
    return sorted(key.decode().removeprefix(prefix) for key in found)


def letters(client: redis.Redis, keys: Keys, queue: str) -> Iterator[DeadLetter]:
    """Yield the dead letters of a queue, the oldest first."""
    after = "-"
    while page := _page(client, keys.dead(queue), after):
        for letter_id, fields in page:
            yield _letter(queue, letter_id.decode(), fields)
        after = f"({page[-1][0].decode()}"


def _page(client: redis.Redis, key: str, after: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    found: Any = client.xrange(key, min=after, max="+", count=100)
    return list(found)


def _letter(queue: str, letter_id: str, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    return DeadLetter(
        letter_id=letter_id,
        queue=queue,
        job_id=text(b"job"),
        code=text(b"code"),
        reason=text(b"reason"),
        attempts=int(text(b"attempts") or 0),
        worker=text(b"worker"),
        buried_unix_s=float(text(b"buried_unix_s") or 0),
        entry={
            name.removeprefix(_ORIGINAL): value
            for name, value in fields.items()
            if name.startswith(_ORIGINAL)
        },
    )
