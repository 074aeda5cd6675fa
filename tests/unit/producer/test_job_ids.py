"""A job id runs once, and its reply is read once: results, fences, and who asks too late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis
from celery import states

from producer import inbox
from producer.client import Client
from producer.contract import errors
from producer.contract.app import FleetApp, make_app
from producer.contract.names import Keys
from producer.contract.settings import Settings
from producer.results import FENCE_AFTER_S
from tests.support.proxy import running_proxy
from tests.support.waiting import wait_until
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis
ROW = np.ones((1, 4), np.float32)
KEYS = Keys()


def test_a_read_reply_is_deleted_and_leaves_a_fence(
    fleet: Client, worker: Worker, client: Any
) -> None:
    job = fleet.submit("digits", {"image": ROW}, job_id="mine")
    job.reply(5)

    wait_until(lambda: client.exists(KEYS.fence("mine")), what="fence")
    assert not client.exists(KEYS.result("mine"))
    assert 0 < client.ttl(KEYS.fence("mine")) <= 60
    assert job.reply(0) is job.reply(0)


@pytest.mark.scripts
def test_a_full_redis_still_lets_replies_be_deleted_and_fenced(
    fleet: Client, worker: Worker, client: Any
) -> None:
    worker.announces = False
    # The inbox reads all when its subscription begins: let that be over, so that it does not read
    # the reply before the server is full.
    fleet.submit("digits", {"image": ROW}).reply(5)
    job = fleet.submit("digits", {"image": ROW})
    wait_until(
        lambda: client.exists(KEYS.result(job.id), KEYS.fence(job.id)), what="result or its fence"
    )
    client.config_set("maxmemory", 1)
    try:
        job.reply(5)
        wait_until(lambda: client.exists(KEYS.fence(job.id)), what="fence")
        assert not client.exists(KEYS.result(job.id))
    finally:
        client.config_set("maxmemory", 0)


def test_a_job_id_sent_twice_is_one_job_for_both(fleet: Client, worker: Worker) -> None:
    first = fleet.submit("digits", {"i": 1}, job_id="same")
    second = fleet.submit("digits", {"i": 1}, job_id="same")

    assert first.reply(5).outputs == second.reply(5).outputs


@pytest.mark.parametrize("job_id", ["a,b", ",", "a,", "\u00e4 b"])
def test_any_id_is_answered_at_once(
    fleet: Client, worker: Worker, monkeypatch: pytest.MonkeyPatch, job_id: str
) -> None:
    # Nothing is found by the look that comes round once a second.
    monkeypatch.setattr(inbox, "LOOK_EVERY_S", 3600.0)
    fleet.submit("digits", {"i": 0}).reply(5)
    others = [fleet.submit("other", {"i": 1}, job_id=name) for name in ("a", "b")]

    fleet.submit("digits", {"i": 1}, job_id=job_id).reply(5)

    assert not any(job.done for job in others)


def test_an_id_whose_reply_was_read_is_told_so(fleet: Client, worker: Worker, client: Any) -> None:
    first = fleet.submit("digits", {"i": 1}, job_id="mine")
    first.reply(5)
    wait_until(lambda: client.exists(KEYS.fence("mine")), what="fence")
    worker.stop()
    left_s = client.ttl(KEYS.fence("mine"))
    client.expire(KEYS.fence("mine"), left_s - 10)
    again = fleet.submit("digits", {"i": 1}, job_id="mine")
    other = fleet.submit("digits", {"i": 2})

    with pytest.raises(errors.BadRequest, match="answered before"):
        again.reply(5)
    assert first.reply(0).outputs["i"] == 1
    assert not other.done
    assert client.ttl(KEYS.fence("mine")) <= left_s - 10


def test_a_result_counts_more_than_a_fence(fleet: Client, app: FleetApp, client: Any) -> None:
    client.set(KEYS.fence("mine"), "1", ex=60)
    job = fleet.submit("other", {"i": 1}, job_id="mine")
    store_result(app, client, job.id, states.SUCCESS, {"i": 1})

    assert job.reply(5).outputs == {"i": 1}


def test_a_fence_is_not_looked_for_before_its_time(fleet: Client, client: Any) -> None:
    client.set(KEYS.fence("mine"), "1", ex=60)
    job = fleet.submit("other", {"i": 1}, job_id="mine")

    fleet._room.inbox._look(job.awaited_since_s + FENCE_AFTER_S / 2)
    assert not job.done
    fleet._room.inbox._look(job.awaited_since_s + FENCE_AFTER_S)
    assert job.done


def test_as_completed_tells_of_ids_whose_reply_was_read(
    fleet: Client, app: FleetApp, worker: Worker, client: Any
) -> None:
    fleet.submit("digits", {"i": 1}, job_id="mine").reply(5)
    # The reply is told before its result is deleted.
    wait_until(lambda: client.exists(KEYS.fence("mine")), what="the fence")
    strangers: list[Any] = ["mine", app.AsyncResult("mine")]

    for stranger in strangers:
        (job,) = fleet.as_completed([stranger], timeout_s=5)
        with pytest.raises(errors.BadRequest, match="answered before"):
            job.reply(0)


def test_two_servers_know_of_a_reply_that_was_read(server: Any, client: Any) -> None:
    base = f"redis://127.0.0.1:{server.port}"
    client.set(KEYS.fence("mine"), "1", ex=60)
    with Client(Settings(broker_url=f"{base}/0", result_url=f"{base}/1")) as fleet:
        job = fleet.submit("other", {"i": 1}, job_id="mine")

        with pytest.raises(errors.BadRequest, match="answered before"):
            job.reply(5)


def test_two_servers_tell_a_result_that_is_just_stored_from_one_that_was_read(
    server: Any, app: FleetApp, client: Any
) -> None:
    results = redis.Redis(port=server.port, db=1)
    with running_proxy(server.port) as proxy:
        broker = proxy.url.removesuffix("/0")
        settings = Settings(
            broker_url=f"{broker}/0", result_url=f"redis://127.0.0.1:{server.port}/1"
        )

        def complete(request: bytes) -> None:
            """Store the result and then the fence, as a worker does, when a fence is looked for."""
            if b"MGET" in request and not client.exists(KEYS.fence("mine")):
                store_result(app, results, "mine", states.SUCCESS, {"i": 1})
                client.set(KEYS.fence("mine"), "1", ex=60)

        with Client(settings) as fleet:
            job = fleet.submit("other", {"i": 1}, job_id="mine")
            proxy.before = complete

            assert job.reply(10).outputs == {"i": 1}
    results.close()


def test_two_servers_keep_results_apart(server: Any, worker: Worker, client: Any) -> None:
    base = f"redis://127.0.0.1:{server.port}"
    settings = Settings(broker_url=f"{base}/0", result_url=f"{base}/1")
    app = make_app(settings)
    results = redis.Redis(port=server.port, db=1)
    with Client(settings) as fleet:
        job = fleet.submit("other", {"i": 1})
        store_result(app, results, job.id, states.SUCCESS, {"i": 1})
        job.reply(5)
        wait_until(lambda: client.exists(KEYS.fence(job.id)), what="fence")
        wait_until(lambda: not results.exists(KEYS.result(job.id)), what="deleted result")
    results.close()
    app.close()
