"""Two workers of one host share its instances, as they are seen from outside."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from producer.client import Client
from producer.contract.names import Keys
from tests.support.commands import FLEET, run_command
from tests.support.engines import row, starts
from tests.support.host import MODEL, running_host
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import alive

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


def test_a_second_worker_gets_its_half_a_third_waits_in_health_and_all_goes_back(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with running_host(server, log, instances=2) as (host, occupancy):
        (first,) = host.add()
        host.wait_parts(2)
        jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 121)))

        (second,) = host.add()
        host.wait_parts(1, 1)
        (third,) = host.add()
        wait_until(lambda: third.status().get("waiting"), what="the third to wait", timeout_s=30)
        url = {"FLEET_BROKER_URL": server.url}
        health = run_command(*FLEET, "health", "-n", third.node, **url)
        status = run_command(*FLEET, "status", COLUMNS="200", **url)
        held = first.status()["holders"]
        given_back = first.log()
        said_once = third.log().count("instance.waiting")
        assert host.stop(second, third) == [0, 0]
        host.wait_parts(2)
        for job in jobs:
            assert job.reply(60).attempts == 1

    said = "waiting for an instance: the 2 of this host are shared by 3 workers"
    assert (health.returncode, health.stdout.strip()) == (0, f"{third.node}: {said}.")
    assert said in status.stdout
    assert all(f"0 {key[:12]}/" in status.stdout for key in held)
    assert said_once == 1
    assert "instance.died" not in given_back
    assert sorted(held.values()) == [first.node, second.node]
    assert occupancy.overlaps() == []
    assert len(occupancy.instances()) == 2
    assert starts(log) == dict.fromkeys(range(1, 121), 1)


def test_a_process_ends_at_once_when_another_worker_has_its_instance(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path
) -> None:
    with running_host(server, log, instances=1) as (host, _):
        (worker,) = host.add()
        host.wait_parts(1)
        (pid,) = worker.instance_pids()
        lease = Keys().lease(worker.instances()[0]["instance"])

        # As if it had been cut off for longer than its lease.
        client.set(lease, f"{(time.time() + 60) * 1000:.0f} other@test/1.1", px=60_000)
        wait_until(lambda: not alive(pid), what="its end", timeout_s=5)
        wait_until(lambda: worker.status()["waiting"], what="the worker to wait")
        job = fleet.submit(MODEL, {"x": row(job=1)})
        client.delete(lease)

        assert job.reply(30).attempts == 1
        assert worker.instance_pids() != [pid]
