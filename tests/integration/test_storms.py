"""What a hostile review found, as it was found: Redis in trouble after a run, frozen processes,
engines that leave children behind.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import redis

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.errors import FleetError
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import Do, row, starts
from tests.support.servers import TestServer, running_server
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, children_of, config_folder, running_worker

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()


def test_a_results_server_that_is_away_costs_no_second_run(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    with running_server() as results:
        environ = {"FLEET_RESULT_URL": results.url}
        settings = Settings(broker_url=server.url, result_url=results.url)
        with (
            Client(settings) as app,
            running_worker(server, config, environ=environ) as worker,
        ):
            app.submit(MODEL, {"x": row(job=1)}).reply(20)
            job = app.submit(MODEL, {"x": row(Do.SLEEP, 1, job=2)})
            wait_until(lambda: starts(log).get(2), what="the start")

            results.kill()
            wait_until(
                lambda: worker.log().count("redis.trouble") > 1, what="two tries to store it"
            )
            held = client.xlen(KEYS.stream(QUEUE, Priority.NORMAL))
            results.start()

            assert held == 1
            assert job.reply(30).attempts == 1

    assert starts(log) == {1: 1, 2: 1}


def test_a_full_server_costs_no_second_run_of_a_job_with_a_link(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    with running_worker(server, config):
        link = infer.s(MODEL, {"x": row(job=9)}).set(immutable=True)
        linked = infer.apply_async((MODEL, {"x": row(Do.SLEEP, 0.5, job=1)}), link=link)
        plain = infer.delay(MODEL, {"x": row(job=2)})
        wait_until(lambda: starts(log).get(1), what="the start")

        client.config_set("maxmemory", 1)
        try:
            # The link cannot be sent, and holds up nobody else.
            plain.get(timeout=10)
        finally:
            client.config_set("maxmemory", 0)

        linked.get(timeout=20)
        wait_until(lambda: starts(log).get(9), what="the link")
        wait_until(lambda: not client.xlen(KEYS.stream(QUEUE, Priority.NORMAL)), what="its end")

    counts = starts(log)
    assert counts[1] == 1
    assert counts[2] == 1


def test_a_dead_workers_jobs_are_taken_over_on_a_full_server(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path, log: Path
) -> None:
    environ = {"FLEET_CLAIM_TTL_S": "3"}
    with (
        running_worker(server, config, node="victim", environ=environ) as victim,
        running_worker(server, config, node="heir", environ=environ) as heir,
    ):
        job = fleet.submit(MODEL, {"x": row(Do.SLEEP, 3, job=1)})
        wait_until(lambda: starts(log).get(1), what="the first start")
        holders = {victim: victim.instance_pids(), heir: heir.instance_pids()}
        first = int(
            next(line for line in log.read_text().splitlines() if "start" in line).split()[2]
        )
        holder = victim if first in holders[victim] else heir

        client.config_set("maxmemory", 1)
        os.kill(holder.pid, signal.SIGKILL)
        try:
            wait_until(lambda: starts(log).get(1) == 2, what="the second start", timeout_s=15)
            assert job.reply(20).attempts == 2
        finally:
            client.config_set("maxmemory", 0)


def test_a_dead_instance_is_replaced_while_the_broker_is_away(
    server: TestServer, config: Path
) -> None:
    with running_worker(server, config) as worker:
        (pid,) = worker.instance_pids()
        server.stop()
        try:
            wait_until(
                lambda: "Trying again in" in worker.log(), what="Celery's loop to wait for a try"
            )
            os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: worker.instance_pids() not in ([], [pid]), what="another", timeout_s=3
            )
        finally:
            server.start()
        worker.wait_ready()


def test_the_death_of_an_instance_is_seen_though_a_child_holds_its_pipes(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config) as worker:
        fleet.submit(MODEL, {"x": row(Do.FORK, 20, job=1)}).reply(10)
        (pid,) = worker.instance_pids()
        orphans = children_of(pid)
        held = fleet.submit(MODEL, {"x": row(Do.SLEEP, 1, job=2)})
        wait_until(lambda: starts(log).get(2), what="the start")

        os.kill(pid, signal.SIGKILL)

        assert held.reply(15).attempts == 2
        for orphan in orphans:
            os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("whole", [True, False], ids=["worker and instance", "worker alone"])
def test_a_worker_that_was_frozen_kills_nobody(
    server: TestServer, fleet: Client, config: Path, log: Path, whole: bool
) -> None:
    with running_worker(server, config, environ={"FLEET_CLAIM_TTL_S": "3"}) as worker:
        pids = worker.instance_pids()
        frozen = [worker.pid, *(pids if whole else [])]
        job = fleet.submit(MODEL, {"x": row(Do.SLEEP, 2, job=1)})
        wait_until(lambda: starts(log).get(1), what="the start")

        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.5)
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)

        assert job.reply(20).attempts == 1
        assert worker.instance_pids() == pids


def test_a_reply_too_large_for_redis_is_an_error_of_its_job(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config):
        with pytest.raises(FleetError, match="Send fewer rows"):
            fleet.submit(MODEL, {"x": row(Do.LARGE, 80, job=1)}).reply(30)
        fleet.submit(MODEL, {"x": row(job=2)}).reply(10)

    assert starts(log) == {1: 1, 2: 1}


def test_an_engine_that_exits_fails_its_job_alone(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config) as worker:
        pids = worker.instance_pids()
        with pytest.raises(FleetError) as told:
            fleet.submit(MODEL, {"x": row(Do.EXIT, job=1)}).reply(10)
        assert worker.instance_pids() == pids

    assert told.value.code == "ENGINE_FAILED"


def test_a_job_whose_chord_cannot_be_counted_holds_nobody_up(
    server: TestServer, client: redis.Redis, config: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    body = infer.s(MODEL, {"x": row()})
    with running_worker(server, config):
        client.set("celery-taskset-meta-broken.j", "no list")
        member = infer.apply_async((MODEL, {"x": row()}), chord=body, group_id="broken")
        after = infer.delay(MODEL, {"x": row(job=2)})

        # The answer was stored before its chord was looked at.
        assert member.get(timeout=15)["y"].shape == (1, 3)
        assert after.get(timeout=10)["y"].shape == (1, 3)
        wait_until(lambda: not client.xlen(KEYS.stream(QUEUE, Priority.NORMAL)), what="both to end")
        client.delete("celery-taskset-meta-broken.j")


def test_a_poisons_errback_is_told(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    with running_worker(server, config):
        errback = infer.s(MODEL, {"x": row(job=9)}).set(immutable=True)
        poison = infer.apply_async((MODEL, {"x": row(Do.KILL, job=1)}), link_error=errback)

        with pytest.raises(FleetError) as told:
            poison.get(timeout=30)
        wait_until(lambda: starts(log).get(9), what="the errback")
        wait_until(lambda: not client.xlen(KEYS.stream(QUEUE, Priority.NORMAL)), what="its end")

    assert told.value.code == "WORKER_LOST"
    assert starts(log)[1] == 3


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_every_signal_that_asks_to_end_is_a_drain_with_exit_0(
    server: TestServer, config: Path, fleet: Client, log: Path, how: signal.Signals
) -> None:
    with running_worker(server, config) as worker:
        job = fleet.submit(MODEL, {"x": row(Do.SLEEP, 0.7, job=1)})
        wait_until(lambda: starts(log).get(1), what="the start")

        assert worker.stop(how) == 0
        assert job.reply(5).attempts == 1


def test_the_grace_holds_while_the_server_stands_still(server: TestServer, config: Path) -> None:
    with running_worker(server, config, environ={"FLEET_GRACE_S": "3"}) as worker:
        server.freeze()
        try:
            began_s = time.monotonic()
            status = worker.stop()
            took_s = time.monotonic() - began_s
        finally:
            server.thaw()

    assert status == 0
    assert took_s < 3 + 5


def test_a_signal_while_instances_are_started_waits_for_none_of_them(
    server: TestServer, log: Path
) -> None:
    slow = {**SCRIPTED, "options": {"log": str(log), "load_s": 30}}
    with (
        config_folder({MODEL: slow}) as folder,
        running_worker(server, folder, instances=6, wait=False) as worker,
    ):
        wait_until(lambda: len(worker.instance_pids()) >= 2, what="the first starts", every_s=0.001)
        began_s = time.monotonic()

        assert worker.stop() == 0
        assert time.monotonic() - began_s < 8
