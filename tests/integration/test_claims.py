"""Who holds a job, by the scripts on a real server: claimed, given back, renewed, taken over."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import pytest
import redis

from producer.contract.names import FREE, GROUP, Priority
from tests.support.ledgers import KEYS, NEVER, QUEUE, add, begin, claim, complete, ids, ledger
from tests.support.servers import TestServer
from workers.batching.closing import Closed
from workers.delivery import ledger as delivery
from workers.delivery.ledger import (
    Ending,
    Verdict,
)
from workers.delivery.scripts import Call, send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]


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
    time.sleep(0.5)

    # In one go: between the two it would grow as old again as the machine is busy.
    renewed, taken = send(
        broker,
        delivery.renew(KEYS, [QUEUE], ["a", "nobody"]),
        delivery.take_over(KEYS, [QUEUE], claim_ttl_s=0.4, silent_s=60, until_unix_s=NEVER),
    )

    assert renewed == 1
    assert taken == 0


def test_a_take_over_that_a_stopped_server_reads_late_takes_nothing(
    server: TestServer, broker: redis.Redis
) -> None:
    add(broker, "j")
    claim(broker, ledger("slow"))

    def call(*, claim_ttl_s: float, until_unix_s: float) -> Call[int]:
        return delivery.take_over(
            KEYS, [QUEUE], claim_ttl_s=claim_ttl_s, silent_s=60, until_unix_s=until_unix_s
        )

    # The server knows the script from now on.
    send(broker, call(claim_ttl_s=60, until_unix_s=NEVER))
    with server.client() as late, concurrent.futures.ThreadPoolExecutor() as threads:
        late.ping()
        server.freeze()
        try:
            soon = call(claim_ttl_s=0.3, until_unix_s=time.time() + 0.2)
            sent = threads.submit(send, late, soon)
            time.sleep(0.7)
        finally:
            server.thaw()
        taken = sent.result(timeout=10)

    assert taken == [0]
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


def test_given_back_is_a_consumer_nobody_else_is(broker: redis.Redis) -> None:
    add(broker, "j")
    who = ledger("a")
    claim(broker, who)
    send(broker, who.release([QUEUE], remove=True))

    names = {c["name"] for c in broker.xinfo_consumers(KEYS.stream(QUEUE, Priority.NORMAL), GROUP)}

    assert names == {FREE.encode()}
