"""Dead letters: jobs that will not be tried again, read from where `bury.lua` put them.

A letter keeps the original entry. What is read of it is its size, and where somebody looks at one
letter, what its arguments look like (`producer.arguments`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.blobs import Named
from producer.contract.errors import BadMessage
from producer.contract.message import from_fields
from producer.contract.names import Field, Keys, model_of

_LETTERS: Final = Path(__file__).with_name("letters.lua").read_text(encoding="utf-8")
_READ_AT_ONCE: Final = 100

#: Before the names of the original entry's fields.
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
    #: The stream its entry came from.
    stream: str
    #: Of each field of the original entry; empty when the entry was deleted before.
    sizes_bytes: Mapping[str, int]
    #: The entry's envelope, still packed: who sent it.
    envelope: bytes = dataclasses.field(repr=False)
    #: The large arrays of its job, which are kept for `blob_ttl_s` from its burial on.
    named: Named = dataclasses.field(default_factory=Named)

    @property
    def name(self) -> str:
        """What a person calls it: by its job, if that can be read."""
        return self.job_id or self.letter_id

    def about(self) -> dict[str, Any]:
        """Return everything but the payload, fit for JSON."""
        shown = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("envelope", "named")
        }
        large = {"large_arrays_bytes": self.named.nbytes}
        return {**shown, **large, "model": model_of(self.queue), **self._sender()}

    def _sender(self) -> dict[str, Any]:
        """Return what the envelope says of who sent the job. Celery's own text of the arguments is
        left out: a stock app writes their values there.
        """
        fields = {b"env": self.envelope}
        if Field.BODY in self.sizes_bytes:
            fields[b"body"] = b""
        if Field.RAW in self.sizes_bytes:
            fields = {b"raw": self.envelope}
        try:
            headers = from_fields(fields).headers
        except BadMessage:
            return {"readable": False}
        said = {name: headers.get(name) for name in ("origin", "task")}
        return {"readable": True, **said}


def letters(client: redis.Redis, keys: Keys, queue: str) -> Iterator[DeadLetter]:
    """Yield the dead letters of a queue, the oldest first."""
    script, after = client.register_script(_LETTERS), "-"
    while page := script(keys=[keys.dead(queue)], args=[after, "+", _READ_AT_ONCE]):
        for each in page:
            yield _letter(queue, *each)
        after = f"({page[-1][0].decode()}"


def entry_of(client: redis.Redis, keys: Keys, letter: DeadLetter) -> dict[bytes, bytes]:
    """Return the fields of the original entry, body and all; empty when the letter is gone."""
    ends = (letter.letter_id, letter.letter_id)
    found: Any = client.xrange(keys.dead(letter.queue), *ends)
    fields: Mapping[bytes, bytes] = found[0][1] if found else {}
    return {
        name.removeprefix(_ORIGINAL): value
        for name, value in fields.items()
        if name.startswith(_ORIGINAL)
    }


def there(client: redis.Redis, keys: Keys, found: Sequence[DeadLetter]) -> list[bool]:
    """Return for each letter whether it is still there."""
    script = client.register_script(_LETTERS)
    with client.pipeline(transaction=False) as pipe:
        for letter in found:
            ends = [letter.letter_id, letter.letter_id]
            script(keys=[keys.dead(letter.queue)], args=[*ends, 1], client=pipe)
        return [bool(answer) for answer in pipe.execute()]


def _letter(
    queue: str, letter_id: bytes, about: list[bytes], envelope: bytes, sizes: list[Any]
) -> DeadLetter:
    fields = dict(zip(about[::2], about[1::2], strict=True))

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    return DeadLetter(
        letter_id=letter_id.decode(),
        queue=queue,
        job_id=text(b"job"),
        code=text(b"code"),
        reason=text(b"reason"),
        attempts=int(text(b"attempts") or 0),
        worker=text(b"worker"),
        buried_unix_s=float(text(b"buried_unix_s") or 0),
        stream=text(b"stream"),
        sizes_bytes={
            name.decode(errors="replace"): size
            for name, size in zip(sizes[::2], sizes[1::2], strict=True)
        },
        envelope=envelope,
        named=Named.read(fields.get(b"blobs", b"")),
    )
