"""What becomes of dead letters that people requeue or purge; letters as `bury.lua` writes them."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from producer.contract.app import FleetApp
from producer.contract.blobs import Blobs
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings, redis_client
from producer.dead import DeadLetter, letters
from producer.requeue import Requeued, purge, requeue
from producer.results import Results

QUEUE = "fleet.digits"
KEYS = Keys()
BLOBS = Blobs.of(Settings())
STREAM = KEYS.stream(QUEUE, Priority.LOW)
FAILURE = b'{"status": "FAILURE", "result": {}}'
ANSWER = b"\x01\x80"


def bury(client: redis.Redis, job: str, *, stream: str = STREAM, **fields: Any) -> None:
    """Make a letter of a job, by default one with an entry."""
    entry = fields or {"id": job, "rows": "1", "env": b"\x90", "body": b"\x00body\xff"}
    about: Any = {"code": "WORKER_LOST", "attempts": 3, "job": job, "stream": stream}
    original: Any = {f"original:{name}": value for name, value in entry.items() if name != "none"}
    client.xadd(KEYS.dead(QUEUE), {**about, **original})


def all_letters(client: redis.Redis) -> list[DeadLetter]:
    return list(letters(client, KEYS, QUEUE))


def requeue_all(client: redis.Redis, results: redis.Redis | None = None) -> list[Requeued]:
    return [end for _, end in requeue(client, KEYS, all_letters(client), results=results)]


def entries(client: redis.Redis) -> list[dict[bytes, bytes]]:
    found: Any = client.xrange(STREAM)
    return [fields for _, fields in found]


@pytest.fixture
def results(settings: Settings) -> Iterator[redis.Redis]:
    """Another database stands for another server: no script reaches it from the first."""
    client = redis_client(settings.broker_url.removesuffix("0") + "1")
    yield client
    client.close()


def test_the_entry_goes_back_as_it_was_and_nothing_of_the_failure_stays(
    client: redis.Redis,
) -> None:
    bury(client, "one")
    client.set(KEYS.result("one"), FAILURE)
    client.set(KEYS.fence("one"), 1)
    client.set(KEYS.cancelled("one"), 1)
    client.hset(KEYS.journal(QUEUE), "one", f"{STREAM} 1-1 3 somebody")

    assert requeue_all(client) == [Requeued.REQUEUED]

    assert entries(client) == [
        {b"id": b"one", b"rows": b"1", b"env": b"\x90", b"body": b"\x00body\xff"}
    ]
    assert client.xlen(KEYS.dead(QUEUE)) == 0
    assert sorted(client.keys("*")) == sorted([STREAM.encode(), KEYS.dead(QUEUE).encode()])


def test_a_letter_that_was_requeued_is_not_requeued_again(client: redis.Redis) -> None:
    bury(client, "one")
    seen_by_both = all_letters(client)

    ends = [end for _ in range(2) for _, end in requeue(client, KEYS, seen_by_both)]

    assert ends == [Requeued.REQUEUED, Requeued.GONE]
    assert len(entries(client)) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_of_two_people_who_requeue_the_same_letters_each_letter_goes_once(
    client: redis.Redis, settings: Settings, apart: bool
) -> None:
    for number in range(500):
        bury(client, f"job-{number}")
    both_ready = threading.Barrier(2)

    def person() -> list[Requeued]:
        with redis_client(settings.broker_url) as own:
            found = all_letters(own)
            both_ready.wait(10)
            ends = requeue(own, KEYS, found, results=own if apart else None)
            return [end for _, end in ends]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = (each.result(30) for each in [pool.submit(person), pool.submit(person)])

    assert len(first) == len(second) == 500
    assert (first + second).count(Requeued.REQUEUED) == 500
    assert (first + second).count(Requeued.GONE) == 500
    assert len({fields[b"id"] for fields in entries(client)}) == len(entries(client)) == 500


def test_a_letter_without_an_entry_stays(client: redis.Redis) -> None:
    bury(client, "one", none="")

    assert requeue_all(client) == [Requeued.EMPTY]
    assert client.xlen(KEYS.dead(QUEUE)) == 1


def test_a_letter_from_a_stream_that_is_none_of_the_queue_stays(client: redis.Redis) -> None:
    bury(client, "one", stream="fleet:stream:fleet.other:low")

    assert requeue_all(client) == [Requeued.ASTRAY]
    assert client.xlen(KEYS.dead(QUEUE)) == 1


def test_a_job_that_was_sent_again_and_runs_is_left_alone(client: redis.Redis) -> None:
    bury(client, "one")
    living: Any = client.xadd(STREAM, {"id": "one"})
    record = f"{STREAM} {living.decode()} 1 an-instance"
    client.hset(KEYS.journal(QUEUE), "one", record)

    assert requeue_all(client) == [Requeued.ALIVE]

    assert client.hget(KEYS.journal(QUEUE), "one") == record.encode()
    assert len(entries(client)) == client.xlen(KEYS.dead(QUEUE)) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_an_answer_that_came_meanwhile_stays_and_so_does_the_letter(
    client: redis.Redis, results: redis.Redis, apart: bool
) -> None:
    bury(client, "one")
    server = results if apart else client
    server.set(KEYS.result("one"), ANSWER, ex=60)

    assert requeue_all(client, results if apart else None) == [Requeued.ANSWERED]

    assert server.get(KEYS.result("one")) == ANSWER
    assert entries(client) == []


def test_of_two_letters_of_one_job_the_later_waits_for_the_first(client: redis.Redis) -> None:
    bury(client, "one")
    bury(client, "one")
    bury(client, "")
    bury(client, "")

    ends = requeue_all(client)

    assert ends.count(Requeued.TWIN) == 1
    assert ends.count(Requeued.REQUEUED) == 3
    assert client.xlen(KEYS.dead(QUEUE)) == 1


@pytest.mark.parametrize("apart", [False, True])
def test_a_full_server_takes_the_entry_back(
    client: redis.Redis, results: redis.Redis, apart: bool
) -> None:
    bury(client, "one")
    server = results if apart else client
    server.set(KEYS.result("one"), FAILURE, ex=60)
    client.config_set("maxmemory", 1)
    try:
        ends = requeue_all(client, results if apart else None)
    finally:
        client.config_set("maxmemory", 0)

    assert ends == [Requeued.REQUEUED]
    assert server.exists(KEYS.result("one")) == 0
    assert len(entries(client)) == 1


def test_with_two_servers_one_that_dies_in_between_loses_no_letter(
    client: redis.Redis, results: redis.Redis
) -> None:
    bury(client, "one")
    results.set(KEYS.result("one"), FAILURE, ex=60)
    # Whatever stands in the way of the entry, the failure is gone by then.
    client.set(STREAM, "no stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        requeue_all(client, results)
    assert results.exists(KEYS.result("one")) == 0
    assert client.xlen(KEYS.dead(QUEUE)) == 1
    client.delete(STREAM)

    assert requeue_all(client, results) == [Requeued.REQUEUED]
    assert len(entries(client)) == 1


def test_a_second_person_does_not_take_the_next_failure_away(
    client: redis.Redis, results: redis.Redis
) -> None:
    bury(client, "one")
    seen_long_ago = all_letters(client)
    requeue_all(client, results)
    results.set(KEYS.result("one"), FAILURE, ex=60)

    ends = [end for _, end in requeue(client, KEYS, seen_long_ago, results=results)]

    assert ends == [Requeued.GONE]
    assert results.get(KEYS.result("one")) == FAILURE


def test_a_client_that_has_just_read_the_failure_does_not_fence_the_requeued_job(
    client: redis.Redis, app: FleetApp
) -> None:
    bury(client, "one")
    client.set(KEYS.result("one"), FAILURE, ex=60)
    reading = Results(app)
    (read,) = reading.read(["one"])

    requeue_all(client)
    reading.forget([read])

    assert client.exists(KEYS.fence("one")) == 0


def test_a_purge_deletes_the_letters_it_was_given(client: redis.Redis) -> None:
    for number in range(250):
        bury(client, f"job-{number}")
    *meant, other = all_letters(client)
    client.xdel(KEYS.dead(QUEUE), meant[0].letter_id)

    ends = [was for _, was in purge(client, BLOBS, meant)]

    assert ends == [False] + [True] * 248
    assert [letter.job_id for letter in all_letters(client)] == [other.job_id]


def test_reading_a_letter_brings_no_body_along(client: redis.Redis) -> None:
    bury(client, "large", id="large", env=b"", body=b"canary" * 1000)

    (letter,) = all_letters(client)

    assert letter.sizes_bytes == {"id": 5, "env": 0, "body": 6000}
    assert "canary" not in repr(letter) + repr(letter.about())
    assert letter.about()["readable"] is False


def test_a_letter_goes_back_with_its_large_arrays_or_not_at_all(client: redis.Redis) -> None:
    ids = ["a" * 32, "b" * 32]
    for number, blob_id in enumerate(ids):
        bury(client, f"job-{number}", id=f"job-{number}", blobs=f"8 redis {blob_id}")
    client.set(KEYS.blob(ids[0]), b"elements", ex=60)

    ends = requeue_all(client)

    assert ends == [Requeued.REQUEUED, Requeued.MISSING]
    assert client.ttl(KEYS.blob(ids[0])) > 6 * 86_400
    assert entries(client)[0][b"blobs"] == f"8 redis {ids[0]}".encode()


def test_a_purged_letter_takes_its_large_arrays_along(client: redis.Redis) -> None:
    for number in range(2):
        bury(client, f"job-{number}", id=f"job-{number}", blobs=f"8 redis {number:032x}")
        client.set(KEYS.blob(f"{number:032x}"), b"elements", ex=60)
    seen = all_letters(client)
    client.xdel(KEYS.dead(QUEUE), seen[1].letter_id)

    ends = [was for _, was in purge(client, BLOBS, seen)]

    assert ends == [True, False]
    assert client.exists(KEYS.blob(f"{0:032x}")) == 0
    # Somebody requeued it meanwhile, and its job needs it.
    assert client.exists(KEYS.blob(f"{1:032x}")) == 1
