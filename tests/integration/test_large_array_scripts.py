"""What the delivery scripts do with the large arrays that an entry names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import redis

from producer.contract.blobs import Blobs
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.dead import letters
from producer.requeue import Requeued, purge, requeue
from workers.delivery import ledger as delivery
from workers.delivery.ledger import Claimed, End, Ledger, Letter, Verdict, Wish
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

KEYS: Final = Keys()
QUEUE: Final = "fleet.m"
STREAM: Final = KEYS.stream(QUEUE, Priority.NORMAL)
LETTER: Final = Letter(code="WORKER_LOST", reason="it died", attempts=3, worker="w/0")


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    client.flushall()


def add(broker: redis.Redis, job: str, number: int, *, nbytes: int = 8) -> str:
    """Send a job with a large array of that number; returns the key of the array."""
    blob_id = f"{number:032x}"
    broker.set(KEYS.blob(blob_id), b"elements", ex=60)
    entry: Any = {
        "id": job,
        "rows": 1,
        "env": b"",
        "body": b"",
        "blobs": f"{nbytes} redis {blob_id}",
    }
    broker.xadd(STREAM, entry)
    return KEYS.blob(blob_id)


def claim(broker: redis.Redis, who: Ledger, *, rows: int = 32, nbytes: int = 1 << 20) -> Claimed:
    wish = Wish(queue=QUEUE, max_rows=rows, max_bytes=nbytes, max_entries=rows)
    (claimed,) = send(broker, who.claim([wish]))
    assert isinstance(claimed, Claimed)
    return claimed


def begin(broker: redis.Redis, who: Ledger, claimed: Claimed) -> list[Verdict]:
    jobs = [(entry, entry.job_id or "", ()) for entry in claimed.entries]
    (verdicts,) = send(broker, who.begin(QUEUE, jobs))
    return [verdict for verdict, _ in verdicts]


def ledger(name: str) -> Ledger:
    return Ledger(keys=KEYS, consumer=name, result_ttl_s=60, max_attempts=3, blob_ttl_s=600)


def test_a_claim_counts_the_bytes_of_arrays_that_are_elsewhere(broker: redis.Redis) -> None:
    for number in range(3):
        add(broker, f"job-{number}", number, nbytes=1000)

    claimed = claim(broker, ledger("a"), nbytes=2500)

    assert [entry.nbytes for entry in claimed.entries] == [1000, 1000]
    assert claimed.closed == "bytes"


def test_a_job_takes_its_arrays_along_only_for_who_owns_it(broker: redis.Redis) -> None:
    key, mine, other = add(broker, "job", 1), ledger("a"), ledger("b")
    claimed = claim(broker, mine)
    begin(broker, mine, claimed)
    end = End(entry=claimed.entries[0], job_id="job", payload=b"answer")

    (lost,) = send(broker, other.complete(QUEUE, [end]))
    there_still = broker.exists(key)
    (stored,) = send(broker, mine.complete(QUEUE, [end]))

    assert [str(each) for each in (*lost, *stored)] == ["lost", "stored"]
    assert there_still
    assert not broker.exists(key)


@pytest.mark.parametrize("same", [True, False], ids=["the same arrays", "arrays of its own"])
@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "while it runs"])
def test_a_copy_of_a_job_never_takes_the_arrays_of_the_one_that_lives(
    broker: redis.Redis, same: bool, together: bool
) -> None:
    mine, other = ledger("a"), ledger("b")
    key = add(broker, "job", 1)
    copy = add(broker, "job", 1 if same else 2)

    if together:
        verdicts = begin(broker, mine, claim(broker, mine))
    else:
        verdicts = begin(broker, mine, claim(broker, mine, rows=1))
        verdicts += begin(broker, other, claim(broker, other))

    assert verdicts == [Verdict.RUN, Verdict.AGAIN if same else Verdict.DUPLICATE]
    assert broker.exists(key)
    assert bool(broker.exists(copy)) is same


def test_a_job_that_comes_after_its_answer_takes_its_arrays_along(broker: redis.Redis) -> None:
    key, mine = add(broker, "job", 1), ledger("a")
    broker.set(KEYS.fence("job"), 1, ex=60)

    assert begin(broker, mine, claim(broker, mine)) == [Verdict.DONE]

    assert not broker.exists(key)


def test_a_dead_letter_keeps_its_arrays_for_as_long_as_if_it_were_new(broker: redis.Redis) -> None:
    key, mine = add(broker, "job", 1), ledger("a")
    (entry,) = claim(broker, mine).entries

    send(broker, mine.bury(QUEUE, entry, "job", LETTER, payload=b"{}"))

    assert 590 < broker.ttl(key) <= 600


@pytest.mark.parametrize("failure_s", [60, 0], ids=["its failure is there", "its failure is gone"])
def test_a_copy_leaves_the_arrays_to_the_dead_letter_that_its_original_became(
    broker: redis.Redis, failure_s: int
) -> None:
    key, mine = add(broker, "job", 1), ledger("a")
    (entry,) = claim(broker, mine).entries
    send(broker, mine.bury(QUEUE, entry, "job", LETTER, payload=b"{}"))
    broker.expire(KEYS.result("job"), failure_s)

    add(broker, "job", 1)
    copy = claim(broker, mine)
    (verdict,) = begin(broker, mine, copy)
    send(broker, mine.complete(QUEUE, [End(entry=copy.entries[0], job_id="job", payload=b"x")]))

    assert verdict is (Verdict.DONE if failure_s else Verdict.RUN)
    assert broker.exists(key)


def test_a_letter_that_is_requeued_or_purged_leaves_no_mark(broker: redis.Redis) -> None:
    mine, numbers = ledger("a"), (1, 2)
    arrays = [add(broker, f"job-{number}", number) for number in numbers]
    for entry in claim(broker, mine).entries:
        send(broker, mine.bury(QUEUE, entry, entry.job_id, LETTER, payload=None))
    first, second = letters(broker, KEYS, QUEUE)

    assert [end for _, end in requeue(broker, KEYS, [first])] == [Requeued.REQUEUED]
    assert [was for _, was in purge(broker, Blobs.of(Settings()), [second])] == [True]

    assert list(broker.scan_iter(f"{KEYS.blob('')}*")) == [arrays[0].encode()]
    assert not list(broker.scan_iter(f"{KEYS.kept_blob('')}*"))


def test_an_array_of_a_reply_is_stored_on_a_server_that_is_full(broker: redis.Redis) -> None:
    broker.config_set("maxmemory", "1")
    try:
        send(broker, ledger("a").keep("c" * 32, b"elements", ttl_s=60))
    finally:
        broker.config_set("maxmemory", 0)

    assert broker.get(KEYS.blob("c" * 32)) == b"elements"


@pytest.mark.parametrize("field", [b"x", b"9 redis ../../etc", b"\xff", b"9 disk " + b"a" * 32])
def test_a_field_that_makes_no_sense_names_nothing(broker: redis.Redis, field: bytes) -> None:
    mine = ledger("a")
    entry: Any = {"id": "job", "rows": 1, "env": b"", "body": b"body", "blobs": field}
    broker.xadd(STREAM, entry)

    claimed = claim(broker, mine)
    begin(broker, mine, claimed)
    end = End(entry=claimed.entries[0], job_id="job", payload=b"answer")
    (ended,) = send(broker, mine.complete(QUEUE, [end]))

    assert claimed.entries[0].named.ids == ()
    assert [str(each) for each in ended] == ["stored"]
