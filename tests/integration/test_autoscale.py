"""The number of instances follows the queue: seen from the processes, not from what they say."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from celery import Celery

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"
ENVIRON = {"FLEET_MIN_INSTANCES": "1", "FLEET_DOWN_AFTER_S": "3", "FLEET_TARGET_DRAIN_S": "3"}


def slow(log: Path, *, batch_s: float = 0.05) -> dict[str, object]:
    """Return a model that answers one job in ``batch_s``, one at a time."""
    return {**SCRIPTED, "max_batch_size": 1, "options": {"log": str(log), "batch_s": batch_s}}


def celery_app(server: TestServer) -> Celery:
    return make_app(Settings(broker_url=server.url))


def test_a_burst_grows_the_worker_and_its_end_shrinks_it(
    server: TestServer, fleet: Client, log: Path
) -> None:
    environ = {**ENVIRON, "FLEET_DOWN_AFTER_S": "1", "FLEET_TARGET_DRAIN_S": "2"}
    with (
        config_folder({MODEL: slow(log, batch_s=0.03)}) as config,
        running_worker(server, config, instances=3, environ=environ, wait=False) as worker,
    ):
        worker.wait_ready(1)
        assert len(worker.instance_pids()) == 1
        jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 401)))

        wait_until(lambda: len(worker.instance_pids()) == 3, what="three instances", timeout_s=15)
        for job in fleet.as_completed(jobs, timeout_s=60):
            job.reply(0)
        wait_until(lambda: len(worker.instance_pids()) == 1, what="one instance", timeout_s=18)

    assert starts(log) == dict.fromkeys(range(1, 401), 1)


def test_redis_away_changes_nothing(server: TestServer, fleet: Client, log: Path) -> None:
    with (
        config_folder({MODEL: slow(log)}) as config,
        running_worker(server, config, instances=2, environ=ENVIRON, wait=False) as worker,
    ):
        worker.wait_ready(1)
        (pid,) = worker.instance_pids()

        server.freeze()
        time.sleep(6)
        during = worker.instance_pids()
        server.thaw()

        assert during == [pid]
        assert fleet.submit(MODEL, {"x": row(job=1)}).reply(20).attempts == 1
        assert worker.instance_pids() == [pid]


def test_remote_control_changes_the_number_of_instances(
    server: TestServer, fleet: Client, log: Path
) -> None:
    control = celery_app(server).control
    with (
        config_folder({MODEL: slow(log)}) as config,
        running_worker(server, config, instances=3) as worker,
    ):
        worker.wait_heard()
        # Named, so that nobody waits for what others might answer.
        asked = {"destination": [worker.node], "reply": True, "timeout": 5}
        control.pool_shrink(2, **asked)
        wait_until(lambda: len(worker.instance_pids()) == 1, what="two ends")
        control.pool_grow(1, **asked)
        wait_until(lambda: len(worker.instance_pids()) == 2, what="one start")
        (bounds,) = control.autoscale(3, 1, **asked)
        (refused,) = control.pool_grow(1, **asked)
        control.autoscale(3, 3, **asked)
        wait_until(lambda: len(worker.instance_pids()) == 3, what="three, as the bounds say")

    assert bounds[worker.node] == {"ok": "autoscale now max=3 min=1"}
    assert "autoscale" in refused[worker.node]["error"]


def test_two_workers_follow_the_load_together(server: TestServer, fleet: Client, log: Path) -> None:
    environ = {**ENVIRON, "FLEET_TARGET_DRAIN_S": "10"}
    with (
        # Long batches: what a busy machine adds to each is little beside them.
        config_folder({MODEL: slow(log, batch_s=0.5)}) as config,
        running_worker(server, config, node="w1", instances=2, environ=environ, wait=False) as one,
        running_worker(server, config, node="w2", instances=2, environ=environ, wait=False) as two,
    ):
        one.wait_ready(1)
        two.wait_ready(1)
        # 13 s of work: too much for one instance in 10 s, also after the second until they look,
        # and not for one of each worker, also on a machine that needs half as long again.
        jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 27)))
        most = 0
        for _ in itertools.takewhile(
            lambda _: not all(job.done for job in jobs), itertools.count()
        ):
            most = max(most, len(one.instance_pids()) + len(two.instance_pids()))
            time.sleep(0.05)
            list(fleet.as_completed([job for job in jobs if not job.done][:1], timeout_s=30))

    assert most == 2
    assert {job.reply(0).worker.partition("@")[0] for job in jobs} == {"w1", "w2"}
