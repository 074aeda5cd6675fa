"""Waiting for a Client's jobs: how it ends, for many at once, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from celery import states

from producer.client import Client, Job, Reply
from producer.contract import errors
from producer.contract.app import FleetApp
from producer.contract.names import Keys
from producer.contract.patience import Patience
from producer.contract.settings import Settings
from producer.tasks import Infer
from tests.support.memory_of_jobs import FEW
from tests.support.waiting import wait_until
from tests.support.worker import ROOT
from tests.unit.producer.conftest import Worker, store_result

pytestmark = pytest.mark.redis
ROW = np.ones((1, 4), np.float32)
KEYS = Keys()


def test_a_job_without_a_reply_times_out(fleet: Client) -> None:
    with pytest.raises(errors.JobTimeout, match=r"`fleet queue` says what waits.*cancel"):
        fleet.submit("digits", {"image": ROW}).reply(0.05)


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


def test_an_awaited_job_times_out(fleet: Client) -> None:
    with pytest.raises(errors.JobTimeout):
        asyncio.run(fleet.infer("digits", {"i": 0}, timeout_s=0.05))


def test_a_job_that_nobody_holds_is_not_waited_for(fleet: Client) -> None:
    fleet.submit("digits", {"image": ROW})

    def forgotten() -> bool:
        gc.collect()
        return not fleet._room.inbox._awaited

    # The thread that looks for replies may have it in its hands for a moment.
    wait_until(forgotten, what="nobody who waits", timeout_s=5)


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
    with Client(dataclasses.replace(settings, reply_timeout_s=2)) as fleet:
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


def connections(client: Any) -> set[str]:
    """Return who is connected by now; those of tests before may go meanwhile."""
    return {each["id"] for each in client.client_list()}


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_client_that_is_gone_leaves_nothing_in_redis(
    settings: Settings, worker: Worker, client: Any, how: str
) -> None:
    before = connections(client)
    fleet = Client(settings)
    jobs = fleet.submit_many("digits", ({"i": i} for i in range(100)))
    assert sum(1 for _ in fleet.as_completed(jobs, 10)) == 100
    assert connections(client) - before
    channel = KEYS.replies(fleet.id).encode()
    assert channel in client.pubsub_channels()

    if how == "closed":
        fleet.close()
    else:
        del fleet, jobs

    def gone() -> bool:
        gc.collect()
        return connections(client) <= before and channel not in client.pubsub_channels()

    wait_until(gone, what="silence")


@pytest.mark.timeout(150)
def test_ten_thousand_jobs_leave_no_memory_behind(settings: Settings) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_of_jobs"],
        env={**os.environ, "FLEET_BROKER_URL": settings.broker_url},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    left = json.loads(ran.stdout)
    print(f"{left['blocks']:+} blocks of memory after 20,000 jobs")
    assert left["blocks"] < FEW
    assert left["jobs"] == 0


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


@contextlib.contextmanager
def no_more_threads() -> Iterator[None]:
    """Let no thread be started within the block: there is no memory for its stack."""
    before_bytes = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before_bytes)


def test_where_no_thread_could_be_started_the_next_job_starts_it(
    settings: Settings, worker: Worker
) -> None:
    with Client(dataclasses.replace(settings, result_ttl_s=3602)) as fleet:
        with no_more_threads(), pytest.raises(RuntimeError, match="thread"):
            fleet.submit("digits", {"i": 1})
        assert fleet.submit("digits", {"i": 2}).reply(10).outputs["i"] == 2

        with no_more_threads(), pytest.raises(RuntimeError, match="thread"):
            asyncio.run(fleet.infer("digits", {"i": 3}))
        assert asyncio.run(fleet.infer("digits", {"i": 4}, timeout_s=10)).outputs["i"] == 4
