"""The faults of a storm: what each does to the fleet, and which processes end by it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from tests.chaos.fleet import Fleet
from tests.chaos.processes import living_children

#: How long Redis is away when it was killed.
_REDIS_AWAY_S: Final = 1.0
_FULL_S: Final = 4.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Struck:
    """What a fault did."""

    began_unix_s: float = dataclasses.field(default_factory=time.time)
    #: Instances that ended by it, or may have.
    doomed: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: str
    strike: Callable[[Fleet, random.Random], Struck]


def kill_instance(fleet: Fleet, chance: random.Random) -> Struck:
    pid = _instance(fleet, chance)
    struck = Struck(doomed=(pid,))
    os.kill(pid, signal.SIGKILL)
    return struck


def kill_parent(fleet: Fleet, chance: random.Random) -> Struck:
    worker = chance.choice(fleet.workers)
    struck = Struck(doomed=tuple(living_children(worker.pid)))
    fleet.expected[worker.pid] = None
    os.kill(worker.pid, signal.SIGKILL)
    return struck


def kill_client(fleet: Fleet, chance: random.Random) -> Struck:
    struck = Struck()
    fleet.kill_client(chance.choice(fleet.clients))
    return struck


def kill_redis(fleet: Fleet, chance: random.Random) -> Struck:
    struck = Struck()
    fleet.server.kill()
    time.sleep(_REDIS_AWAY_S)
    fleet.server.start()
    return struck


def end_worker(fleet: Fleet, chance: random.Random) -> Struck:
    worker = chance.choice(fleet.workers)
    struck = Struck()
    fleet.expected[worker.pid] = 0
    os.kill(worker.pid, signal.SIGTERM)
    return struck


def stop_instance(fleet: Fleet, chance: random.Random) -> Struck:
    """Stand still; one that does for longer than `claim_ttl_s` is ended by its parent."""
    pid, held_s = _instance(fleet, chance), _pause_s(fleet, chance)
    struck = Struck(doomed=(pid,) if held_s > fleet.shape.claim_ttl_s else ())
    _hold(pid, held_s)
    return struck


def stop_parent(fleet: Fleet, chance: random.Random) -> Struck:
    """Stand still; its instances renew what they hold themselves."""
    struck = Struck()
    _hold(chance.choice(fleet.workers).pid, _pause_s(fleet, chance))
    return struck


def stop_redis(fleet: Fleet, chance: random.Random) -> Struck:
    struck = Struck()
    fleet.server.freeze()
    time.sleep(_pause_s(fleet, chance))
    fleet.server.thaw()
    return struck


def cut_connections(fleet: Fleet, chance: random.Random) -> Struck:
    struck = Struck()
    with fleet.server.client() as client:
        for kind in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    return struck


def fill_redis(fleet: Fleet, chance: random.Random) -> Struck:
    """Leave no memory for some seconds."""
    struck = Struck()
    with fleet.server.client() as client:
        used: Any = client.info("memory")["used_memory"]
        client.config_set("maxmemory", int(used * 0.8))
        time.sleep(_FULL_S)
        client.config_set("maxmemory", 0)
    return struck


KILLS: Final = (
    Fault(name="kill -9 of an instance", strike=kill_instance),
    Fault(name="kill -9 of a parent alone", strike=kill_parent),
    Fault(name="kill -9 of a client", strike=kill_client),
    Fault(name="kill -9 of Redis", strike=kill_redis),
)
ALL: Final = (
    *KILLS,
    Fault(name="SIGTERM of a worker", strike=end_worker),
    Fault(name="SIGSTOP of an instance", strike=stop_instance),
    Fault(name="SIGSTOP of a parent", strike=stop_parent),
    Fault(name="SIGSTOP of Redis", strike=stop_redis),
    Fault(name="CLIENT KILL of all", strike=cut_connections),
    Fault(name="full memory", strike=fill_redis),
)


def drawn(kinds: tuple[Fault, ...], count: int, chance: random.Random) -> list[Fault]:
    """Return ``count`` faults in random order, each kind as often as the others."""
    faults: list[Fault] = []
    while len(faults) < count:
        faults += chance.sample(kinds, len(kinds))
    return faults[:count]


def _instance(fleet: Fleet, chance: random.Random) -> int:
    pids = [pid for worker in fleet.workers for pid in living_children(worker.pid)]
    return chance.choice(sorted(pids))


def _pause_s(fleet: Fleet, chance: random.Random) -> float:
    """Return a pause well within `claim_ttl_s`, or well beyond it."""
    return fleet.shape.claim_ttl_s * chance.choice((1 / 3, 3 / 2))


def _hold(pid: int, for_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(for_s)
    # Its parent may have ended it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
