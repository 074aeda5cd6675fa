"""The delivery scripts on a real server: who holds a job, how often it was started, how it
ends.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.contract.cancel import MARK_LIFE_S, cancel_command, cancel_stamped_command
from producer.contract.names import FREE, GROUP, Keys, Priority
from tests.support.servers import TestServer
from workers.batching.closing import Closed
from workers.delivery import ledger as delivery
from workers.delivery.ledger import (
    Claimed,
    End,
    Ending,
    Entry,
    Ledger,
    Letter,
    Note,
    Verdict,
    Wish,
)
from workers.delivery.scripts import Call, send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS = Keys()
QUEUE = "fleet.m"
#: When a call that is meant however late it is read is read too late.
NEVER = 4e9


def ledger(consumer: str) -> Ledger:
    return Ledger(keys=KEYS, consumer=consumer, result_ttl_s=60, max_attempts=3)


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    # Jobs are left unfinished here on purpose.
    client.flushall()


def add(
    broker: redis.Redis,
    job: str | None,
    *,
    rows: int = 1,
    priority: Priority = Priority.NORMAL,
    body: bytes = b"body",
) -> str:
    fields: Any = {"rows": rows, "env": b"env", "body": body}
    if job is not None:
        fields["id"] = job
    added: Any = broker.xadd(KEYS.stream(QUEUE, priority), fields)
    return str(added.decode())


def claim(
    broker: redis.Redis, who: Ledger, *, rows: int = 32, size: int = 1 << 20
) -> Claimed | None:
    wish = Wish(queue=QUEUE, max_rows=rows, max_bytes=size, max_entries=rows)
    return send(broker, who.claim([wish]))[0]  # type: ignore[no-any-return]


def ids(claimed: Claimed | None) -> list[str | None]:
    return [entry.job_id for entry in claimed.entries] if claimed else []


def begin(broker: redis.Redis, who: Ledger, claimed: Claimed) -> list[tuple[Verdict, int]]:
    jobs = [(entry, entry.job_id or "", ()) for entry in claimed.entries]
    return send(broker, who.begin(QUEUE, jobs))[0]  # type: ignore[no-any-return]


def complete(
    broker: redis.Redis, who: Ledger, entries: tuple[Entry, ...], payload: bytes = b"done"
) -> list[Ending]:
    ends = [End(entry=entry, job_id=entry.job_id or "", payload=payload) for entry in entries]
    return send(broker, who.complete(QUEUE, ends))[0]  # type: ignore[no-any-return]


def left(broker: redis.Redis) -> int:
    return sum(broker.xlen(stream) for stream in KEYS.streams(QUEUE))


def test_a_claim_takes_the_highest_priority_first(broker: redis.Redis) -> None:
    add(broker, "low", priority=Priority.LOW)
    add(broker, "normal")
    add(broker, "high", priority=Priority.HIGH)

    claimed = claim(broker, ledger("a"))

    assert ids(claimed) == ["high", "normal", "low"]


def test_a_claim_stops_where_the_next_job_would_not_fit(broker: redis.Redis) -> None:
    for number in range(5):
        add(broker, f"j{number}", rows=3)

    first = claim(broker, ledger("a"), rows=8)
    second = claim(broker, ledger("b"), rows=8)

    assert first is not None
    assert ids(first) == ["j0", "j1"]
    assert first.closed is Closed.FULL
    assert ids(second) == ["j2", "j3"]


def test_a_job_larger_than_the_limit_is_claimed_alone(broker: redis.Redis) -> None:
    add(broker, "small")
    for number in range(3):
        add(broker, f"large{number}", rows=1000)

    taken = [ids(claim(broker, ledger(f"c{number}"))) for number in range(4)]

    assert taken == [["small"], ["large0"], ["large1"], ["large2"]]


def test_a_claim_is_bounded_in_bytes(broker: redis.Redis) -> None:
    for number in range(4):
        add(broker, f"j{number}", body=b"x" * 1000)

    claimed = claim(broker, ledger("a"), size=2500)

    assert claimed is not None
    assert ids(claimed) == ["j0", "j1"]
    assert claimed.closed is Closed.BYTES


def test_two_consumers_never_hold_the_same_job(broker: redis.Redis) -> None:
    for number in range(100):
        add(broker, f"j{number}")

    taken = [ids(claim(broker, ledger(f"c{number % 2}"), rows=7)) for number in range(16)]

    jobs = [job for batch in taken for job in batch]
    assert len(jobs) == 100
    assert len(set(jobs)) == 100


def test_a_completed_job_leaves_nothing_but_its_result(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)

    endings = complete(broker, who, claimed.entries)

    assert endings == [Ending.STORED]
    assert broker.get(KEYS.result("j")) == b"done"
    assert 0 < broker.ttl(KEYS.result("j")) <= 60
    assert left(broker) == 0
    assert not broker.exists(KEYS.journal(QUEUE))
    assert broker.xpending(KEYS.stream(QUEUE, Priority.NORMAL), GROUP)["pending"] == 0


def test_given_back_jobs_are_claimed_before_new_ones_and_uncounted(broker: redis.Redis) -> None:
    add(broker, "old")
    first, second = ledger("a"), ledger("b")
    claim(broker, first)
    add(broker, "new")

    released = send(broker, first.release([QUEUE]))[0]

    claimed = claim(broker, second)
    assert released == 1
    assert claimed is not None
    assert ids(claimed) == ["old", "new"]
    assert begin(broker, second, claimed) == [(Verdict.RUN, 0), (Verdict.RUN, 0)]


def test_release_keeps_what_it_is_told_to_keep(broker: redis.Redis) -> None:
    for number in range(3):
        add(broker, f"j{number}")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None

    released = send(broker, who.release([QUEUE], keep=claimed.entries[:1]))[0]

    assert released == 2
    assert ids(claim(broker, ledger("b"))) == ["j1", "j2"]


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


def test_who_lost_a_claim_can_neither_begin_nor_complete_it(broker: redis.Redis) -> None:
    add(broker, "j")
    slow, heir = ledger("slow"), ledger("heir")
    claimed = claim(broker, slow)
    assert claimed is not None
    begin(broker, slow, claimed)
    time.sleep(0.05)
    taken = send(
        broker, delivery.take_over(KEYS, [QUEUE], claim_ttl_s=0.02, silent_s=60, until_unix_s=NEVER)
    )[0]
    again = claim(broker, heir)
    assert again is not None

    verdicts = begin(broker, slow, claimed)
    endings = complete(broker, slow, claimed.entries, b"late")

    assert taken == 1
    assert verdicts == [(Verdict.LOST, 0)]
    assert endings == [Ending.LOST]
    assert broker.get(KEYS.result("j")) is None
    assert begin(broker, heir, again) == [(Verdict.ALONE, 1)]
    assert complete(broker, heir, again.entries) == [Ending.STORED]


def test_a_renewed_claim_is_not_taken_over(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claim(broker, who)
    time.sleep(0.1)

    renewed = send(broker, delivery.renew(KEYS, [QUEUE], ["a", "nobody"]))[0]
    taken = send(
        broker, delivery.take_over(KEYS, [QUEUE], claim_ttl_s=0.08, silent_s=60, until_unix_s=NEVER)
    )[0]

    assert renewed == 1
    assert taken == 0


def test_a_take_over_that_a_stopped_server_reads_late_takes_nothing(
    server: TestServer, broker: redis.Redis
) -> None:
    add(broker, "j")
    claim(broker, ledger("slow"))

    def call(until_unix_s: float) -> Call[int]:
        return delivery.take_over(
            KEYS, [QUEUE], claim_ttl_s=0.5, silent_s=60, until_unix_s=until_unix_s
        )

    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, socket_timeout=0.3, retry=once) as impatient:
        send(impatient, call(NEVER))  # The server knows the script from now on.
        server.freeze()
        try:
            with pytest.raises(redis.TimeoutError):
                send(impatient, call(time.time() + 0.2))
            time.sleep(0.5)
        finally:
            server.thaw()

    # Another connection is read after the one that waited.
    for _ in range(10):
        broker.ping()
    pending: Any = broker.xpending_range(KEYS.stream(QUEUE, Priority.NORMAL), GROUP, "-", "+", 10)
    assert [entry["consumer"] for entry in pending] == [b"slow"]


def test_a_renewal_does_not_steal_back_what_was_taken_over(broker: redis.Redis) -> None:
    add(broker, "j")
    claim(broker, ledger("slow"))
    time.sleep(0.05)
    send(
        broker, delivery.take_over(KEYS, [QUEUE], claim_ttl_s=0.02, silent_s=60, until_unix_s=NEVER)
    )

    renewed = send(broker, delivery.renew(KEYS, [QUEUE], ["slow"]))[0]

    assert renewed == 0
    assert ids(claim(broker, ledger("heir"))) == ["j"]


def test_empty_consumers_are_forgotten_and_others_are_not(broker: redis.Redis) -> None:
    add(broker, "j")
    stream = KEYS.stream(QUEUE, Priority.NORMAL)
    claim(broker, ledger("holds"))
    claim(broker, ledger("empty"))
    time.sleep(0.05)

    send(
        broker, delivery.take_over(KEYS, [QUEUE], claim_ttl_s=60, silent_s=0.02, until_unix_s=NEVER)
    )

    names = {consumer["name"] for consumer in broker.xinfo_consumers(stream, GROUP)}
    assert names == {b"holds"}


def test_an_outcome_is_stored_once_whoever_comes_first(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)
    broker.set(KEYS.result("j"), b"revoked before")

    endings = complete(broker, who, claimed.entries)

    assert endings == [Ending.KEPT]
    assert broker.get(KEYS.result("j")) == b"revoked before"
    assert left(broker) == 0


@pytest.mark.parametrize("key", [KEYS.result("j"), KEYS.fence("j")])
def test_a_job_that_is_done_is_dropped_without_a_start(broker: redis.Redis, key: str) -> None:
    add(broker, "j")
    broker.set(key, b"x")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None

    verdicts = begin(broker, who, claimed)

    assert verdicts == [(Verdict.DONE, 0)]
    assert left(broker) == 0


def test_a_repeated_publish_runs_once(broker: redis.Redis) -> None:
    add(broker, "same")
    add(broker, "same")
    who, other = ledger("a"), ledger("b")
    first = claim(broker, who, rows=1)
    assert first is not None
    assert begin(broker, who, first) == [(Verdict.RUN, 0)]
    second = claim(broker, other)
    assert second is not None

    verdicts = begin(broker, other, second)

    assert verdicts == [(Verdict.DUPLICATE, 0)]
    assert left(broker) == 1
    assert complete(broker, who, first.entries) == [Ending.STORED]


def test_a_repeated_publish_in_one_batch_runs_once(broker: redis.Redis) -> None:
    add(broker, "same")
    add(broker, "same")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None

    verdicts = begin(broker, who, claimed)

    assert verdicts == [(Verdict.RUN, 0), (Verdict.DUPLICATE, 0)]
    assert left(broker) == 1


def test_a_cancelled_job_is_not_started_and_stays_ours_to_end(broker: redis.Redis) -> None:
    add(broker, "j")
    broker.set(KEYS.cancelled("j"), 1)
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None

    verdicts = begin(broker, who, claimed)

    assert verdicts == [(Verdict.CANCELLED, 0)]
    assert not broker.exists(KEYS.journal(QUEUE))
    assert complete(broker, who, claimed.entries, b"revoked") == [Ending.STORED]


def test_a_stamp_cancels_every_job_that_carries_it(broker: redis.Redis) -> None:
    add(broker, "stamped")
    add(broker, "other")
    broker.execute_command(*cancel_stamped_command(KEYS, [("tenant", "7")]))
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    stamps = [[("colour", "red"), ("tenant", "7")], [("tenant", "8")]]

    jobs = [(e, e.job_id or "", s) for e, s in zip(claimed.entries, stamps, strict=True)]
    verdicts = send(broker, who.begin(QUEUE, jobs))[0]

    assert verdicts == [(Verdict.CANCELLED, 0), (Verdict.RUN, 0)]
    assert 0 < broker.ttl(KEYS.cancelled_stamp("tenant", "7")) <= MARK_LIFE_S


def test_a_mark_ends_with_its_job_and_none_is_set_after_it(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)
    while_it_runs = broker.execute_command(*cancel_command(KEYS, ["j"]))

    endings = complete(broker, who, claimed.entries)

    assert while_it_runs == [1]
    assert endings == [Ending.STORED]
    assert not broker.exists(KEYS.cancelled("j"))
    assert broker.execute_command(*cancel_command(KEYS, ["j", "waits"])) == [0, 1]
    assert not broker.exists(KEYS.cancelled("j"))


def test_a_fence_stands_for_a_result_on_another_server(broker: redis.Redis) -> None:
    add(broker, "j")
    who = dataclasses.replace(ledger("a"), apart=True)
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)
    end = End(entry=claimed.entries[0], job_id="j", payload=None)
    send(broker, who.complete(QUEUE, [end]))
    add(broker, "j")

    copy = claim(broker, who)

    assert copy is not None
    assert begin(broker, who, copy) == [(Verdict.DONE, 0)]
    assert 0 < broker.ttl(KEYS.fence("j")) <= 60


def test_a_dead_letter_keeps_the_entry_and_says_why(broker: redis.Redis) -> None:
    add(broker, "j", body=b"\x00raw")
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    letter = Letter(code="WORKER_LOST", reason="it died", attempts=3, worker="w")

    buried = send(broker, who.bury(QUEUE, claimed.entries[0], "j", letter, payload=b"failure"))[0]

    assert buried is True
    letters: Any = broker.xrange(KEYS.dead(QUEUE))
    ((_, fields),) = letters
    assert fields[b"code"] == b"WORKER_LOST"
    assert fields[b"attempts"] == b"3"
    assert fields[b"original:body"] == b"\x00raw"
    assert broker.get(KEYS.result("j")) == b"failure"
    assert left(broker) == 0


def test_clients_are_told_once_for_each_batch(broker: redis.Redis) -> None:
    for job in ("j0", "j1", "j2"):
        add(broker, job)
    who = ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    begin(broker, who, claimed)
    listener = broker.pubsub()
    listener.subscribe(KEYS.replies("me"))
    listener.get_message(timeout=1)

    ends = [
        End(entry=entry, job_id=entry.job_id or "", payload=b"done", reply_to=reply_to)
        for entry, reply_to in zip(claimed.entries, ["me", None, "me"], strict=True)
    ]
    send(broker, who.complete(QUEUE, ends))

    message = listener.get_message(timeout=5)
    assert message is not None
    assert message["data"] == b"j0,j2"
    assert listener.get_message(timeout=0.2) is None
    listener.close()


def test_delayed_jobs_move_into_their_stream_when_they_are_due(broker: redis.Redis) -> None:
    for job, due_s in (("now", 10.0), ("later", 99.0)):
        fields = {"id": job, "rows": "1", "env": b"\x80", "body": b"\xff\x00", "priority": "high"}
        broker.zadd(KEYS.delayed(QUEUE), {msgpack.packb(fields, use_bin_type=False): due_s})

    moved = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=50.0))[0]

    moved_entries: Any = broker.xrange(KEYS.stream(QUEUE, Priority.HIGH))
    ((_, entry),) = moved_entries
    assert moved == 1
    assert entry == {b"id": b"now", b"rows": b"1", b"env": b"\x80", b"body": b"\xff\x00"}
    assert broker.zcard(KEYS.delayed(QUEUE)) == 1


@pytest.mark.parametrize("packed", [{}, [1, 2], {"id": True}, {"id": ["x"]}], ids=repr)
def test_a_delayed_member_that_is_no_entry_holds_no_other_up(
    broker: redis.Redis, packed: Any
) -> None:
    fields = {"id": "j", "rows": "1", "env": b"e", "body": b"b", "priority": "normal"}
    for score, member in enumerate((packed, fields)):
        broker.zadd(KEYS.delayed(QUEUE), {msgpack.packb(member, use_bin_type=False): score})

    moved = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=50.0))[0]

    assert moved == 2
    assert broker.zcard(KEYS.delayed(QUEUE)) == 0
    assert broker.xlen(KEYS.stream(QUEUE, Priority.NORMAL)) >= 1


def test_scripts_are_loaded_again_after_the_server_forgot_them(broker: redis.Redis) -> None:
    add(broker, "j")
    broker.script_flush()

    claimed = claim(broker, ledger("a"))

    assert ids(claimed) == ["j"]


def test_groups_are_created_once(broker: redis.Redis) -> None:
    created = send(broker, delivery.ensure_groups(KEYS, [QUEUE, "fleet.new"]))[0]

    assert created == 3
    groups = [broker.xinfo_groups(stream) for stream in KEYS.streams(QUEUE)]

    assert [len(group) for group in groups] == [1, 1, 1]


def test_everything_on_the_worker_path_works_on_a_full_server(broker: redis.Redis) -> None:
    for number in range(4):
        add(broker, f"j{number}", body=b"x" * 1000)
    dead, who = ledger("dead"), ledger("a")
    broker.config_set("maxmemory", 1)
    try:
        lost = claim(broker, dead, rows=1)
        assert lost is not None
        begin(broker, dead, lost)
        send(broker, dead.unfinished(QUEUE, Note.FORGIVE), dead.release([QUEUE], remove=True))
        assert send(broker, delivery.ensure_groups(KEYS, ["fleet.new"])) == [3]
        assert broker.execute_command(*cancel_command(KEYS, ["j2"])) == [1]
        claimed = claim(broker, who)
        assert claimed is not None
        verdicts = begin(broker, who, claimed)
        send(broker, delivery.renew(KEYS, [QUEUE], ["a"]))
        send(
            broker,
            delivery.take_over(KEYS, [QUEUE], claim_ttl_s=60, silent_s=60, until_unix_s=NEVER),
        )
        endings = complete(broker, who, claimed.entries[:3])
        letter = Letter(code="BAD_MESSAGE", reason="r", attempts=0, worker="w")
        buried = send(
            broker, who.bury(QUEUE, claimed.entries[3], "j3", letter, payload=b"failure")
        )[0]
    finally:
        broker.config_set("maxmemory", 0)

    assert [verdict for verdict, _ in verdicts] == [
        Verdict.RUN,
        Verdict.RUN,
        Verdict.CANCELLED,
        Verdict.RUN,
    ]
    assert endings == [Ending.STORED] * 3
    assert buried is True
    assert left(broker) == 0


def test_given_back_is_a_consumer_nobody_else_is(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claim(broker, who)
    send(broker, who.release([QUEUE], remove=True))

    names = {c["name"] for c in broker.xinfo_consumers(KEYS.stream(QUEUE, Priority.NORMAL), GROUP)}

    assert names == {FREE.encode()}
