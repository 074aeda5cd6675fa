"""How often a job was started, by the scripts on a real server: what counts, and what it means."""

from __future__ import annotations

import pytest
import redis

from tests.support.ledgers import KEYS, QUEUE, add, begin, claim, complete, ids, ledger
from workers.batching.closing import Closed
from workers.delivery.ledger import (
    Ending,
    Note,
    Verdict,
    Wish,
)
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]


def test_jobs_of_a_batch_that_died_run_alone_one_after_the_other(broker: redis.Redis) -> None:
    for number in range(3):
        add(broker, f"j{number}")
    dead = ledger("dead")
    first = claim(broker, dead)
    assert first is not None
    begin(broker, dead, first)
    send(broker, dead.release([QUEUE], remove=True))
    add(broker, "fresh")

    seen = []
    for _ in range(4):
        who = ledger("heir")
        claimed = claim(broker, who)
        assert claimed is not None
        seen.append((ids(claimed), begin(broker, who, claimed), claimed.closed))
        complete(broker, who, claimed.entries)

    alone = [(Verdict.ALONE, 1)]
    assert seen == [
        (["j0"], alone, Closed.ALONE),
        (["j1"], alone, Closed.ALONE),
        (["j2"], alone, Closed.ALONE),
        (["fresh"], [(Verdict.RUN, 0)], Closed.EMPTY),
    ]


def test_a_suspect_behind_fresh_jobs_answers_later_and_is_not_counted(
    broker: redis.Redis,
) -> None:
    add(broker, "suspect")
    dead, who = ledger("dead"), ledger("a")
    first = claim(broker, dead)
    assert first is not None
    begin(broker, dead, first)
    add(broker, "fresh")
    fresh = claim(broker, who)
    assert fresh is not None
    send(broker, dead.release([QUEUE], remove=True))
    suspect = claim(broker, who)
    assert suspect is not None

    jobs = [(entry, entry.job_id or "", ()) for entry in (*fresh.entries, *suspect.entries)]
    verdicts = send(broker, who.begin(QUEUE, jobs))[0]

    assert verdicts == [(Verdict.RUN, 0), (Verdict.LATER, 1)]
    record = broker.hget(KEYS.journal(QUEUE), "suspect")
    assert record is not None
    assert record.split()[2] == b"1"


def test_a_job_is_exhausted_after_its_third_start(broker: redis.Redis) -> None:
    add(broker, "poison")

    verdicts = []
    for number in range(4):
        who = ledger(f"c{number}")
        claimed = claim(broker, who)
        assert claimed is not None
        verdicts += begin(broker, who, claimed)
        send(broker, who.release([QUEUE], remove=True))

    assert verdicts == [
        (Verdict.RUN, 0),
        (Verdict.ALONE, 1),
        (Verdict.ALONE, 2),
        (Verdict.EXHAUSTED, 3),
    ]


def test_a_start_that_we_ended_is_forgiven(broker: redis.Redis) -> None:
    add(broker, "j")
    who, heir = ledger("a"), ledger("b")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)

    forgiven, released = send(
        broker, who.unfinished(QUEUE, Note.FORGIVE), who.release([QUEUE], remove=True)
    )

    again = claim(broker, heir)
    assert (forgiven, released) == (1, 1)
    assert again is not None
    assert begin(broker, heir, again) == [(Verdict.RUN, 0)]


def test_one_start_can_be_forgiven_beside_others_that_count(broker: redis.Redis) -> None:
    for job in ("running", "ahead"):
        add(broker, job)
    who, heir = ledger("a"), ledger("b")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)
    running, ahead = claimed.entries

    forgiven, released = send(
        broker,
        who.unfinished(QUEUE, Note.FORGIVE, entry=ahead.place),
        who.release([QUEUE], keep=[running]),
    )

    again = claim(broker, heir)
    assert (forgiven, released) == (1, 1)
    assert again is not None
    assert ids(again) == ["ahead"]
    assert begin(broker, heir, again) == [(Verdict.RUN, 0)]
    assert complete(broker, who, (running,)) == [Ending.STORED]


def test_a_job_that_ran_alone_for_too_long_is_not_run_again(broker: redis.Redis) -> None:
    add(broker, "j")
    who, heir = ledger("a"), ledger("b")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)

    (entry,) = claimed.entries
    noted, _ = send(
        broker, who.unfinished(QUEUE, Note.TIMEOUT, entry=entry.place), who.release([QUEUE])
    )

    again = claim(broker, heir)
    assert noted == 1
    assert again is not None
    assert begin(broker, heir, again) == [(Verdict.TIMEOUT, 1)]


def test_a_start_that_is_forgiven_twice_is_taken_back_once(broker: redis.Redis) -> None:
    add(broker, "poison")
    for consumer in ("dead", "a"):
        who = ledger(consumer)
        claimed = claim(broker, who)
        assert claimed is not None
        begin(broker, who, claimed)
        if consumer == "dead":
            send(broker, who.release([QUEUE], remove=True, unread=False))

    forgiven = send(
        broker, who.unfinished(QUEUE, Note.FORGIVE), who.unfinished(QUEUE, Note.FORGIVE)
    )

    send(broker, who.release([QUEUE]))
    again = claim(broker, ledger("b"))
    assert forgiven == [1, 0]
    assert again is not None
    assert begin(broker, ledger("b"), again) == [(Verdict.ALONE, 1)]


def test_a_start_of_who_lost_the_claim_stays_counted(broker: redis.Redis) -> None:
    add(broker, "j")
    slow, heir = ledger("slow"), ledger("heir")
    claimed = claim(broker, slow)
    assert claimed is not None
    begin(broker, slow, claimed)
    send(broker, slow.release([QUEUE]))

    (forgiven,) = send(broker, slow.unfinished(QUEUE, Note.FORGIVE))

    again = claim(broker, heir)
    assert forgiven == 0
    assert again is not None
    assert begin(broker, heir, again) == [(Verdict.ALONE, 1)]


def test_jobs_that_ran_together_for_too_long_run_alone(broker: redis.Redis) -> None:
    for job in ("slow", "innocent"):
        add(broker, job)
    who, heir = ledger("a"), ledger("b")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)

    noted, _ = send(broker, who.unfinished(QUEUE, Note.TIMEOUT), who.release([QUEUE]))

    again = claim(broker, heir)
    assert noted == 0
    assert again is not None
    assert begin(broker, heir, again) == [(Verdict.ALONE, 1)]


def test_a_job_whose_readers_died_is_read_alone_and_never_beside_a_batch(
    broker: redis.Redis,
) -> None:
    for job in ("poison", "innocent"):
        add(broker, job)
    reads = []
    for number in range(3):
        who = ledger(f"reader{number}")
        claimed = claim(broker, who)
        assert claimed is not None
        reads.append([(entry.job_id, entry.reads) for entry in claimed.entries])
        send(broker, who.release([QUEUE], remove=True, unread=False))

    wish = Wish(queue=QUEUE, max_rows=32, max_bytes=1 << 20, max_entries=32)
    beside = send(broker, ledger("busy").claim([wish], running=True))[0]

    assert reads == [
        [("poison", 1), ("innocent", 1)],
        [("poison", 2), ("innocent", 2)],
        [("poison", 3)],
    ]
    assert beside is None
    alone = claim(broker, ledger("idle"))
    assert alone is not None
    assert [(entry.job_id, entry.reads) for entry in alone.entries] == [("poison", 4)]
    assert alone.closed is Closed.ALONE


def test_a_claim_that_a_living_instance_gives_back_was_no_read(broker: redis.Redis) -> None:
    add(broker, "j")
    for number in range(5):
        who = ledger(f"a{number}")
        claim(broker, who)
        send(broker, who.release([QUEUE]))
    add(broker, "large", rows=32)
    claim(broker, ledger("b"), rows=32)

    send(broker, ledger("b").release([QUEUE]))
    claimed = claim(broker, ledger("c"), rows=1)

    assert claimed is not None
    assert [(entry.job_id, entry.reads) for entry in claimed.entries] == [("j", 1)]
    last = claim(broker, ledger("d"), rows=32)
    assert last is not None
    assert [(entry.job_id, entry.reads) for entry in last.entries] == [("large", 1)]
