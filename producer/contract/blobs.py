"""Where large arrays lie on their way: raw elements beside the queue, and what stands for them.

An array of more than FLEET_INLINE_MAX_BYTES is taken out of a packed job or reply, and lies as it
is under a Redis key of its own that expires, or in a folder or bucket (`producer.contract.store`).
The message keeps a reference: dtype, shape, an id, and which of the two. An id names no place: a
message cannot have anything else read.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import redis

from producer.contract import wire
from producer.contract.errors import BadMessage
from producer.contract.names import Field, Keys
from producer.contract.settings import Settings
from producer.contract.store import Store
from producer.contract.wire import Where

#: Runs the command in ARGV if each of KEYS is there. A server that was full for the arrays may have
#: room again for the job: taking it without them would be taking it to fail. Those of a job that is
#: refused go at once: left, they would fill a full server for good.
_TAKE: Final = """
local answer = redis.error_reply('OOM command not allowed: the arrays before it were not taken')
if redis.call('EXISTS', unpack(KEYS)) == #KEYS then answer = redis.pcall(unpack(ARGV)) end
"""
_IF_THERE: Final = f"""{_TAKE}
if type(answer) == 'table' and answer.err then redis.call('DEL', unpack(KEYS)) end
return answer
"""

#: The same for what is sent again: the first may have been taken, and need its arrays.
_IF_THERE_AGAIN: Final = f"{_TAKE}return answer"

#: Without it a digest of a URL would say whether a password was guessed.
_OF_THIS_PROCESS: Final = secrets.token_bytes(16)

#: What stands among the commands that send a job for a file that is written before them.
_FILE: Final = "FLEET.FILE"

#: An input's arrays outlive the time its job expires at by this, and a result's arrays the result.
_MARGIN_S: Final = 60

#: What the field `blobs` of an entry says: how many bytes, in which of the two, under which ids.
_FIELD: Final = re.compile(r"(\d{1,18}) (redis|store)((?: [0-9a-f]{32})+)")

#: Where scripts and fields say it.
_NAMES: Final = {Where.REDIS: "redis", Where.STORE: "store"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The large arrays of one job, as its entry names them."""

    nbytes: int = 0
    where: Where = Where.REDIS
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the field ``blobs``."""
        return " ".join((str(self.nbytes), _NAMES[self.where], *self.ids)) if self.ids else ""

    @classmethod
    def read(cls, field: bytes) -> Named:
        """Read the field ``blobs``; one that makes no sense names nothing."""
        if not field:
            return _NOTHING
        found = _FIELD.fullmatch(field.decode("ascii", "replace"))
        if found is None:
            return _NOTHING
        where = Where.REDIS if found[2] == "redis" else Where.STORE
        return cls(nbytes=int(found[1]), where=where, ids=tuple(found[3].split()))


_NOTHING: Final = Named()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """A packed job or reply without its large arrays, and these."""

    body: bytes = dataclasses.field(repr=False)
    named: Named = Named()
    #: By id: the raw elements.
    blobs: Mapping[str, bytes | memoryview] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """The size of both."""
        return len(self.body) + self.named.nbytes

    @property
    def in_redis(self) -> Iterable[tuple[str, bytes | memoryview]]:
        """The arrays that lie in Redis."""
        return self.blobs.items() if self.named.where is Where.REDIS else ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blobs:
    """The large arrays of one fleet: how they are named, written, read and deleted."""

    keys: Keys
    #: The largest array that stays in its message.
    over_bytes: int
    #: How long an array waits for its job.
    ttl_s: int
    #: Empty: Redis. It may hold a password.
    url: str = dataclasses.field(default="", repr=False)
    #: Tells two of them apart: kombu takes connections whose options read alike for the same.
    #: Everybody who asks a worker for its options reads it.
    place: str = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(self.url.encode(), key=_OF_THIS_PROCESS, digest_size=8)
        object.__setattr__(self, "place", digest.hexdigest() if self.url else "redis")

    @classmethod
    def of(cls, settings: Settings) -> Blobs:
        return cls(
            keys=Keys(prefix=settings.prefix),
            over_bytes=settings.inline_max_bytes,
            ttl_s=settings.blob_ttl_s,
            url=settings.blob_url,
        )

    def __json__(self) -> str:
        """Return what Celery's `inspect` tells of it among the options of the transport."""
        return repr(self)

    @functools.cached_property
    def store(self) -> Store:
        """The folder or bucket; raises ConfigError where it cannot be used."""
        return Store(self.url)

    def pack(self, obj: object) -> Spilled:
        """Pack ``obj`` as `wire.dumps` does, its large arrays beside it."""
        spill = self._spill()
        return _spilled(wire.dumps(obj, spill), spill)

    def spill(self, packed: bytes) -> Spilled:
        """Take the large arrays out of what somebody else packed with `wire.dumps`."""
        if len(packed) <= self.over_bytes or packed[0] != wire.VERSION:
            return Spilled(body=packed)
        spill = self._spill()
        return _spilled(wire.spill_packed(packed, spill), spill)

    def _spill(self) -> wire.Spill:
        where = Where.STORE if self.url else Where.REDIS
        return wire.Spill(over_bytes=self.over_bytes, where=where)

    def input_ttl_s(self, *, due_in_s: float = 0.0, expires_in_s: float | None = None) -> int:
        """Return how long the arrays of a job are kept that may not begin before and after."""
        lives_s = self.ttl_s if expires_in_s is None else min(self.ttl_s, expires_in_s + _MARGIN_S)
        return int(max(0.0, due_in_s) + max(_MARGIN_S, lives_s))

    def output_ttl_s(self, result_ttl_s: float) -> int:
        """Return how long the arrays of a result are kept: a little longer than itself."""
        return int(result_ttl_s) + _MARGIN_S

    def commands(
        self, spilled: Spilled, command: Sequence[Any], *, ttl_s: int
    ) -> list[Sequence[Any]]:
        """Return the commands that send a job by ``command``, its arrays first.

        Those of files are for `write_files`.
        """
        if not spilled.blobs:
            return [command]
        if spilled.named.where is Where.STORE:
            return [*((_FILE, *blob) for blob in spilled.blobs.items()), command]
        keys = [self.keys.blob(blob_id) for blob_id in spilled.blobs]
        sets = [
            ("SET", key, data, "EX", ttl_s)
            for key, data in zip(keys, spilled.blobs.values(), strict=True)
        ]
        return [*sets, ("EVAL", _IF_THERE, len(keys), *keys, *command)]

    def write_files(self, commands: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
        """Write the files that stand among ``commands``, all together; returns the others."""
        files: dict[str, bytes | memoryview] = {}
        others: list[Sequence[Any]] = []
        for command in commands:
            if is_file(command):
                files[command[1]] = command[2]
            else:
                others.append(command)
        if files:
            self.store.write(files)
        return others

    def keep(self, client: redis.Redis, spilled: Spilled, *, ttl_s: int) -> None:
        """Write the arrays of a reply, before the reply."""
        if spilled.named.where is Where.STORE:
            self.store.write(spilled.blobs)
            return
        for blob_id, data in spilled.blobs.items():
            client.set(self.keys.blob(blob_id), data, ex=ttl_s)

    def read(self, client: redis.Redis, named: Iterable[Named]) -> dict[str, bytes | None]:
        """Return what lies under the ids, None for what is gone; one round trip to Redis."""
        in_store: list[str] = []
        in_redis: list[str] = []
        nbytes = 0
        for each in named:
            if each.where is Where.STORE:
                in_store += each.ids
                nbytes += each.nbytes
            else:
                in_redis += each.ids
        # Of a side that has a store where this one has none nothing can be found.
        found: dict[str, bytes | None] = dict.fromkeys(in_store)
        if in_store and self.url:
            found = self.store.read(in_store, nbytes=nbytes)
        if in_redis:
            values: Any = client.mget([self.keys.blob(blob_id) for blob_id in in_redis])
            found |= zip(in_redis, values, strict=True)
        return found

    def remove(self, client: redis.Redis, named: Iterable[Named]) -> None:
        """Delete what lies under the ids."""
        named = list(named)
        self.remove_files(named)
        keys = [
            self.keys.blob(blob_id)
            for each in named
            if each.where is Where.REDIS
            for blob_id in each.ids
        ]
        if keys:
            client.delete(*keys)

    def remove_files(self, named: Iterable[Named]) -> None:
        """Delete those that lie in the folder or bucket; what cannot be deleted there is left."""
        files = [each for every in named if every.where is Where.STORE for each in every.ids]
        if files and self.url:
            self.store.remove(files)


def _spilled(body: bytes, spill: wire.Spill) -> Spilled:
    if not spill.blobs:
        return Spilled(body=body)
    nbytes = sum(map(len, spill.blobs.values()))
    named = Named(nbytes=nbytes, where=spill.where, ids=tuple(spill.blobs))
    return Spilled(body=body, named=named, blobs=spill.blobs)


def named_in(payload: bytes) -> tuple[Named, ...]:
    """Return the arrays that a packed reply refers to; one that cannot be read refers to none."""
    try:
        found = wire.references(payload)
    except BadMessage:
        return ()
    if not found:
        return ()
    named = (
        Named(
            nbytes=sum(each.nbytes for each in found if each.where is where),
            where=where,
            ids=tuple(each.blob_id for each in found if each.where is where),
        )
        for where in Where
    )
    return tuple(each for each in named if each.ids)


def is_file(command: Sequence[Any]) -> bool:
    """Return whether ``command`` stands for a file, which no server is asked to write."""
    return bool(command[0] == _FILE)


def named_by(command: Sequence[Any]) -> Named:
    """Return the files of the job that an XADD sends; of any other command none."""
    if command[0] != "XADD":
        return _NOTHING
    fields = dict(zip(command[3::2], command[4::2], strict=False))
    return Named.read(str(fields.get(str(Field.BLOBS), "")).encode())


def again(command: Sequence[Any]) -> Sequence[Any]:
    """Return the command that sends a job once more, of which nobody knows whether it was taken."""
    guarded = command[:2] == ("EVAL", _IF_THERE)
    return ("EVAL", _IF_THERE_AGAIN, *command[2:]) if guarded else command


def unguarded(command: Sequence[Any]) -> Sequence[Any]:
    """Return the command that sends a job out of one that looks for its arrays first."""
    return command[3 + int(command[2]) :] if command[:2] == ("EVAL", _IF_THERE) else command
