"""How a job ends, by the scripts on a real server: once, whoever comes first and whatever else
happens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
import redis

from producer.contract.cancel import MARK_LIFE_S, cancel_command, cancel_stamped_command
from producer.contract.names import GROUP, Priority
from tests.support.ledgers import KEYS, NEVER, QUEUE, add, begin, claim, complete, ids, ledger, left
from workers.delivery import ledger as delivery
from workers.delivery.ledger import (
    End,
    Ending,
    Letter,
    Note,
    Verdict,
)
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]


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
    assert listener.get_message(timeout=5)

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
