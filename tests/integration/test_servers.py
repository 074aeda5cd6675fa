"""What servers do differently from version to version, where a script or a claim meets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from producer.contract.names import FREE, GROUP, Priority
from tests.support.ledgers import KEYS, NEVER, QUEUE, ledger
from tests.support.servers import TestServer
from workers.delivery import ledger as delivery
from workers.delivery import scripts
from workers.delivery.ledger import Claimed, End, Entry, Ledger, Note, Verdict, Wish
from workers.delivery.scripts import send

pytestmark = [pytest.mark.redis, pytest.mark.scripts]

NORMAL = KEYS.stream(QUEUE, Priority.NORMAL)


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    client.flushall()


def add(broker: redis.Redis, job: str, priority: Priority = Priority.NORMAL) -> str:
    fields: Any = {"id": job, "rows": "1", "env": b"env", "body": b"body"}
    added: Any = broker.xadd(KEYS.stream(QUEUE, priority), fields)
    return str(added.decode())


def claim(broker: redis.Redis, who: Ledger) -> Claimed | None:
    wish = Wish(queue=QUEUE, max_rows=32, max_bytes=1 << 20, max_entries=32)
    return send(broker, who.claim([wish]))[0]  # type: ignore[no-any-return]


def begin(broker: redis.Redis, who: Ledger, claimed: Claimed) -> list[Verdict]:
    jobs = [(entry, entry.job_id or "", ()) for entry in claimed.entries]
    return [verdict for verdict, _ in send(broker, who.begin(QUEUE, jobs))[0]]


def pending(broker: redis.Redis) -> int:
    return int(broker.xpending(NORMAL, GROUP)["pending"])


def test_an_entry_that_was_deleted_while_given_back_is_passed_over(broker: redis.Redis) -> None:
    gone, first, heir = add(broker, "gone"), ledger("a"), ledger("b")
    add(broker, "there")
    claim(broker, first)
    send(broker, first.release([QUEUE]))
    broker.xdel(NORMAL, gone)

    claimed = claim(broker, heir)

    assert claimed is not None
    assert [entry.job_id for entry in claimed.entries] == ["there"]
    assert pending(broker) == 1


def test_an_entry_that_was_deleted_while_claimed_ends_without_a_result(
    broker: redis.Redis,
) -> None:
    gone, who = add(broker, "gone"), ledger("a")
    claimed = claim(broker, who)
    assert claimed is not None
    broker.xdel(NORMAL, gone)

    begin(broker, who, claimed)
    ends = [End(entry=entry, job_id="gone", payload=b"done") for entry in claimed.entries]
    send(broker, who.complete(QUEUE, ends), who.release([QUEUE], remove=True))

    assert pending(broker) == 0
    assert broker.xinfo_consumers(NORMAL, GROUP) == []
    assert not broker.exists(KEYS.journal(QUEUE))


def test_claims_of_a_dead_consumer_outlive_its_deleted_entries(broker: redis.Redis) -> None:
    gone = add(broker, "gone")
    add(broker, "there")
    claim(broker, ledger("dead"))
    broker.xdel(NORMAL, gone)
    time.sleep(0.05)

    send(
        broker,
        delivery.renew(KEYS, [QUEUE], ["nobody"]),
        delivery.take_over(KEYS, [QUEUE], claim_ttl_s=0.02, silent_s=60, until_unix_s=NEVER),
    )

    claimed = claim(broker, ledger("heir"))
    assert claimed is not None
    assert [entry.job_id for entry in claimed.entries] == ["there"]
    assert pending(broker) == 1


def test_the_doorbell_wakes_at_a_new_job_and_claims_it(
    server: TestServer, broker: redis.Redis
) -> None:
    heard: list[Entry] = []
    ear = threading.Thread(
        target=lambda: heard.extend(ledger("a").doorbell(server.client(), [QUEUE], 5.0))
    )
    ear.start()
    began_s = time.monotonic()
    add(broker, "j", Priority.LOW)
    ear.join(10)

    assert [entry.job_id for entry in heard] == ["j"]
    assert time.monotonic() - began_s < 4


def test_the_doorbell_claims_at_most_one_of_each_stream(broker: redis.Redis) -> None:
    for priority in Priority:
        for number in range(2):
            add(broker, f"{priority}{number}", priority)

    heard = ledger("a").doorbell(broker, [QUEUE], 0.1)

    streams = [entry.stream for entry in heard]
    assert streams
    assert len(streams) == len(set(streams))


def test_what_happens_seldom_works_on_a_full_server_too(broker: redis.Redis) -> None:
    job = add(broker, "again")
    fields = {"id": "due", "rows": "1", "env": b"e", "body": b"b", "priority": "normal"}
    broker.zadd(KEYS.delayed(QUEUE), {msgpack.packb(fields, use_bin_type=False): 1.0})
    for name in ("first", "second"):
        claimed = claim(broker, ledger(name))
        assert claimed is not None
        begin(broker, ledger(name), claimed)
        send(broker, ledger(name).release([QUEUE]))
    broker.xreadgroup(GROUP, "silent", {NORMAL: ">"}, count=1)
    claimed = claim(broker, ledger("ours"))
    assert claimed is not None
    begin(broker, ledger("ours"), claimed)
    broker.config_set("maxmemory", 1)
    time.sleep(0.05)
    try:
        # A start taken back of three is a write of the record that a full server must allow.
        forgiven = send(broker, ledger("ours").unfinished(QUEUE, Note.FORGIVE))[0]
        moved = send(broker, delivery.move_due(KEYS, QUEUE, now_unix_s=50.0))[0]
        send(
            broker,
            delivery.take_over(KEYS, [QUEUE], claim_ttl_s=60, silent_s=0.02, until_unix_s=NEVER),
        )
        (rung,) = ledger("ours").doorbell(broker, [QUEUE], 0.1)
    finally:
        broker.config_set("maxmemory", 0)

    record: Any = broker.hget(KEYS.journal(QUEUE), "again")
    assert forgiven == 1
    assert record.decode().split()[:3] == [NORMAL, job, "2"]
    assert moved == 1
    assert rung.job_id == "due"
    names = {consumer["name"] for consumer in broker.xinfo_consumers(NORMAL, GROUP)}
    assert names - {FREE.encode()} == {b"ours"}


def test_a_server_that_lost_its_scripts_gets_all_of_them_at_once(broker: redis.Redis) -> None:
    broker.script_flush()

    claim(broker, ledger("a"))

    digests = [script.digest for script in scripts.ALL]
    assert len(digests) == len(list(Path(scripts.__file__).parent.glob("*.lua")))
    assert broker.script_exists(*digests) == [True] * len(digests)
