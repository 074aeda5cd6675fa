"""What people can do with dead letters: requeue them, so that their jobs run again, or purge them.

A requeued job begins anew: the entry is the one that was sent, it has no attempts, and what stood
for its end is gone, so that whoever asks for it waits for the new outcome. Where jobs and results
are one database that is one step, and of two people who requeue a letter one does.

With results on a server of their own, the failure goes first and the letter after it. Whoever dies
in between leaves a letter without its failure; done again, all is well. The other way round the new
outcome could find the old one in its place, and be dropped for it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

import redis

from producer.contract.blobs import Blobs
from producer.contract.names import Keys
from producer.contract.settings import BLOB_TTL_S
from producer.dead import DeadLetter, there

#: Letters of one round trip.
_AT_ONCE: Final = 100


class Requeued(enum.StrEnum):
    """What became of a letter that was to be requeued."""

    REQUEUED = "requeued"
    GONE = "gone"
    ALIVE = "alive"
    ANSWERED = "answered"
    MISSING = "missing"
    EMPTY = "empty"
    ASTRAY = "astray"
    TWIN = "twin"

    @property
    def why(self) -> str:
        """Why the letter was not requeued, for a person."""
        return _WHY[self]


_WHY: Final = {
    Requeued.REQUEUED: "",
    Requeued.GONE: "somebody else requeued or purged it meanwhile",
    Requeued.ALIVE: "a job of its id was sent again and is started",
    Requeued.ANSWERED: "a job of its id was sent again and is answered",
    Requeued.MISSING: "its large arrays are gone: a dead letter keeps them for FLEET_BLOB_TTL_S",
    Requeued.EMPTY: "its entry had been deleted when it was buried, so there is nothing to run",
    Requeued.ASTRAY: "its entry came from no stream of its queue",
    Requeued.TWIN: "another letter of its job goes first; name this one when that has ended",
}


def requeue(
    client: redis.Redis,
    keys: Keys,
    letters: Iterable[DeadLetter],
    *,
    results: redis.Redis | None = None,
    blob_ttl_s: int = BLOB_TTL_S,
) -> Iterator[tuple[DeadLetter, Requeued]]:
    """Requeue ``letters`` and yield what became of each.

    ``results`` is None when jobs and results are one database. Large arrays wait ``blob_ttl_s``
    anew.
    """
    put_back = functools.partial(_put_back, client, keys, blob_ttl_s)
    jobs: set[str] = set()
    for chunk in _chunks(letters):
        fit = []
        for letter in chunk:
            if refusal := _refusal(letter, keys, jobs):
                yield letter, refusal
            else:
                fit.append(letter)
                jobs.add(letter.job_id)
        if results is None:
            yield from zip(fit, put_back(fit, keys.result("")), strict=True)
        else:
            ends = _put_back_apart(client, keys, fit, results, put_back)
            yield from zip(fit, ends, strict=True)


def purge(
    client: redis.Redis, blobs: Blobs, letters: Iterable[DeadLetter]
) -> Iterator[tuple[DeadLetter, bool]]:
    """Delete ``letters`` for good, their large arrays too; yield of each whether it was there."""
    for chunk in _chunks(letters):
        with client.pipeline(transaction=False) as pipe:
            for letter in chunk:
                pipe.xdel(blobs.keys.dead(letter.queue), letter.letter_id)
            there_still = list(map(bool, pipe.execute()))
        # One that somebody requeued meanwhile needs its arrays.
        gone = [letter.named for letter, was in zip(chunk, there_still, strict=True) if was]
        blobs.remove(client, gone)
        if marks := [blobs.keys.kept_blob(each) for named in gone for each in named.ids]:
            client.delete(*marks)
        yield from zip(chunk, there_still, strict=True)


def _refusal(letter: DeadLetter, keys: Keys, jobs: set[str]) -> Requeued | None:
    """Return why ``letter`` cannot go back, when ``jobs`` went before it."""
    if not letter.sizes_bytes:
        return Requeued.EMPTY
    if letter.stream not in keys.streams(letter.queue):
        return Requeued.ASTRAY
    # The later of two entries of one job would be dropped for the other.
    return Requeued.TWIN if letter.job_id and letter.job_id in jobs else None


def _put_back(
    client: redis.Redis,
    keys: Keys,
    blob_ttl_s: int,
    letters: Sequence[DeadLetter],
    result_prefix: str,
) -> list[Requeued]:
    script = client.register_script(_REQUEUE)
    marks = [keys.fence(""), keys.cancelled(""), result_prefix, keys.blob("")]
    marks += [keys.kept_blob(""), str(blob_ttl_s)]
    with client.pipeline(transaction=False) as pipe:
        for letter in letters:
            script(
                keys=[keys.dead(letter.queue), keys.journal(letter.queue), letter.stream],
                args=[letter.letter_id, letter.job_id, *marks],
                client=pipe,
            )
        return [Requeued(answer.decode()) for answer in pipe.execute()]


def _put_back_apart(
    client: redis.Redis,
    keys: Keys,
    letters: Sequence[DeadLetter],
    results: redis.Redis,
    put_back: Callable[[list[DeadLetter], str], list[Requeued]],
) -> list[Requeued]:
    """Put back letters whose results have a server of their own."""
    # Asked just before: where somebody else has requeued a letter, the failure that lies there by
    # now may be that of the next one.
    said = {i: Requeued.GONE for i, found in enumerate(there(client, keys, letters)) if not found}
    named = [i for i, letter in enumerate(letters) if i not in said and letter.job_id]
    forget = results.register_script(_FORGET_FAILURE)
    forgotten = forget(keys=[keys.result(letters[i].job_id) for i in named]) if named else []
    said |= {i: Requeued.ANSWERED for i, gone in zip(named, forgotten, strict=True) if not gone}
    left = [i for i in range(len(letters)) if i not in said]
    said |= zip(left, put_back([letters[i] for i in left], ""), strict=True)
    return [said[i] for i in range(len(letters))]


def _chunks(letters: Iterable[DeadLetter]) -> Iterator[list[DeadLetter]]:
    remaining = iter(letters)
    while chunk := list(islice(remaining, _AT_ONCE)):
        yield chunk


def _script(name: str) -> str:
    names = ("answered", name)
    texts = (Path(__file__).with_name(f"{part}.lua").read_text(encoding="utf-8") for part in names)
    return "".join(texts)


_REQUEUE: Final = _script("requeue")
_FORGET_FAILURE: Final = _script("forget_failure")
