"""How a worker holds its instances: it says that it is there, renews, takes and gives back.

`Leasing.turn` is called by the keeper's thread, several times while a lease lasts. What is decided
there is `workers.instances.sharing`; a process may be started in a slot only while its lease lasts,
and a lease is given back only when the process is gone.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import redis

from workers.delivery.scripts import send
from workers.instances import clock, lives
from workers.instances.instance import Instance
from workers.instances.leases import Leases, Sight, life_in, node_of
from workers.instances.sharing import Sharer, dealt_to, next_step, own_part_first
from workers.parent.hold_off import HoldOff

logger = logging.getLogger(__name__)

#: Between two looks at the others while nothing is to be done, and while something is.
_CALM_S: Final = 1.0
_RESTLESS_S: Final = 0.25


class Slots(Protocol):
    """The processes of a worker, each in its slot."""

    @property
    def wanted(self) -> int:
        """How many should run, before others of the host are thought of."""
        ...

    def lease(self, number: int, *, until_s: float) -> None:
        """A process may be started in the slot until then, by `workers.instances.clock`."""
        ...

    def give_back(self, number: int) -> None:
        """Let the process of the slot finish and end; none is started."""
        ...

    def end(self, number: int, why: str) -> None:
        """End the process of the slot at once; none is started."""
        ...

    def lose(self, number: int, why: str) -> None:
        """The same, for a device that is gone."""
        ...

    def is_empty(self, number: int) -> bool:
        """Whether the slot has no process."""
        ...


class Losses(Protocol):
    """Which instances cannot be reached at the moment."""

    def lost(self) -> Mapping[str, str]:
        """Return why, by the key of each."""
        ...


class Leasing:
    """The instances that one worker holds, of those that it may use."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        leases: Leases,
        instances: Sequence[Instance],
        slots: Slots,
        losses: Losses,
        since_unix_s: float,
    ) -> None:
        self._client, self._leases, self._slots, self._losses = client, leases, slots, losses
        self._numbers = {each.key: number for number, each in enumerate(instances)}
        self._since_unix_s = since_unix_s
        #: Held, and may have a process.
        self._running: list[str] = []
        #: Held, and to be given back.
        self._returning: list[str] = []
        now_s = time.monotonic()
        self._takes_over = HoldOff.begin(ttl_s=leases.ttl_s, now_s=now_s)
        # What nobody ever held is free at once, except when we may have missed who holds it.
        self._takes = HoldOff(ttl_s=leases.ttl_s, until_s=now_s, renewed_at_s=now_s)
        self._leaving = False
        self._was_there = False
        self._restless = True
        self._target: int | None = None
        #: Who holds each instance that this worker may use, by node; empty where nobody does.
        self.holders: dict[str, str] = {}
        #: How many of them this worker may hold.
        self.share = len(instances)
        #: Why this worker has no instance; empty while it has one.
        self.waiting = ""

    @property
    def again_in_s(self) -> float:
        """When `turn` should be called next."""
        return _RESTLESS_S if self._restless else _CALM_S

    @property
    def is_due(self) -> bool:
        """Whether another number is wanted than at the last turn."""
        return self._target is not None and self._target != min(self._slots.wanted, self.share)

    def drain(self) -> None:
        """Take nothing more; others need not count on this worker from now on."""
        self._leaving = True

    def turn(self) -> None:
        """Renew what is held, and come nearer to what should be held."""
        try:
            self._turn()
        except redis.RedisError:
            self._restless = True
            self._missed(now_s=time.monotonic())
            raise

    def leave(self) -> None:
        """Give back every instance whose process is gone, and let others share without us."""
        self._leaving = True
        held = [*self._running, *self._returning]
        free = [key for key in held if self._slots.is_empty(self._numbers[key])]
        send(self._client, self._leases.give_back(free), self._leases.hold(None, (), frozenset()))

    # -- one turn

    def _turn(self) -> None:
        lost = self._losses.lost()
        own = self._own(lost)
        keys = list(self._numbers)
        believed = frozenset(self._running + self._returning)
        sent_s = clock.now_s()
        (sight,) = send(
            self._client, self._leases.hold(None if self._leaving else own, keys, believed)
        )
        self._heard(sight, now_s=time.monotonic())
        self._learn(sight, until_s=sent_s + self._leases.ttl_s, lost=lost)
        present = [each for each in sight.present if not lives.is_over(life_in(each.token))]
        part = dealt_to(own, present)
        self.share = len(part)
        self._target = 0 if self._leaving else min(self._slots.wanted, self.share)
        self._step(self._target, own, part, sight)
        self._tell(own, sight)

    def _heard(self, sight: Sight, *, now_s: float) -> None:
        for hold_off in (self._takes, self._takes_over):
            hold_off.renewed(now_s=now_s)
            hold_off.heard(server_unix_s=sight.now_unix_s, now_s=now_s)
        if sight.unknown and self._was_there:
            # The server lost what it knew, or we were silent for too long: others may hold what
            # looks free, and will say so within the time of a lease.
            self._missed(now_s=now_s)
        self._was_there = True

    def _missed(self, *, now_s: float) -> None:
        for hold_off in (self._takes, self._takes_over):
            hold_off.failed(now_s=now_s)

    def _own(self, lost: Mapping[str, str]) -> Sharer:
        return Sharer(
            since_unix_s=self._since_unix_s,
            token=self._leases.token,
            may_use=frozenset(self._numbers) - lost.keys(),
        )

    def _learn(self, sight: Sight, *, until_s: float, lost: Mapping[str, str]) -> None:
        """Take in which leases are ours, and end what runs on an instance that is not."""
        self.holders = {
            key: node_of(held.holder) if held.left_s >= 0 else ""
            for key, held in sight.leases.items()
        }
        for key, held in sight.leases.items():
            ours, known = held.holder == self._leases.token, key in self._running + self._returning
            if ours and not known:
                # The reply to a take was lost.
                self._running.append(key)
            if known and not ours:
                self._forget(key)
                self._slots.end(self._numbers[key], "another worker holds its instance")
                logger.error("instance.lease_lost", extra={"instance": key})
            elif ours and key in lost:
                self._lose(key, lost[key])
            elif ours and key in self._running:
                self._slots.lease(self._numbers[key], until_s=until_s)

    def _lose(self, key: str, why: str) -> None:
        """End what runs on a device that is gone; its lease goes back as any other."""
        if key in self._running:
            logger.error("instance.lost", extra={"instance": key, "why": why})
            self._running.remove(key)
            self._returning.append(key)
        self._slots.lose(self._numbers[key], why)

    def _step(self, target: int, own: Sharer, part: frozenset[str], sight: Sight) -> None:
        self._running = own_part_first(part, self._running)
        gone = {key for key in self._returning if self._slots.is_empty(self._numbers[key])}
        usable = [key for key in self._returning if key in own.may_use]
        step = next_step(target, running=self._running, returning=usable, gone=gone)
        for key in step.keep:
            self._returning.remove(key)
            self._running.append(key)
        if step.give_back is not None:
            self._running.remove(step.give_back)
            self._returning.append(step.give_back)
            self._slots.give_back(self._numbers[step.give_back])
            logger.info("instance.surplus", extra={"instance": step.give_back})
        if release := [*step.release, *(gone - own.may_use)]:
            send(self._client, self._leases.give_back(release))
            for key in release:
                self._forget(key)
                self.holders[key] = ""
        if step.take:
            self._take(step.take, own, part, sight)
        self._restless = bool(self._returning) or len(self._running) < target

    def _take(self, count: int, own: Sharer, part: frozenset[str], sight: Sight) -> None:
        """Lease up to ``count`` instances that nobody holds, whose holder is certain to be dead, or
        whose holder's time is over.
        """
        now_s = time.monotonic()
        leases = {key: sight.leases[key] for key in own.may_use}
        free = frozenset(key for key, held in leases.items() if not held.holder)
        dead = {key: held for key, held in leases.items() if held.is_dead}
        over = frozenset(key for key, held in leases.items() if held.left_s < 0) - free
        allowed = (free | dead.keys() if self._takes.allows(now_s=now_s) else frozenset()) | (
            over if self._takes_over.allows(now_s=now_s) else frozenset()
        )
        keys = [key for key in self._numbers if key in allowed]
        wanted = own_part_first(part, keys)[:count]
        if not wanted:
            return
        sent_s = clock.now_s()
        until_unix_s = sight.now_unix_s + self._leases.ttl_s / 3
        call = self._leases.take(wanted, over=over, dead=dead, until_unix_s=until_unix_s)
        (taken,) = send(self._client, call)
        for key in taken:
            self._running.append(key)
            self.holders[key] = node_of(self._leases.token)
            self._slots.lease(self._numbers[key], until_s=sent_s + self._leases.ttl_s)
        if taken:
            logger.info("instances.leased", extra={"instances": json.dumps(taken)})

    def _held_by(self) -> str:
        """Return who holds what we wait for; one of our own name cannot share with us."""
        own = node_of(self._leases.token)
        if own not in self.holders.values():
            return "held by others"
        return (
            f"held in this worker's own name, {own}: by one that died, for at most "
            f"{self._leases.ttl_s:g} s, or by one that lives; then give this one another name (-n)"
        )

    def _forget(self, key: str) -> None:
        for keys in (self._running, self._returning):
            if key in keys:
                keys.remove(key)

    def _tell(self, own: Sharer, sight: Sight) -> None:
        """Say once that there is none to be had, and why."""
        held = self._running or self._returning
        if held or self._leaving or not self._slots.wanted or not own.may_use:
            self.waiting = ""
            return
        waiting = f"waiting for an instance: the {len(own.may_use)} of this host are " + (
            self._held_by() if self.share else f"shared by {len(sight.present)} workers"
        )
        if not self.waiting:
            logger.warning("instance.waiting", extra={"why": waiting})
        self.waiting = waiting


def status(leasing: Leasing) -> dict[str, Any]:
    """Return what `fleet status` shows of the leases, fit for JSON."""
    return {
        "waiting": leasing.waiting,
        "share": leasing.share,
        "holders": dict(leasing.holders),
    }
