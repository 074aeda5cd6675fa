"""Whose turn it is: the claim script on a real server, beside the rule in plain Python."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

import pytest
import redis

from producer.contract.names import GROUP, PRIORITIES, Keys, Priority
from workers.delivery import ledger as delivery
from workers.delivery.ledger import NEVER_S, Claimed, Ledger, Wish
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS: Final = Keys()
QUEUES: Final = ("fleet.a", "fleet.b", "fleet.c", "fleet.d")
ROUNDS: Final = 150

#: An entry's age in seconds and its number within that second.
Age = tuple[int, int]
#: What waits: by queue and priority, the oldest first.
Waiting = dict[tuple[str, Priority], list[Age]]


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, QUEUES))
    yield client
    # Jobs are left unfinished here on purpose.
    client.flushall()


def whose_turn(waiting: Waiting, since_turn_s: Mapping[str, float]) -> str | None:
    """Return the queue whose oldest entry of the highest priority has waited longest, where no
    waiting counts from before the queue's last turn; of equals the one whose turn was longer ago,
    then the one with the older entry.
    """
    for priority in PRIORITIES:
        heads = {queue: waiting[queue, priority][0] for queue in QUEUES if waiting[queue, priority]}
        if heads:
            return max(
                heads,
                key=lambda queue: (
                    min(heads[queue][0], since_turn_s[queue]),
                    since_turn_s[queue],
                    heads[queue][0],
                    -heads[queue][1],
                ),
            )
    return None


@dataclasses.dataclass
class Fleet:
    """Queues on a server, and what is known to wait in them."""

    broker: redis.Redis
    chance: random.Random
    waiting: Waiting = dataclasses.field(
        default_factory=lambda: {(queue, each): [] for queue in QUEUES for each in PRIORITIES}
    )
    consumer: Ledger = dataclasses.field(
        default_factory=lambda: Ledger(keys=KEYS, consumer="c", result_ttl_s=60, max_attempts=3)
    )

    def __post_init__(self) -> None:
        now: Any = self.broker.time()
        self.began_s: int = now[0]
        #: The youngest age that a stream may still be given, for ids only grow.
        self._ages = dict.fromkeys(self.waiting, 1000)

    def add(self) -> None:
        """Add an entry that is older than all this test, so that ages differ by seconds."""
        place = self.chance.choice(list(self.waiting))
        age_s = self._ages[place] - self.chance.randint(1, 30)
        if age_s < 10:
            return
        self._ages[place] = age_s
        # The four queues differ in the second number alone where their ages are the same.
        number = 1 + self.chance.randrange(1000)
        queue, priority = place
        entry_id = f"{(self.began_s - age_s) * 1000}-{number}"
        self.broker.xadd(KEYS.stream(queue, priority), {"id": entry_id, "body": "x"}, id=entry_id)
        self.waiting[place].append((age_s, number))

    def by_now(self, since_turn_s: Mapping[str, float]) -> dict[str, float]:
        """Return turns that were so long ago when this began: what waits has aged since."""
        seconds, microseconds = cast("Any", self.broker.time())
        passed_s = seconds - self.began_s + microseconds / 1e6
        return {
            queue: since_s + passed_s if 0.0 < since_s < NEVER_S else since_s
            for queue, since_s in since_turn_s.items()
        }

    def claim(self, since_turn_s: Mapping[str, float], rows: int) -> Claimed | None:
        wishes = [
            Wish(
                queue=queue,
                max_rows=rows,
                max_bytes=1 << 20,
                max_entries=rows,
                since_turn_s=since_turn_s[queue],
            )
            for queue in self.chance.sample(QUEUES, len(QUEUES))
        ]
        return send(self.broker, self.consumer.claim(wishes))[0]  # type: ignore[no-any-return]

    def expect(self, queue: str | None, rows: int) -> list[tuple[str, Age]]:
        """Return what a claim takes of ``queue``: its streams in order, the oldest first."""
        due: list[tuple[str, Age]] = []
        for priority in PRIORITIES if queue else ():
            assert queue is not None
            waits = self.waiting[queue, priority]
            due += [(KEYS.stream(queue, priority), age) for age in waits[: rows - len(due)]]
        return due

    def settle(self, claimed: Claimed | None) -> None:
        """End what was claimed, or give it back."""
        if claimed is None:
            return
        if self.chance.random() < 0.5:
            send(self.broker, self.consumer.release(QUEUES))
            return
        for entry in claimed.entries:
            self.broker.xack(entry.stream, GROUP, entry.entry_id)
            self.broker.xdel(entry.stream, entry.entry_id)
        for place in self.waiting:
            taken = [e.entry_id for e in claimed.entries if e.stream == KEYS.stream(*place)]
            del self.waiting[place][: len(taken)]

    def age_of(self, entry_id: str) -> Age:
        ms, number = entry_id.split("-")
        return self.began_s - int(ms) // 1000, int(number)


@pytest.mark.parametrize("seed", range(3))
def test_every_claim_is_of_the_queue_whose_turn_it_is(broker: redis.Redis, seed: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet(broker, chance)
    seen: list[str | None] = []
    for _ in range(ROUNDS):
        for _ in range(chance.randint(0, 4)):
            fleet.add()
        # Between whole seconds, for the claim comes a moment after the clock is read.
        since_turn_s = {
            queue: chance.choice([0.0, NEVER_S, chance.randint(5, 900) + 0.5]) for queue in QUEUES
        }
        rows = chance.randint(1, 4)

        turn = whose_turn(fleet.waiting, since_turn_s)
        claimed = fleet.claim(fleet.by_now(since_turn_s), rows)

        assert (claimed.queue if claimed else None) == turn, (since_turn_s, fleet.waiting)
        taken = [(e.stream, fleet.age_of(e.entry_id)) for e in claimed.entries] if claimed else []
        assert taken == fleet.expect(turn, rows)
        fleet.settle(claimed)
        seen.append(turn)
    assert {*QUEUES} <= set(seen)


def fill(broker: redis.Redis, queue: str, jobs: Sequence[str], priority: Priority) -> None:
    for job in jobs:
        broker.xadd(KEYS.stream(queue, priority), {"id": job, "body": "x"})


def claim(broker: redis.Redis, consumer: str, **since_turn_s: float) -> list[str | None]:
    wishes = [
        Wish(queue=f"fleet.{name}", max_rows=2, max_bytes=99, max_entries=2, since_turn_s=age_s)
        for name, age_s in since_turn_s.items()
    ]
    who = Ledger(keys=KEYS, consumer=consumer, result_ttl_s=60, max_attempts=3)
    (claimed,) = send(broker, who.claim(wishes))
    return [entry.job_id for entry in claimed.entries] if claimed else []


def test_what_is_high_in_any_queue_comes_before_what_is_normal_in_another(
    broker: redis.Redis,
) -> None:
    fill(broker, "fleet.a", ["a1", "a2", "a3"], Priority.NORMAL)
    fill(broker, "fleet.b", ["b1"], Priority.LOW)
    fill(broker, "fleet.c", ["c1"], Priority.HIGH)

    taken = [claim(broker, str(number), a=9, b=99, c=0) for number in range(4)]

    assert taken == [["c1"], ["a1", "a2"], ["a3"], ["b1"]]


def test_a_flood_that_has_just_had_its_turn_waits_for_a_job_that_is_younger(
    broker: redis.Redis,
) -> None:
    fill(broker, "fleet.a", [f"a{number}" for number in range(9)], Priority.NORMAL)
    fill(broker, "fleet.b", ["b1"], Priority.NORMAL)

    assert claim(broker, "running a", a=0, b=NEVER_S) == ["b1"]
    assert claim(broker, "fresh", a=NEVER_S, b=NEVER_S) == ["a0", "a1"]


def test_a_job_that_may_not_be_read_now_does_not_hold_up_the_other_queues(
    broker: redis.Redis,
) -> None:
    fill(broker, "fleet.a", ["a1"], Priority.NORMAL)
    fill(broker, "fleet.b", ["b1"], Priority.NORMAL)
    for number in range(delivery.FREE_READS):
        dead = Ledger(keys=KEYS, consumer=f"dead{number}", result_ttl_s=60, max_attempts=3)
        wish = Wish(queue="fleet.a", max_rows=1, max_bytes=99, max_entries=1)
        send(broker, dead.claim([wish]), dead.release(QUEUES, unread=False))
    who = Ledger(keys=KEYS, consumer="who", result_ttl_s=60, max_attempts=3)
    wishes = [
        Wish(queue=queue, max_rows=1, max_bytes=99, max_entries=1)
        for queue in ("fleet.a", "fleet.b")
    ]

    (beside,) = send(broker, who.claim(wishes, running=True))
    (then,) = send(broker, who.claim(wishes))

    assert [entry.job_id for entry in beside.entries] == ["b1"]
    assert [entry.job_id for entry in then.entries] == ["a1"]
