"""What must hold after any storm; each broken one is a line that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Final

import redis

from producer.contract.names import FREE, GROUP
from tests.chaos.account import Account, Doom
from tests.chaos.fleet import KEYS, QUEUE, Fleet
from tests.chaos.processes import children, marked
from tests.chaos.sender import answer_of

#: Keys that may live for ever: the queue, what is known of the fleet, kombu's own bindings (and
#: their deadlines).
LASTING: Final = (
    *KEYS.streams(QUEUE),
    KEYS.journal(QUEUE),
    KEYS.dead(QUEUE),
    KEYS.delayed(QUEUE),
    KEYS.models,
    KEYS.workers,
    "_kombu.binding",
)

#: Exit status of a worker that cannot reach its server when it starts.
NO_SERVER: Final = 2

#: Consumers of all processes together; more means that those of dead ones are left.
_MOST_CONSUMERS: Final = 10
_SHOWN: Final = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Of the jobs, by id: those that no invariant may find."""

    lost: tuple[str, ...]
    wrong: tuple[str, ...]
    doubled: tuple[str, ...]
    #: By number: started by more than one process that lived on.
    restarted: tuple[int, ...]

    def lines(self) -> Iterator[str]:
        for name, what in dataclasses.asdict(self).items():
            if what:
                yield f"{len(what)} jobs {name}: {', '.join(map(str, what[:_SHOWN]))}"


def verdicts(
    account: Account,
    *,
    told: Mapping[str, int],
    stored: Mapping[str, str],
    fenced: Set[str],
    dooms: Sequence[Doom],
) -> Verdicts:
    """Judge every job: one terminal state, the right one, told once, started once by a living
    process.

    ``told``: how often each answer was published; ``stored``: those that lie in Redis; ``fenced``:
    those of which a client left a fence when it deleted them.
    """
    doubled = {job_id for job_id, times in told.items() if times > 1}
    doubled |= {job_id for job_id, texts in account.outcomes.items() if len(texts) > 1}
    # Somebody stored it once more after it was read and deleted.
    doubled |= fenced & stored.keys()
    return Verdicts(
        lost=tuple(account.missing()),
        wrong=tuple(_wrong(account, stored)),
        doubled=tuple(sorted(doubled)),
        restarted=tuple(_restarted(account, dooms)),
    )


def _wrong(account: Account, stored: Mapping[str, str]) -> Iterator[str]:
    for job_id, number in account.accepted.items():
        texts = {*account.outcomes.get(job_id, ()), stored.get(job_id, "fenced")}
        if texts - {answer_of(number), "fenced"}:
            yield f"{job_id} (number {number}: {', '.join(sorted(texts))})"


def _restarted(account: Account, dooms: Sequence[Doom]) -> Iterator[int]:
    """Yield the jobs with more than one start that no doom accounts for."""
    by_pid: dict[int, list[Doom]] = {}
    for doom in dooms:
        by_pid.setdefault(doom.pid, []).append(doom)
    for number, starts in account.starts.items():
        if len(starts) > 1:
            sound = [s for s in starts if not any(d.covers(s) for d in by_pid.get(s.pid, ()))]
            if len(sound) > 1:
                yield number


def left_in_redis(client: redis.Redis) -> Iterator[str]:
    """Yield what is left of jobs when all have ended."""
    for stream in KEYS.streams(QUEUE):
        if left := client.xlen(stream):
            yield f"{left} entries left in {stream}"
        pending: Any = client.xpending(stream, GROUP)
        if pending["pending"]:
            yield f"{pending['pending']} claims left in {stream}"
    if left := client.hlen(KEYS.journal(QUEUE)):
        yield f"{left} jobs left in the journal"
    yield from dead_letters(client)
    names = (key.decode() for key in client.scan_iter(count=1000))
    lasting = [n for n in names if not n.startswith(LASTING) and client.ttl(n) == -1]
    if lasting:
        yield f"{len(lasting)} keys without expiry: {', '.join(lasting[:_SHOWN])}"


def dead_letters(client: redis.Redis) -> Iterator[str]:
    if dead := client.xlen(KEYS.dead(QUEUE)):
        yield f"{dead} dead letters"


def claims_of_the_dead(client: redis.Redis, parents: Sequence[int]) -> int:
    """Return how many jobs are held by instances whose parent is gone."""
    held = 0
    for stream in KEYS.streams(QUEUE):
        pending: Any = client.xpending(stream, GROUP)
        for consumer in pending["consumers"]:
            name = consumer["name"].decode()
            if name != FREE and _parent_of(name) not in parents:
                held += int(consumer["pending"])
    return held


def _parent_of(consumer: str) -> int:
    """Return the pid in ``node/slot/parent.number.time``."""
    return int(consumer.rpartition("/")[2].partition(".")[0])


def strange_consumers(client: redis.Redis, parents: Sequence[int]) -> Iterator[str]:
    """Yield the consumers of processes that are gone; they may take a minute to be removed."""
    names: set[str] = set()
    for stream in KEYS.streams(QUEUE):
        found: Any = client.xinfo_consumers(stream, GROUP)
        names |= {consumer["name"].decode() for consumer in found}
    for name in names - {FREE}:
        if _parent_of(name) not in parents:
            yield f"consumer of a dead process: {name}"
    if len(names) >= _MOST_CONSUMERS:
        yield f"{len(names)} consumers"


def strange_processes(fleet: Fleet) -> Iterator[str]:
    """Yield zombies, orphans, and ends that no fault is the reason of, while the fleet runs."""
    parents = {worker.pid for worker in fleet.workers}
    for pid in parents:
        for child in children(pid):
            if child.zombie:
                yield f"zombie {child.pid} of the worker {pid}"
    known = parents | {client.process.pid for client in fleet.clients}
    for process in marked(fleet.mark):
        if process.pid not in known and process.parent not in parents:
            yield f"orphan {process.pid} ({process.name})"
    yield from strange_ends(fleet)


def strange_ends(fleet: Fleet) -> Iterator[str]:
    """Yield the ends of parents and clients that no fault is the reason of."""
    for end in fleet.ended:
        if end.pid not in fleet.expected:
            # A worker that finds no server says so and ends; its supervisor starts it again.
            if end.status != NO_SERVER or not fleet.was_away(end.began_unix_s, end.at_unix_s):
                yield f"the worker {end.pid} ended by itself with status {end.status}"
        elif fleet.expected[end.pid] not in (None, end.status):
            yield f"the worker {end.pid} ended with status {end.status} after SIGTERM"
    for client in fleet.clients:
        if client.process.poll() is not None:
            yield f"the client {client.name} ended by itself; see its log"
