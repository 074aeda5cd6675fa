"""The delivery rules as Python calls: each method builds one script call, ``send`` runs them.

Nothing here decides about batches or opens a job's body. Keys are those of
``producer.contract.names``.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgpack
import redis

from producer.contract.blobs import Named
from producer.contract.names import FREE, GROUP, PRIORITIES, Field, Keys
from producer.contract.settings import BLOB_TTL_S
from workers.batching.closing import Closed
from workers.delivery import scripts
from workers.delivery.scripts import Call

#: Claims of one entry that may end with their process before its job was begun: a batch that runs
#: beside it, or a whole machine, can be the reason. From the next one on it is read alone.
FREE_READS: Final = 2

#: Since a turn that never was: no entry is older.
NEVER_S: Final = 1e9

#: What a sender stamped a job with: header and stamp.
Stamps = Sequence[tuple[str, str]]


class Verdict(enum.StrEnum):
    """What ``begin`` says of one job; the words are explained in ``begin.lua``."""

    RUN = "run"
    ALONE = "alone"
    LATER = "later"
    LOST = "lost"
    DONE = "done"
    DUPLICATE = "duplicate"
    AGAIN = "again"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    EXHAUSTED = "exhausted"


class Note(enum.StrEnum):
    """Why begun jobs have no outcome; the words are explained in ``unfinished.lua``."""

    FORGIVE = "forgive"
    TIMEOUT = "timeout"


class Ending(enum.StrEnum):
    """What ``complete`` did with one job."""

    STORED = "stored"
    KEPT = "kept"
    LOST = "lost"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One claimed stream entry; ``fields`` are raw, the body unopened."""

    stream: str
    entry_id: str
    fields: Mapping[bytes, bytes]
    #: Claims that it outlived without being begun, this one included; 0 when it was begun once.
    reads: int = 1

    @property
    def place(self) -> str:
        """Its stream and its id there, as scripts name it."""
        return f"{self.stream} {self.entry_id}"

    @property
    def job_id(self) -> str | None:
        """The job's id, or None when the entry has none that can be read."""
        raw = self.fields.get(Field.ID.encode())
        try:
            return raw.decode() if raw else None
        except UnicodeDecodeError:
            return None

    @property
    def rows(self) -> int:
        """The rows its sender counted, at least 1; the claim script reads it the same way."""
        try:
            return max(1, int(self.fields.get(Field.ROWS.encode(), b"1")))
        except ValueError:
            return 1

    @property
    def nbytes(self) -> int:
        """The size of the body and of the arrays that are not in it, or of the whole message where
        it came through a list.
        """
        body = self.fields.get(Field.BODY.encode()) or self.fields.get(Field.RAW.encode(), b"")
        return len(body) + self.named.nbytes

    @property
    def blobs(self) -> bytes:
        """The field that names its large arrays; empty where it has none."""
        return self.fields.get(Field.BLOBS.encode(), b"")

    @property
    def named(self) -> Named:
        """Its large arrays, if what its sender says of them makes sense."""
        return Named.read(self.blobs)

    @property
    def added_unix_s(self) -> float:
        """When Redis took the entry, by the server's clock."""
        return int(self.entry_id.partition("-")[0]) / 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How much of one queue a claim may take."""

    queue: str
    max_rows: int
    max_bytes: int
    max_entries: int
    #: How long ago its last turn here ended, 0 while that lasts: it has not waited for longer.
    since_turn_s: float = NEVER_S


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What a claim took: entries of one queue, and why it took no more."""

    queue: str
    closed: Closed
    entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one job ends: its packed result, or None when it lies under its key already."""

    entry: Entry
    job_id: str
    payload: bytes | None
    reply_to: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """Why a job will not be tried again."""

    code: str
    reason: str
    attempts: int
    worker: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The script calls of one consumer on the queues of one fleet."""

    keys: Keys
    consumer: str
    result_ttl_s: int
    max_attempts: int
    #: Whether results lie on another server.
    apart: bool = False
    #: How long the large arrays of a dead letter are kept.
    blob_ttl_s: int = BLOB_TTL_S

    def claim(self, wishes: Sequence[Wish], *, running: bool = False) -> Call[Claimed | None]:
        """Take a batch of the queue that waited longest, as `claim.lua` says; None when none has
        work.

        ``running`` says that a batch runs in this process, which no reading may endanger.
        """
        keys: list[str] = []
        limits: list[Any] = []
        for wish in wishes:
            keys += [*self.keys.streams(wish.queue), self.keys.journal(wish.queue)]
            limits += [wish.max_rows, wish.max_bytes, wish.max_entries]
            limits.append(int(wish.since_turn_s * 1000))

        def read(answer: list[Any]) -> Claimed | None:
            if not answer:
                return None
            number, closed, entries = answer
            return Claimed(
                queue=wishes[number].queue,
                closed=Closed(closed.decode()),
                entries=tuple(_entry(*entry) for entry in entries),
            )

        args = [GROUP, self.consumer, FREE, len(PRIORITIES), int(running), FREE_READS, *limits]
        return Call(script=scripts.CLAIM, keys=keys, args=args, read=read)

    def doorbell(self, client: redis.Redis, queues: Iterable[str], wait_s: float) -> list[Entry]:
        """Wait for a new entry on any of ``queues`` and claim it; empty after ``wait_s``.

        Given-back entries wake nobody, so the wait bounds how long one of them lies unseen.
        A server may answer with one entry of each stream.
        """
        streams = [stream for queue in queues for stream in self.keys.streams(queue)]
        answer: Any = client.execute_command(
            *("XREADGROUP", "GROUP", GROUP, self.consumer, "COUNT", 1),
            *("BLOCK", max(1, int(wait_s * 1000)), "STREAMS", *streams, *([">"] * len(streams))),
        )
        return [
            Entry(stream=stream.decode(), entry_id=entry_id.decode(), fields=fields)
            for stream, entries in answer or ()
            for entry_id, fields in entries
        ]

    def begin(
        self, queue: str, jobs: Sequence[tuple[Entry, str, Stamps]]
    ) -> Call[list[tuple[Verdict, int]]]:
        """Ask for each ``(entry, job id, stamps)`` whether it may start; returns verdict and
        earlier starts.
        """
        args: list[Any] = [GROUP, self.consumer, self.max_attempts]
        args += [self.keys.result(""), self.keys.fence(""), self.keys.cancelled("")]
        args += [self.keys.blob(""), self.keys.kept_blob("")]
        numbers = self._numbers(queue)
        for entry, job_id, stamps in jobs:
            marks = [self.keys.cancelled_stamp(header, stamp) for header, stamp in stamps]
            packed = msgpack.packb(marks, use_bin_type=False) if marks else ""
            args += [numbers[entry.stream], entry.entry_id, job_id, packed, str(entry.named)]
        return Call(
            script=scripts.BEGIN,
            keys=self._journal_and_streams(queue),
            args=args,
            read=lambda answer: [(Verdict(verdict.decode()), starts) for verdict, starts in answer],
        )

    def marks(self, job_id: str, stamps: Stamps) -> list[str]:
        """Return the keys of the marks that cancel a job."""
        stamped = (self.keys.cancelled_stamp(header, stamp) for header, stamp in stamps)
        return [self.keys.cancelled(job_id), *stamped]

    def complete(self, queue: str, ends: Sequence[End]) -> Call[list[Ending]]:
        """End jobs and store their results."""
        args: list[Any] = [GROUP, self.consumer, self.result_ttl_s, int(self.apart)]
        args += [self.keys.result(""), self.keys.fence(""), self.keys.cancelled("")]
        args += [self.keys.blob(""), self.keys.kept_blob("")]
        numbers = self._numbers(queue)
        for end in ends:
            payload = end.payload if end.payload is not None else b""
            channel = self.keys.replies(end.reply_to) if end.reply_to else ""
            args += [numbers[end.entry.stream], end.entry.entry_id, end.job_id, payload, channel]
            args.append(str(end.entry.named))
        return Call(
            script=scripts.COMPLETE,
            keys=self._journal_and_streams(queue),
            args=args,
            read=lambda answer: [Ending(ending.decode()) for ending in answer],
        )

    def bury(
        self,
        queue: str,
        entry: Entry,
        job_id: str | None,
        letter: Letter,
        *,
        payload: bytes | None,
        reply_to: str | None = None,
    ) -> Call[bool]:
        """Make one entry a dead letter; False when it is no longer ours."""
        args: list[Any] = [GROUP, self.consumer, entry.entry_id, job_id or ""]
        args += [self.keys.result(""), self.keys.fence(""), self.keys.cancelled("")]
        args += [self.result_ttl_s, int(self.apart), payload or b""]
        args.append(self.keys.replies(reply_to) if reply_to else "")
        args += [self.keys.blob(""), self.keys.kept_blob(""), self.blob_ttl_s]
        for name, value in dataclasses.asdict(letter).items():
            args += [name, value]
        args += ["job", job_id or "", "buried_unix_s", f"{time.time():.3f}"]
        return Call(
            script=scripts.BURY,
            keys=[self.keys.journal(queue), self.keys.dead(queue), entry.stream],
            args=args,
            read=bool,
        )

    def keep(self, blob_id: str, data: bytes | memoryview, *, ttl_s: int) -> Call[int]:
        """Store one large array of a reply."""
        return Call(
            script=scripts.KEEP, keys=[self.keys.blob(blob_id)], args=[data, ttl_s], read=int
        )

    def owned(self, client: redis.Redis, entries: Sequence[Entry]) -> list[bool]:
        """Return for each entry whether the consumer still holds it."""
        pipe = client.pipeline(transaction=False)
        for entry in entries:
            pipe.xpending_range(
                *(entry.stream, GROUP, entry.entry_id, entry.entry_id, 1),
                consumername=self.consumer,
            )
        return [bool(answer) for answer in pipe.execute()]

    def release(
        self,
        queues: Iterable[str],
        *,
        keep: Iterable[Entry] = (),
        remove: bool = False,
        unread: bool = True,
    ) -> Call[int]:
        """Give back all that the consumer holds but ``keep``; returns how many were given back.

        Not ``unread``: the consumer died, and to read one of them may have been the reason.
        """
        kept = [entry.place for entry in keep]
        return Call(
            script=scripts.RELEASE,
            keys=self._streams(queues),
            args=[GROUP, self.consumer, FREE, int(remove), int(unread), *kept],
            read=int,
        )

    def unfinished(self, queue: str, note: Note, *, entry: str = "") -> Call[int]:
        """Note why the consumer's begun jobs of ``queue`` have no outcome.

        A timeout is noted of one job alone, that of ``entry``: a stream and an entry id. Starts
        are taken back of all of them, or of that one.
        """
        return Call(
            script=scripts.UNFINISHED,
            keys=self._journal_and_streams(queue),
            args=[GROUP, self.consumer, str(note), entry],
            read=int,
        )

    def _streams(self, queues: Iterable[str]) -> list[str]:
        return [stream for queue in queues for stream in self.keys.streams(queue)]

    def _journal_and_streams(self, queue: str) -> list[str]:
        return [self.keys.journal(queue), *self.keys.streams(queue)]

    def _numbers(self, queue: str) -> dict[str, int]:
        """Return each stream's number among the keys of ``_journal_and_streams``, from 1."""
        return {stream: i for i, stream in enumerate(self.keys.streams(queue), start=2)}


def renew(keys: Keys, queues: Iterable[str], consumers: Sequence[str]) -> Call[int]:
    """Renew every claim the ``consumers`` hold; returns how many."""
    streams = [stream for queue in queues for stream in keys.streams(queue)]
    return Call(script=scripts.RENEW, keys=streams, args=[GROUP, *consumers], read=int)


def take_over(
    keys: Keys,
    queues: Iterable[str],
    *,
    claim_ttl_s: float,
    silent_s: float,
    until_unix_s: float,
) -> Call[int]:
    """Give back claims nobody renewed for ``claim_ttl_s``; returns how many.

    Does nothing when the server reads it after ``until_unix_s`` by its own clock.
    """
    streams = [stream for queue in queues for stream in keys.streams(queue)]
    args = [GROUP, FREE, *(int(s * 1000) for s in (claim_ttl_s, silent_s, until_unix_s))]
    return Call(script=scripts.TAKE_OVER, keys=streams, args=args, read=int)


def move_due(keys: Keys, queue: str, *, now_unix_s: float, at_most: int = 500) -> Call[int]:
    """Put the delayed jobs of ``queue`` that are due into its streams; returns how many."""
    return Call(
        script=scripts.MOVE_DUE,
        keys=[keys.delayed(queue), *keys.streams(queue)],
        args=[now_unix_s, at_most, *PRIORITIES],
        read=int,
    )


def ensure_groups(keys: Keys, queues: Iterable[str]) -> Call[int]:
    """Create the consumer group of every stream that lacks it; returns how many."""
    streams = [stream for queue in queues for stream in keys.streams(queue)]
    return Call(script=scripts.GROUPS, keys=streams, args=[GROUP], read=int)


def _entry(stream: bytes, entry_id: bytes, fields: Sequence[bytes], reads: int) -> Entry:
    return Entry(
        stream=stream.decode(),
        entry_id=entry_id.decode(),
        fields=dict(zip(fields[::2], fields[1::2], strict=True)),
        reads=reads,
    )
