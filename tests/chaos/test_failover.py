"""A master dies, hangs or is demoted: apps, parents and instances go on with the one that Sentinel
makes of its replica.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from celery.exceptions import TimeoutError as CeleryTimeout
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.errors import JobTimeout
from producer.contract.settings import SOCKET_TIMEOUT_S, Settings
from tests.support.app import fleet_app
from tests.support.commands import FLEET, run_command
from tests.support.engines import row, starts
from tests.support.sentinels import Watched, watched_servers
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.redis,
    pytest.mark.timeout(240),
    # Celery and kombu leave connections that broke to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: What may be needed beside what Sentinel itself needs.
BACK_WITHIN_S: Final = 30.0

#: What a call may raise while nobody is master.
TROUBLE: Final = (redis.RedisError, OperationalError, JobTimeout, CeleryTimeout)


def lose_master(watched: Watched, master: TestServer, how: str) -> None:
    """End the time of ``master``, one way or another."""
    match how:
        case "killed":
            master.kill()
        case "frozen":
            master.freeze()
        case "demoted":
            watched.fail_over()


def seconds_until(works: Callable[[], Any], since_s: float) -> float:
    """Return how long after ``since_s`` the first call of ``works`` was that gave an answer."""

    def tried() -> bool:
        with contextlib.suppress(*TROUBLE):
            return bool(works())
        return False

    wait_until(tried, what="an answer", timeout_s=2 * BACK_WITHIN_S, every_s=0.2)
    return time.monotonic() - since_s


def ping(url: str) -> Any:
    """Ask for the parents over a connection of its own: no old one may delay the question."""
    with fleet_app(Settings(broker_url=url)) as (app, _):
        return app.control.inspect(timeout=2).ping()


@pytest.mark.parametrize("how", ["killed", "frozen", "demoted"])
def test_everybody_goes_on_after_a_failover(how: str, log: Path) -> None:
    with (
        watched_servers() as watched,
        config_folder({"scripted": {**SCRIPTED, "options": {"log": str(log)}}}) as config,
        running_worker(
            watched.master(), config, environ={"FLEET_BROKER_URL": watched.url}
        ) as worker,
        Client(Settings(broker_url=watched.url)) as client,
        fleet_app(Settings(broker_url=watched.url)) as (_, infer),
    ):
        ways: dict[str, Callable[[], Any]] = {
            "client": lambda: client.submit("scripted", {"x": row()}).reply(timeout_s=2),
            "delay": lambda: infer.delay("scripted", {"x": row()}).get(timeout=2),
            "parent": lambda: ping(watched.url),
        }
        assert all(way() for way in ways.values())
        pids = {worker.pid, *worker.instance_pids()}
        master = watched.master()

        lose_master(watched, master, how)
        watched.wait_promoted(master)
        since_s = time.monotonic()
        with ThreadPoolExecutor() as threads:
            waits = [threads.submit(seconds_until, way, since_s) for way in ways.values()]
            back_s = dict(zip(ways, [wait.result() for wait in waits], strict=True))
        # Results that nobody holds any more unsubscribe when they go: while there is a server.
        gc.collect()

        print(f"master {how}, seconds after the promotion: {back_s}")
        # That nobody answers is found out by waiting.
        limit_s = BACK_WITHIN_S + (SOCKET_TIMEOUT_S if how == "frozen" else 0.0)
        assert max(back_s.values()) < limit_s, f"{back_s}\n{worker.log()}"
        assert {worker.pid, *worker.instance_pids()} == pids
        status = run_command(*FLEET, "status", FLEET_BROKER_URL=watched.url)
        assert worker.node in status.stdout


def test_jobs_that_the_replica_had_are_answered_after_a_failover(log: Path) -> None:
    options = {"log": str(log), "batch_s": 0.2}
    with (
        watched_servers(sentinels=1) as watched,
        config_folder({"scripted": {**SCRIPTED, "options": options}}) as config,
        running_worker(watched.master(), config, environ={"FLEET_BROKER_URL": watched.url}),
        Client(Settings(broker_url=watched.url)) as client,
    ):
        master = watched.master()
        jobs = client.submit_many("scripted", ({"x": row(job=i)} for i in range(1, 601)))
        with master.client() as before:
            wait_until(lambda: before.wait(1, 1000) == 1, what="the replica to have them")

        master.kill()
        replies = [job.reply(timeout_s=60) for job in client.as_completed(jobs, timeout_s=90)]

    assert len(replies) == 600
    assert set(starts(log)) == set(range(1, 601))
