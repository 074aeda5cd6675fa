"""The faults of a storm: what each does to the fleet, and which processes end by it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.chaos.account import Doom
from tests.chaos.fleet import Fleet
from tests.chaos.processes import living_children
from tests.support.waiting import wait_until

#: How long Redis is away when it was killed.
_REDIS_AWAY_S: Final = 1.0
_FULL_S: Final = 4.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    #: Does it; returns the instances that end by it, or may.
    strike: Callable[[Fleet, random.Random], list[Doom]]
    #: Which of its kind, where there are several.
    which: str = ""


def kill_instance(fleet: Fleet, chance: random.Random) -> list[Doom]:
    pid = _instance(fleet, chance)
    doom = Doom(pid, time.time())
    _signal(pid, signal.SIGKILL)
    return [doom]


def kill_parent(fleet: Fleet, chance: random.Random) -> list[Doom]:
    worker = chance.choice(fleet.workers)
    dooms = [Doom(pid, time.time()) for pid in living_children(worker.pid)]
    fleet.end(worker, signal.SIGKILL, status=None)
    return dooms


def kill_client(fleet: Fleet, chance: random.Random) -> list[Doom]:
    fleet.kill_client(chance.choice(fleet.clients))
    return []


def kill_redis(fleet: Fleet, _: random.Random) -> list[Doom]:
    with fleet.away():
        fleet.server.kill()
        time.sleep(_REDIS_AWAY_S)
        fleet.server.start()
    return []


def end_worker(fleet: Fleet, chance: random.Random) -> list[Doom]:
    worker = chance.choice(fleet.workers)
    # One whose interpreter has just begun knows of no signals yet.
    stands = bool(living_children(worker.pid))
    fleet.end(worker, signal.SIGTERM, status=0 if stands else None)
    return []


def stop_instance(fleet: Fleet, chance: random.Random) -> list[Doom]:
    """Stand still; one that does for longer than `claim_ttl_s` is ended by its parent."""
    pid, held_s = _instance(fleet, chance), _pause_s(fleet, chance)
    doom = Doom(pid, time.time())
    _hold([pid], held_s)
    return [doom] if held_s > fleet.shape.claim_ttl_s else []


def stop_parent(fleet: Fleet, chance: random.Random) -> list[Doom]:
    """Stand still; its instances renew what they hold themselves."""
    _hold([chance.choice(fleet.workers).pid], _pause_s(fleet, chance))
    return []


def stop_worker(fleet: Fleet, chance: random.Random) -> list[Doom]:
    """Stand still as a whole, as a paused container does.

    Nobody can tell one that does for longer than `claim_ttl_s` from a dead one: others run its
    jobs, and it must not answer for them when it wakes up.
    """
    worker, pause_s = chance.choice(fleet.workers), 2 * _pause_s(fleet, chance)
    instances, began_unix_s = living_children(worker.pid), time.time()
    _hold([worker.pid, *instances], pause_s)
    if pause_s < fleet.shape.claim_ttl_s:
        return []
    return [Doom(pid, began_unix_s, time.time()) for pid in instances]


def stop_redis(fleet: Fleet, chance: random.Random) -> list[Doom]:
    with fleet.away():
        fleet.server.freeze()
        time.sleep(_pause_s(fleet, chance))
        fleet.server.thaw()
    return []


def cut_connections(fleet: Fleet, _: random.Random) -> list[Doom]:
    with fleet.server.client() as client:
        for kind in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    return []


def fill_redis(fleet: Fleet, _: random.Random) -> list[Doom]:
    """Leave no memory for some seconds."""
    with fleet.away(), fleet.server.client() as client:
        used: Any = client.info("memory")["used_memory"]
        client.config_set("maxmemory", int(used * 0.8))
        time.sleep(_FULL_S)
        client.config_set("maxmemory", 0)
    return []


KILLS: Final = (
    Fault(name="kill -9 of an instance", strike=kill_instance),
    Fault(name="kill -9 of a parent alone", strike=kill_parent),
    Fault(name="kill -9 of a client", strike=kill_client),
    Fault(name="kill -9 of Redis", strike=kill_redis),
)
EACH: Final = (
    *KILLS,
    Fault(name="SIGTERM of a worker", strike=end_worker),
    Fault(name="SIGSTOP of an instance", strike=stop_instance),
    Fault(name="SIGSTOP of a parent", strike=stop_parent),
    Fault(name="SIGSTOP of a worker", strike=stop_worker),
    Fault(name="SIGSTOP of Redis", strike=stop_redis),
    Fault(name="CLIENT KILL of all", strike=cut_connections),
    Fault(name="full memory", strike=fill_redis),
)


def two_at_once(first: Fault, second: Fault) -> Fault:
    """Return the fault of one on top of the other, before the fleet is whole again."""

    def strike(fleet: Fleet, chance: random.Random) -> list[Doom]:
        dooms = first.strike(fleet, chance)
        time.sleep(chance.uniform(0, 2))
        return [*dooms, *second.strike(fleet, chance)]

    which = f"{first.name}, then {second.name}"
    return Fault(name="two of these at once", strike=strike, which=which)


def drawn(kinds: Sequence[Fault], count: int, chance: random.Random) -> list[Fault]:
    """Return ``count`` faults in random order, each kind as often as the others."""
    faults: list[Fault] = []
    while len(faults) < count:
        faults += chance.sample(kinds, len(kinds))
    return faults[:count]


def drawn_with_pairs(count: int, chance: random.Random) -> list[Fault]:
    """Return ``count`` faults of all kinds, pairs of them as often as each alone."""
    singles = drawn(EACH, count, chance)
    pairs = (two_at_once(*chance.sample(EACH, 2)) for _ in itertools.count())
    every = len(EACH) + 1
    return [next(pairs) if i % every == every - 1 else each for i, each in enumerate(singles)]


def _instance(fleet: Fleet, chance: random.Random) -> int:
    """Return the pid of one that lives; waits while there is none."""
    return chance.choice(
        wait_until(
            lambda: [pid for worker in fleet.workers for pid in living_children(worker.pid)],
            what="an instance",
        )
    )


def _pause_s(fleet: Fleet, chance: random.Random) -> float:
    """Return a pause well within `claim_ttl_s`, or well beyond it."""
    return fleet.shape.claim_ttl_s * chance.choice((1 / 3, 3 / 2))


def _hold(pids: Sequence[int], for_s: float) -> None:
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    time.sleep(for_s)
    for pid in pids:
        _signal(pid, signal.SIGCONT)


def _signal(pid: int, how: signal.Signals) -> None:
    # It may be gone: ended by its parent, or by another fault.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)
