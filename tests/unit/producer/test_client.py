"""Client, Job and Reply against a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
from celery import states

from producer.client import Client, Job, Reply
from producer.contract import errors
from producer.contract.app import FleetApp, make_app
from producer.contract.names import Keys, Priority
from producer.contract.patience import Patience
from producer.contract.settings import Settings
from producer.inbox import FENCE_AFTER_S
from producer.replies import outcome_of
from producer.tasks import Infer
from tests.support.proxy import running_proxy
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis

ROW = np.ones((1, 4), np.float32)
KEYS = Keys()


@pytest.fixture
def fleet(settings: Settings) -> Iterator[Client]:
    with Client(settings) as fleet:
        yield fleet


def wait_until(holds: Any, *, what: str, timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.01)


def test_a_reply_says_what_came_out_and_how(fleet: Client, worker: Worker) -> None:
    reply = fleet.submit("digits", {"image": ROW}).reply(5)

    np.testing.assert_array_equal(reply.outputs["image"], ROW)
    assert (reply.model, reply.precision, reply.batch_size) == ("digits", "fp32", 3)
    assert "outputs" not in repr(reply)


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


@pytest.mark.parametrize("kind", [errors.BadRequest, errors.Expired, errors.Cancelled])
def test_a_failed_job_raises_its_error_each_time(
    fleet: Client, worker: Worker, kind: type[errors.FleetError]
) -> None:
    def refuse(_: Any) -> Any:
        raise kind("what to do")

    worker.answer = refuse
    job = fleet.submit("digits", {"image": ROW})

    for _ in range(2):
        with pytest.raises(kind, match="what to do"):
            job.reply(5)


@pytest.mark.parametrize(
    ("word", "kind"), [("revoked", errors.Cancelled), ("expired", errors.Expired)]
)
def test_a_stock_revoke_is_a_cancelled_or_expired_job(
    fleet: Client, app: FleetApp, client: Any, word: str, kind: type[Exception]
) -> None:
    job = fleet.submit("digits", {"image": ROW})
    app.backend.mark_as_revoked(job.id, reason=word)

    with pytest.raises(kind):
        job.reply(5)


def test_a_job_without_a_reply_times_out(fleet: Client) -> None:
    with pytest.raises(errors.JobTimeout, match=r"`fleet queue` says what waits.*cancel"):
        fleet.submit("digits", {"image": ROW}).reply(0.05)


def test_a_lost_announcement_is_made_up_for(fleet: Client, worker: Worker) -> None:
    worker.announces = False

    fleet.submit("digits", {"image": ROW}).reply(5)


def test_the_inbox_survives_a_lost_connection(fleet: Client, worker: Worker, client: Any) -> None:
    fleet.submit("digits", {"image": ROW}).reply(5)
    client.client_kill_filter(_type="pubsub")

    fleet.submit("digits", {"image": ROW}).reply(5)


def test_many_jobs_arrive_each_once(fleet: Client, worker: Worker) -> None:
    jobs = fleet.submit_many("digits", ({"i": i} for i in range(500)))

    seen = [job.reply(0).outputs["i"] for job in fleet.as_completed(jobs, timeout_s=20)]

    assert sorted(seen) == list(range(500))


def test_as_completed_takes_results_and_ids_too(
    fleet: Client, infer: Infer, worker: Worker, client: Any
) -> None:
    result = infer.delay("digits", {"i": 1})
    by_id = infer.delay("digits", {"i": 2}).id
    job = fleet.submit("digits", {"i": 3})

    seen = {done.reply(0).outputs["i"] for done in fleet.as_completed([result, by_id, job], 5)}

    assert seen == {1, 2, 3}
    assert client.exists(KEYS.result(result.id))
    assert not client.exists(KEYS.result(by_id))
    assert result.get(timeout=1)["i"] == 1


def test_as_completed_names_how_many_are_missing(fleet: Client, infer: Infer) -> None:
    jobs = [fleet.submit("digits", {"i": 1}), infer.delay("digits", {"i": 1})]

    with pytest.raises(errors.JobTimeout, match=r"2 jobs.*`fleet queue` says"):
        list(fleet.as_completed(jobs, timeout_s=0.1))


def test_results_are_collected_many_in_one_round_trip(
    fleet: Client, app: FleetApp, client: Any
) -> None:
    count = 2000
    ids = [f"job-{i}" for i in range(count)]
    for job_id in ids:
        store_result(app, client, job_id, states.SUCCESS, {"y": np.ones((1, 10), np.float32)})
    results = [app.AsyncResult(job_id) for job_id in ids]
    client.config_resetstat()

    assert sum(1 for _ in fleet.as_completed(results, timeout_s=10)) == count

    # What it takes of a processor is measured beside plain Celery (`make bench`), not here.
    sent = {name: about["calls"] for name, about in client.info("commandstats").items()}
    assert "cmdstat_get" not in sent
    assert sent["cmdstat_mget"] <= count / 50


def test_a_job_can_be_awaited(fleet: Client, worker: Worker) -> None:
    async def ask() -> list[Any]:
        jobs = fleet.submit_many("digits", [{"i": i} for i in range(20)])
        replies = await asyncio.gather(*jobs, fleet.infer("digits", {"i": 20}, timeout_s=5))
        return [reply.outputs["i"] for reply in replies]

    assert asyncio.run(ask()) == list(range(21))


def test_an_awaited_job_times_out(fleet: Client) -> None:
    with pytest.raises(errors.JobTimeout):
        asyncio.run(fleet.infer("digits", {"i": 0}, timeout_s=0.05))


def test_many_threads_wait_on_one_client(fleet: Client, worker: Worker) -> None:
    found: list[int] = []

    def ask(i: int) -> None:
        found.append(fleet.submit("digits", {"i": i}).reply(10).outputs["i"])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found) == list(range(16))


def test_cancel_leaves_a_mark_for_the_worker(fleet: Client, client: Any) -> None:
    job = fleet.submit("digits", {"image": ROW})
    job.cancel()

    assert client.ttl(KEYS.cancelled(job.id)) > 0


def test_a_job_id_sent_twice_is_one_job_for_both(fleet: Client, worker: Worker) -> None:
    first = fleet.submit("digits", {"i": 1}, job_id="same")
    second = fleet.submit("digits", {"i": 1}, job_id="same")

    assert first.reply(5).outputs == second.reply(5).outputs


def test_a_job_that_nobody_holds_is_not_waited_for(fleet: Client) -> None:
    fleet.submit("digits", {"image": ROW})
    gc.collect()

    assert not fleet._room.inbox._awaited


def test_a_callback_that_raises_hinders_no_other(
    fleet: Client, worker: Worker, caplog: Any
) -> None:
    def fail(_: Job) -> None:
        raise SystemExit(3)

    worker.announces = False
    called: list[Job] = []
    jobs = fleet.submit_many("digits", ({"i": i} for i in range(3)))
    jobs[0].when_done(fail)
    jobs[0].when_done(called.append)

    assert [job.reply(5).outputs["i"] for job in jobs] == [0, 1, 2]
    assert fleet.submit("digits", {"i": 3}).reply(5).outputs["i"] == 3
    assert called == [jobs[0]]
    assert "job.callback_failed" in caplog.text


@pytest.mark.parametrize(
    "senseless",
    [
        {"status": "SUCCESS", "result": 1, "fleet": [1]},
        {"status": "SUCCESS", "fleet": {}},
        {"status": "FAILURE", "result": 7},
        {"status": "FAILURE", "result": {"exc_type": "SystemExit", "exc_module": "builtins"}},
        {"status": [], "result": 1},
        {"result": 1},
        [1],
        5,
        pytest.param(b"\x02", id="large arrays, and no more"),
        pytest.param(b"\x02\xc7\x01\x02\x00", id="a large array of no kind"),
    ],
)
def test_a_result_without_sense_is_a_bad_message_and_hinders_no_other(
    fleet: Client, app: FleetApp, worker: Worker, client: Any, senseless: Any
) -> None:
    job = fleet.submit("other", {"i": 1})
    stored = senseless if isinstance(senseless, bytes) else app.backend.encode(senseless)
    client.set(KEYS.result(job.id), stored, ex=60)
    client.publish(KEYS.replies(fleet.id), job.id)

    with pytest.raises(errors.BadMessage):
        job.reply(5)
    assert fleet.submit("digits", {"i": 3}).reply(5).outputs["i"] == 3


def test_a_stored_exit_does_not_end_the_program(fleet: Client) -> None:
    outcome = outcome_of({"status": states.FAILURE, "result": SystemExit(1)})

    assert isinstance(outcome, errors.BadMessage)


def test_news_without_sense_hinder_no_job(fleet: Client, worker: Worker, client: Any) -> None:
    first = fleet.submit("digits", {"i": 1})
    for news in (b"\xff", b"", b",,,", b"a" * 100_000):
        client.publish(KEYS.replies(fleet.id), news)

    assert first.reply(5).outputs["i"] == 1
    assert fleet.submit("digits", {"i": 3}).reply(5).outputs["i"] == 3


def test_jobs_sent_by_many_threads_are_looked_for_meanwhile(fleet: Client, worker: Worker) -> None:
    worker.announces = False
    jobs: list[Job] = []

    def send() -> None:
        for i in range(300):
            jobs.append(fleet.submit("digits", {"i": i}))
            fleet._room.inbox._look(time.monotonic())

    threads = [threading.Thread(target=send) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(1 for _ in fleet.as_completed(jobs, timeout_s=20)) == 900


@pytest.mark.parametrize("job_id", ["a,b", ",", "a,", "\u00e4 b"])
def test_any_id_is_answered_at_once(fleet: Client, worker: Worker, job_id: str) -> None:
    fleet.submit("digits", {"i": 0}).reply(5)
    others = [fleet.submit("other", {"i": 1}, job_id=name) for name in ("a", "b")]
    began_s = time.monotonic()

    fleet.submit("digits", {"i": 1}, job_id=job_id).reply(5)

    assert time.monotonic() - began_s < 0.5
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


def test_the_first_outcome_of_a_job_stays(fleet: Client) -> None:
    job = Job("mine", fleet)
    job.settle({"status": states.SUCCESS, "result": 1})
    job.settle(errors.BadRequest("later"))

    assert job.reply(0).outputs == 1


def test_as_completed_tells_of_ids_whose_reply_was_read(
    fleet: Client, app: FleetApp, worker: Worker
) -> None:
    fleet.submit("digits", {"i": 1}, job_id="mine").reply(5)
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


def test_a_reply_that_never_comes_ends_by_the_default(settings: Settings, client: Any) -> None:
    told = r"0\.3 s \(FLEET_REPLY_TIMEOUT_S\).*cancel.*math\.inf"
    with Client(dataclasses.replace(settings, reply_timeout_s=0.3)) as fleet:
        job = fleet.submit("digits", {"i": 1})
        client.flushall()

        async def ask() -> None:
            await job

        with pytest.raises(errors.JobTimeout, match=told):
            job.reply()
        with pytest.raises(errors.JobTimeout, match=told):
            asyncio.run(ask())
        with pytest.raises(errors.JobTimeout, match=told):
            asyncio.run(fleet.infer("digits", {"i": 1}))
        with pytest.raises(errors.JobTimeout, match=r"2 jobs.*FLEET_REPLY_TIMEOUT_S"):
            list(fleet.as_completed([job, "some-id"]))


def test_replies_renew_the_default_of_as_completed(
    settings: Settings, app: FleetApp, client: Any
) -> None:
    with Client(dataclasses.replace(settings, reply_timeout_s=1)) as fleet:
        jobs = fleet.submit_many("other", ({"i": i} for i in range(4)))

        def answer() -> None:
            for job in jobs:
                time.sleep(0.6)
                store_result(app, client, job.id, states.SUCCESS, 1)
                client.publish(KEYS.replies(fleet.id), job.id)

        thread = threading.Thread(target=answer)
        thread.start()
        assert sum(1 for _ in fleet.as_completed(jobs)) == 4
        thread.join()


@pytest.mark.parametrize("way", ["reply", "await", "as_completed"])
def test_a_wait_without_end_is_asked_for(fleet: Client, worker: Worker, way: str) -> None:
    job = fleet.submit("digits", {"i": 1})

    async def ask() -> Reply:
        return await job.reply_within(Patience(math.inf, 0))

    if way == "await":
        assert asyncio.run(ask()).outputs == {"i": 1}
    elif way == "reply":
        assert job.reply(math.inf).outputs == {"i": 1}
    else:
        assert list(fleet.as_completed([job], math.inf)) == [job]


def test_a_wait_that_was_given_up_leaves_nothing_at_its_job(fleet: Client) -> None:
    job = fleet.submit("digits", {"i": 1})

    async def cancelled() -> None:
        async with asyncio.timeout(0.01):
            await job

    for _ in range(5):
        with pytest.raises(errors.JobTimeout):
            job.reply(0.001)
        with pytest.raises(TimeoutError):
            asyncio.run(cancelled())
        with pytest.raises(errors.JobTimeout):
            list(fleet.as_completed([job], timeout_s=0.001))

    assert not job._on_done


def test_a_closed_client_tells_who_waits(fleet: Client) -> None:
    job = fleet.submit("digits", {"i": 1})
    threading.Timer(0.2, fleet.close).start()

    with pytest.raises(errors.JobTimeout, match="closed"):
        job.reply()
    with pytest.raises(RuntimeError, match="closed"):
        fleet.submit("digits", {"i": 1})


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_client_that_is_gone_leaves_nothing_in_redis(
    settings: Settings, worker: Worker, client: Any, how: str
) -> None:
    gc.collect()
    connections = len(client.client_list())
    fleet = Client(settings)
    jobs = fleet.submit_many("digits", ({"i": i} for i in range(100)))
    assert sum(1 for _ in fleet.as_completed(jobs, 10)) == 100
    assert len(client.client_list()) > connections
    assert client.pubsub_channels()

    if how == "closed":
        fleet.close()
    else:
        del fleet, jobs

    def gone() -> bool:
        gc.collect()
        return len(client.client_list()) <= connections and not client.pubsub_channels()

    wait_until(gone, what="silence")


def test_ten_thousand_jobs_leave_no_memory_behind(
    fleet: Client, app: FleetApp, client: Any
) -> None:
    def round_trip() -> None:
        jobs = fleet.submit_many("other", ({"i": i} for i in range(10_000)))
        for start in range(0, len(jobs), 1000):
            part = [job.id for job in jobs[start : start + 1000]]
            for job_id in part:
                client_pipe.set(KEYS.result(job_id), template, ex=60)
            client_pipe.publish(KEYS.replies(fleet.id), ",".join(part))
            client_pipe.execute()
        assert sum(1 for _ in fleet.as_completed(jobs, timeout_s=30)) == 10_000

    def blocks() -> int:
        # The least of a moment: the thread that settled the last job may still be in its look.
        least = sys.maxsize
        for _ in range(4):
            time.sleep(0.2)
            gc.collect()
            least = min(least, sys.getallocatedblocks())
        return least

    template = app.backend.encode({"status": states.SUCCESS, "result": 1, "fleet": {}})
    client_pipe = client.pipeline(transaction=False)
    round_trip()
    wait_until(lambda: not fleet._room.inbox._awaited, what="end of the first round")
    first = blocks()

    round_trip()
    round_trip()

    def as_before() -> bool:
        left = any(type(each) is Job and each.sender is fleet for each in gc.get_objects())
        return blocks() < first + 2000 and not left

    wait_until(as_before, what="memory as before")
    print(f"{blocks() - first:+} blocks of memory after 20,000 jobs")


def test_a_job_of_the_parent_is_not_waited_for_in_a_forked_child(
    fleet: Client, worker: Worker
) -> None:
    job = fleet.submit("other", {"i": 1})

    pid = os.fork()
    if pid == 0:
        try:
            job.reply()
        except errors.JobTimeout as error:
            os._exit(0 if "forked" in str(error) else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert not job.done


def test_priority_and_expiry_travel(fleet: Client, client: Any) -> None:
    fleet.submit("digits", {"i": 1}, priority="high", expires_s=30)

    assert client.xlen(KEYS.stream("fleet.digits", Priority.HIGH)) == 1


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


def test_a_client_works_in_a_forked_child(fleet: Client, worker: Worker) -> None:
    fleet.submit("digits", {"i": 1}).reply(5)

    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if fleet.submit("digits", {"i": 2}).reply(5).outputs["i"] == 2 else 2)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert isinstance(fleet.submit("digits", {"i": 3}), Job)
