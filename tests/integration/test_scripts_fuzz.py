"""Random calls of the delivery scripts by several consumers, beside a model of what may be true."""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import pytest
import redis

from producer.contract.cancel import cancel_command
from producer.contract.names import FREE, GROUP, PRIORITIES, Keys
from tests.support.delivery_model import Model, Place
from workers.batching.closing import Closed
from workers.delivery import ledger as delivery
from workers.delivery.ledger import End, Ending, Entry, Ledger, Letter, Note, Verdict, Wish
from workers.delivery.scripts import Call, send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS: Final = Keys()
QUEUE: Final = "fleet.m"
#: When a call that is meant however late it is read is read too late.
NEVER: Final = 4e9
STREAMS: Final = KEYS.streams(QUEUE)
MAX_ATTEMPTS: Final = 2
STEPS: Final = 800


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    client.flushall()


class Consumer:
    """A process that claims: what it believes to hold, which may not be so any more."""

    def __init__(self, name: str) -> None:
        self.ledger = Ledger(keys=KEYS, consumer=name, result_ttl_s=600, max_attempts=MAX_ATTEMPTS)
        self.claimed: dict[Place, Entry] = {}
        #: What may be ended: begun, cancelled, or exhausted.
        self.begun: dict[Place, Entry] = {}
        self.exhausted: dict[Place, Entry] = {}

    @property
    def name(self) -> str:
        return self.ledger.consumer

    def known(self) -> list[Entry]:
        return [*self.claimed.values(), *self.begun.values(), *self.exhausted.values()]

    def forget(self) -> None:
        self.claimed.clear()
        self.begun.clear()
        self.exhausted.clear()


class Fuzz:
    """One random run of calls."""

    def __init__(self, broker: redis.Redis, seed: int) -> None:
        self.broker, self.chance = broker, random.Random(seed)
        self.model = Model(max_attempts=MAX_ATTEMPTS)
        self._named = 0
        self.consumers = [self._consumer() for _ in range(3)]
        #: Consumers whose parent holds them for dead, and has not freed yet what they held.
        self.dead: list[Consumer] = []
        #: Those whose claims were freed.
        self.freed: list[Consumer] = []
        #: Jobs whose outcome somebody else stored.
        self.ended_elsewhere: set[str] = set()
        #: How often an outcome of each job was stored by a script.
        self.stored: collections.Counter[str] = collections.Counter()
        self.acts: dict[Callable[[], None], int] = {
            self.publish: 24,
            self.publish_again: 12,
            self.claim: 30,
            self.begin: 30,
            self.complete: 25,
            self.bury: 4,
            self.release: 6,
            self.resync: 3,
            self.die: 8,
            self.free_a_dead_one: 5,
            self.end_too_late: 5,
            self.take_over: 5,
            self.renew: 5,
            self.read: 10,
            self.cancel: 6,
            self.end_elsewhere: 4,
        }

    def step(self) -> None:
        (act,) = self.chance.choices(list(self.acts), list(self.acts.values()))
        act()
        self.check()

    def finish(self) -> None:
        """Let one healthy consumer end what is left."""
        self.take_over()
        self.consumers = [self._consumer()]
        for _ in range(20 * len(self.model.owner) + 20):
            if not self.model.owner:
                return
            self.claim()
            self.begin()
            self.complete()
            self.bury()
            self.release()
            self.check()
        raise AssertionError(f"left: {self.model.owner}")

    def check(self) -> None:
        """Assert that Redis says what the model says."""
        assert self._held() == {p: who for p, who in self.model.owner.items() if who is not None}
        living = {
            (stream, entry_id.decode())
            for stream in STREAMS
            for entry_id, _ in cast("Any", self.broker.xrange(stream))
        }
        assert living == self.model.owner.keys()
        journal: Any = self.broker.hkeys(KEYS.journal(QUEUE))
        assert {job.decode() for job in journal} == self.model.starts.keys()

    def _held(self) -> dict[Place, str]:
        """Return who holds what, as Redis says."""
        return {
            (stream, row["message_id"].decode()): row["consumer"].decode()
            for stream in STREAMS
            for row in cast("Any", self.broker.xpending_range(stream, GROUP, "-", "+", 10_000))
        }

    # -- what apps do

    def publish(self) -> None:
        self._add(f"j{len(set(self.model.job_of.values()))}")

    def publish_again(self) -> None:
        if self.model.job_of:
            self._add(self.chance.choice(list(self.model.job_of.values())))

    def read(self) -> None:
        """A client reads an outcome, deletes it, and leaves a fence."""
        if self.model.ended:
            job = self.chance.choice(sorted(self.model.ended))
            self.broker.delete(KEYS.result(job))
            self.broker.set(KEYS.fence(job), 1)

    def cancel(self) -> None:
        if self.model.job_of:
            job = self.chance.choice(list(self.model.job_of.values()))
            (marked,) = self.broker.execute_command(*cancel_command(KEYS, [job]))
            assert marked == (job not in self.model.ended)
            if marked:
                self.model.cancelled.add(job)

    def end_elsewhere(self) -> None:
        """Somebody stores an outcome past the scripts while the job runs, as Celery's own can; and
        it may be read at once.
        """
        running = sorted(self.model.begun_by.keys() - self.model.ended)
        if running:
            job = self.chance.choice(running)
            key = self.chance.choice((KEYS.result, KEYS.fence))(job)
            self.broker.set(key, b"revoked")
            self.model.ended.add(job)
            self.ended_elsewhere.add(job)

    # -- what instances do

    def claim(self) -> None:
        consumer = self.chance.choice(self.consumers)
        rows = self.chance.randint(1, 8)
        wish = Wish(queue=QUEUE, max_rows=rows, max_bytes=1 << 20, max_entries=rows)
        claimed = self._ask(consumer.ledger.claim([wish]))
        places = [_place(entry) for entry in claimed.entries] if claimed else []
        for place in places:
            assert self.model.owner[place] in (None, FREE)
            self.model.owner[place] = consumer.name
        self._note_what_did_not_fit()
        if claimed:
            suspects = [p for p in places if self.model.job_of[p] in self.model.starts]
            assert len(places) == 1 or not suspects
            assert len(places) == 1 or sum(entry.rows for entry in claimed.entries) <= rows
            assert not suspects or claimed.closed is Closed.ALONE
            consumer.claimed |= dict(zip(places, claimed.entries, strict=True))

    def _note_what_did_not_fit(self) -> None:
        """A claim looks at one more entry than it takes; that one was given back."""
        given = [p for p, who in self._held().items() if self.model.owner[p] is None]
        assert len(given) <= 1
        for place in given:
            self.model.owner[place] = FREE

    def begin(self) -> None:
        consumer = self.chance.choice(self.consumers)
        places = self._some(consumer.claimed)
        if not places:
            return
        jobs = [(consumer.claimed[place], self.model.job_of[place], ()) for place in places]
        verdicts = self._ask(consumer.ledger.begin(QUEUE, jobs))
        self.model.check_verdicts(consumer.name, places, verdicts)
        for place, (verdict, _) in zip(places, verdicts, strict=True):
            if verdict is Verdict.LATER:
                continue
            entry = consumer.claimed.pop(place)
            if verdict in (Verdict.RUN, Verdict.ALONE, Verdict.CANCELLED):
                consumer.begun[place] = entry
            elif verdict in (Verdict.EXHAUSTED, Verdict.TIMEOUT):
                consumer.exhausted[place] = entry

    def complete(self, consumer: Consumer | None = None) -> None:
        consumer = consumer or self.chance.choice(self.consumers)
        places = self._some(consumer.begun)
        if not places:
            return
        jobs = [self.model.job_of[place] for place in places]
        ends = [
            End(entry=consumer.begun.pop(place), job_id=job, payload=b"answer")
            for place, job in zip(places, jobs, strict=True)
        ]
        for place, ending in zip(
            places, self._ask(consumer.ledger.complete(QUEUE, ends)), strict=True
        ):
            self._ended(place, ending, consumer)

    def bury(self, consumer: Consumer | None = None) -> None:
        consumer = consumer or self.chance.choice(self.consumers)
        for place in self._some(consumer.exhausted):
            letter = Letter(code="WORKER_LOST", reason="it died", attempts=2, worker="w")
            entry, job = consumer.exhausted.pop(place), self.model.job_of[place]
            buried = self._ask(consumer.ledger.bury(QUEUE, entry, job, letter, payload=b"failure"))
            ours = self.model.owner.get(place) == consumer.name
            assert buried is ours
            if ours:
                self._ended(
                    place, Ending.KEPT if job in self.model.ended else Ending.STORED, consumer
                )

    def release(self) -> None:
        """Give back what is not to be run soon."""
        consumer = self.chance.choice(self.consumers)
        kept = [*consumer.begun, *consumer.exhausted, *self._some(consumer.claimed)]
        keep = [entry for entry in consumer.known() if _place(entry) in kept]
        given = [place for place in self.model.held_by(consumer.name) if place not in kept]
        assert self._ask(consumer.ledger.release([QUEUE], keep=keep)) == len(given)
        for place in given:
            self.model.owner[place] = FREE
        consumer.claimed = {p: e for p, e in consumer.claimed.items() if p in kept}

    def resync(self) -> None:
        """A reply was lost: what was begun unseen was never started; give everything back."""
        consumer = self.chance.choice(self.consumers)
        self._free(consumer, note=Note.FORGIVE, remove=False)
        consumer.forget()

    def renew(self) -> None:
        consumer = self.chance.choice(self.consumers)
        renewed = self._ask(delivery.renew(KEYS, [QUEUE], [consumer.name]))
        assert renewed == len(self.model.held_by(consumer.name))

    # -- what parents do

    def die(self) -> None:
        consumer = self.chance.choice(self.consumers)
        self.consumers.remove(consumer)
        self.dead.append(consumer)
        self.consumers.append(self._consumer())

    def free_a_dead_one(self) -> None:
        if self.dead:
            consumer = self.dead.pop(self.chance.randrange(len(self.dead)))
            note = self.chance.choice((None, None, Note.FORGIVE, Note.TIMEOUT))
            self._free(consumer, note=note, remove=True)
            self.freed.append(consumer)

    def end_too_late(self) -> None:
        """One that was held for dead goes on with what it ran."""
        if self.freed:
            consumer = self.freed.pop(self.chance.randrange(len(self.freed)))
            self.complete(consumer)
            self.bury(consumer)

    def take_over(self) -> None:
        """Everything that is held was silent for too long, also what slow processes hold."""
        time.sleep(0.005)
        held = [place for place, owner in self.model.owner.items() if owner not in (None, FREE)]
        call = delivery.take_over(
            KEYS, [QUEUE], claim_ttl_s=0.002, silent_s=600, until_unix_s=NEVER
        )
        assert self._ask(call) == len(held)
        for place in held:
            self.model.owner[place] = FREE

    # -- the rest

    def _free(self, consumer: Consumer, *, note: Note | None, remove: bool) -> None:
        if note is not None:
            place = self.chance.choice(list(self.model.owner) or [(STREAMS[0], "0-0")])
            one = note is Note.TIMEOUT or self.chance.random() < 0.5
            entry = " ".join(place) if one else ""
            noted = self._ask(consumer.ledger.unfinished(QUEUE, note, entry=entry))
            if note is Note.FORGIVE:
                assert noted == self.model.forgive(consumer.name, place if one else None)
            else:
                assert noted == self.model.time_out(consumer.name, place)
        held = self.model.held_by(consumer.name)
        release = consumer.ledger.release([QUEUE], remove=remove, unread=note is Note.FORGIVE)
        assert self._ask(release) == len(held)
        for place in held:
            self.model.owner[place] = FREE

    def _ended(self, place: Place, ending: Ending, consumer: Consumer) -> None:
        job = self.model.job_of[place]
        if self.model.owner.get(place) != consumer.name:
            assert ending is Ending.LOST
            return
        assert ending is (Ending.KEPT if job in self.model.ended else Ending.STORED)
        self.stored[job] += ending is Ending.STORED
        self.model.end(place)

    def _add(self, job: str) -> None:
        stream = KEYS.stream(QUEUE, self.chance.choice(PRIORITIES))
        fields: Any = {"id": job, "rows": self.chance.randint(1, 3), "env": b"e", "body": b"b"}
        added: Any = self.broker.xadd(stream, fields)
        place = (stream, added.decode())
        self.model.job_of[place], self.model.owner[place] = job, None

    def _consumer(self) -> Consumer:
        self._named += 1
        return Consumer(f"c{self._named}")

    def _some(self, places: dict[Place, Entry]) -> list[Place]:
        return self.chance.sample(list(places), self.chance.randint(0, len(places)))

    def _ask(self, call: Call[Any]) -> Any:
        return send(self.broker, call)[0]


def _place(entry: Entry) -> Place:
    return (entry.stream, entry.entry_id)


@pytest.mark.parametrize("seed", range(3))
def test_whoever_calls_what_each_job_ends_once_and_is_held_by_one(
    broker: redis.Redis, seed: int
) -> None:
    fuzz = Fuzz(broker, seed)
    with broker.pubsub() as answers:
        answers.psubscribe(f"{KEYS.result('*')}")
        answers.get_message(timeout=5)

        for _ in range(STEPS):
            fuzz.step()
        fuzz.finish()

        told: collections.Counter[str] = collections.Counter()
        while (message := answers.get_message(timeout=0.1)) is not None:
            told[message["channel"].decode().removeprefix(KEYS.result(""))] += 1
    jobs = set(fuzz.model.job_of.values())
    assert fuzz.stored == told == collections.Counter(jobs - fuzz.ended_elsewhere)
    assert not fuzz.model.starts
