"""Leases without processes: what a worker of a test holds, and what its slots are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import redis

from producer.contract.names import Keys
from workers.instances.instance import Instance, Kind
from workers.instances.leases import Leases, token_of
from workers.instances.leasing import Leasing

HOST = "test-host"


def cpu_slots(count: int) -> list[Instance]:
    return [Instance(kind=Kind.CPU, uuid="CPU-test", slot=slot) for slot in range(count)]


@dataclasses.dataclass(slots=True, kw_only=True)
class Slots:
    """Slots in which a process is as soon as it may be, and stays until a test takes it out."""

    wanted: int
    occupied: set[int] = dataclasses.field(default_factory=set)
    told_to_end: set[int] = dataclasses.field(default_factory=set)
    #: Whose process was ended at once, and why; and whose device is gone.
    ended: dict[int, str] = dataclasses.field(default_factory=dict)
    lost: dict[int, str] = dataclasses.field(default_factory=dict)
    #: Until when the lease of each slot lasts.
    until_s: dict[int, float] = dataclasses.field(default_factory=dict)

    def lease(self, number: int, *, until_s: float) -> None:
        self.occupied.add(number)
        self.until_s[number] = until_s

    def give_back(self, number: int) -> None:
        self.told_to_end.add(number)

    def end(self, number: int, why: str) -> None:
        self.ended[number] = why
        self.occupied.discard(number)

    def lose(self, number: int, why: str) -> None:
        self.lost[number] = why
        self.occupied.discard(number)

    def is_empty(self, number: int) -> bool:
        return number not in self.occupied

    def let_end(self) -> None:
        """Let the processes that were told to end be gone."""
        self.occupied -= self.told_to_end
        self.told_to_end.clear()


class Losses:
    """The devices that are gone."""

    def __init__(self) -> None:
        self.gone: dict[str, str] = {}

    def lost(self) -> Mapping[str, str]:
        return self.gone


class Tenant:
    """A worker that leases instances and runs nothing; older the lower its ``age``."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        *,
        age: float,
        instances: Sequence[Instance],
        ttl_s: float = 15,
        wanted: int | None = None,
        life: str = "",
    ) -> None:
        self.slots = Slots(wanted=len(instances) if wanted is None else wanted)
        self.losses = Losses()
        token = token_of(f"{name}@test", 1, life)
        leases = Leases(keys=Keys(), host=HOST, token=token, ttl_s=ttl_s)
        self.leases = leases
        self.leasing = Leasing(
            client=client,
            leases=leases,
            instances=instances,
            slots=self.slots,
            losses=self.losses,
            since_unix_s=age,
        )

    @property
    def holds(self) -> int:
        return len(self.slots.occupied)

    def turn(self) -> None:
        """Look once; whatever was told to end before has ended."""
        self.slots.let_end()
        self.leasing.turn()


def leasing_nothing(client: redis.Redis) -> Leasing:
    """Return the leasing of a worker that has no instances."""
    return Tenant(client, "nothing", age=0, instances=()).leasing
