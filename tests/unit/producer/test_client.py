"""Client, Job and Reply against a real server: what is sent, and what comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from celery import states

from producer.client import Client, Job
from producer.contract import errors
from producer.contract.app import FleetApp
from producer.contract.names import Keys, Priority
from producer.replies import outcome_of
from tests.unit.producer.conftest import Worker

pytestmark = pytest.mark.redis
ROW = np.ones((1, 4), np.float32)
KEYS = Keys()


def test_a_reply_says_what_came_out_and_how(fleet: Client, worker: Worker) -> None:
    reply = fleet.submit("digits", {"image": ROW}).reply(5)

    np.testing.assert_array_equal(reply.outputs["image"], ROW)
    assert (reply.model, reply.precision, reply.batch_size) == ("digits", "fp32", 3)
    assert "outputs" not in repr(reply)


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


def test_a_lost_announcement_is_made_up_for(fleet: Client, worker: Worker) -> None:
    worker.announces = False

    fleet.submit("digits", {"image": ROW}).reply(5)


def test_the_inbox_survives_a_lost_connection(fleet: Client, worker: Worker, client: Any) -> None:
    fleet.submit("digits", {"image": ROW}).reply(5)
    client.client_kill_filter(_type="pubsub")

    fleet.submit("digits", {"image": ROW}).reply(5)


def test_a_job_can_be_awaited(fleet: Client, worker: Worker) -> None:
    async def ask() -> list[Any]:
        jobs = fleet.submit_many("digits", [{"i": i} for i in range(20)])
        replies = await asyncio.gather(*jobs, fleet.infer("digits", {"i": 20}, timeout_s=5))
        return [reply.outputs["i"] for reply in replies]

    assert asyncio.run(ask()) == list(range(21))


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


def test_the_first_outcome_of_a_job_stays(fleet: Client) -> None:
    job = Job("mine", fleet)
    job.settle({"status": states.SUCCESS, "result": 1})
    job.settle(errors.BadRequest("later"))

    assert job.reply(0).outputs == 1


def test_priority_and_expiry_travel(fleet: Client, client: Any) -> None:
    fleet.submit("digits", {"i": 1}, priority="high", expires_s=30)

    assert client.xlen(KEYS.stream("fleet.digits", Priority.HIGH)) == 1
