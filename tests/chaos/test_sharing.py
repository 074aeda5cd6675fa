"""Workers of one host share four instances, whatever befalls them: never two processes on one,
and no job is lost.

Where a process was is what it wrote itself, and when it ended is what the kernel said.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.client import Client, Job
from producer.contract.settings import Settings
from tests.support.engines import row, starts
from tests.support.host import MODEL, Host, running_host
from tests.support.occupancy import Occupancy
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import alive

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

INSTANCES = 4
BATCH_S = 0.2
#: The setting's default.
LEASE_S = 15.0
#: So that twice its time is not long.
SHORT_LEASE_S = 4.0


class Load(threading.Thread):
    """Sends jobs at a rate that keeps one instance busy, until the block ends."""

    def __init__(self, server: TestServer) -> None:
        super().__init__(name="load", daemon=True)
        self._client = Client(Settings(broker_url=server.url))
        self._stopping = threading.Event()
        self.jobs: list[Job] = []

    def __enter__(self) -> Load:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.join(10)
        self._client.close()

    def run(self) -> None:
        for number in itertools.count(1):
            if self._stopping.wait(BATCH_S / 3):
                return
            self.jobs.append(self._client.submit(MODEL, {"x": row(job=number)}))

    def all_answered(self) -> int:
        """Wait for every answer; returns how many there are."""
        self._stopping.set()
        self.join(10)
        for job in self.jobs:
            job.reply(90)
        return len(self.jobs)


@pytest.fixture
def quick(broker: TestServer, log: Path) -> Iterator[tuple[Host, Occupancy]]:
    """A host whose leases and claims are short."""
    settings = {"lease_ttl_s": SHORT_LEASE_S, "claim_ttl_s": SHORT_LEASE_S}
    with running_host(broker, log, instances=INSTANCES, batch_s=BATCH_S, **settings) as made:
        yield made


def assert_sound(broker: TestServer, log: Path, occupancy: Occupancy, jobs: int) -> None:
    assert occupancy.overlaps() == []
    assert len(occupancy.instances()) == INSTANCES
    assert set(starts(log)) == set(range(1, jobs + 1))
    assert_all_ended(broker, MODEL)


def test_one_four_six_and_two_workers_have_their_shares(broker: TestServer, log: Path) -> None:
    took = []
    with (
        running_host(broker, log, instances=INSTANCES, batch_s=BATCH_S) as (host, occupancy),
        Load(broker) as load,
    ):
        for change, parts in (
            (1, [4]),
            (3, [1, 1, 1, 1]),
            (2, [1, 1, 1, 1, 0, 0]),
            (-4, [2, 2]),
        ):
            began_s = time.monotonic()
            if change > 0:
                host.add(change)
                # From when they are there: Python alone takes seconds to start several.
                wait_until(
                    lambda: all(worker.status() for worker in host.workers),
                    what="all workers to be there",
                    timeout_s=60,
                )
                began_s = time.monotonic()
            else:
                assert host.stop(*host.workers[change:]) == [0] * -change
            host.wait_parts(*parts)
            took.append(time.monotonic() - began_s)
            assert sum(bool(worker.status()["waiting"]) for worker in host.workers) == parts.count(
                0
            )
        jobs = load.all_answered()

    print("seconds until each worker had its share:", ", ".join(f"{each:.1f}" for each in took))
    assert max(took) < LEASE_S + BATCH_S
    assert_sound(broker, log, occupancy, jobs)
    assert set(starts(log).values()) == {1}


def test_a_killed_parents_instances_go_to_the_others_at_once(
    broker: TestServer, log: Path, quick: tuple[Host, Occupancy]
) -> None:
    host, occupancy = quick
    with Load(broker) as load:
        host.add(2)
        host.wait_parts(2, 2)
        first = host.workers[0]
        orphans = first.instance_pids()

        killed_s = time.monotonic()
        assert first.process is not None
        first.process.kill()
        wait_until(lambda: not any(map(alive, orphans)), what="no orphan", timeout_s=2)
        dead_s = time.monotonic() - killed_s
        first.process.wait(10)
        host.workers.remove(first)
        (other,) = host.workers
        wait_until(lambda: len(other.instance_pids()) == 4, what="all four with the other")
        took_s = time.monotonic() - killed_s
        host.wait_parts(4)
        jobs = load.all_answered()

    print(f"orphans dead after {dead_s:.2f} s, all instances with the other after {took_s:.1f} s")
    assert took_s < SHORT_LEASE_S
    assert_sound(broker, log, occupancy, jobs)


def test_a_parent_that_stands_still_for_two_leases_shares_its_instances_with_nobody(
    broker: TestServer, log: Path, quick: tuple[Host, Occupancy]
) -> None:
    host, occupancy = quick
    with Load(broker) as load:
        host.add(2)
        host.wait_parts(2, 2)
        first, second = host.workers
        theirs, others = set(first.instance_pids()), set(second.instance_pids())

        os.kill(first.pid, signal.SIGSTOP)
        until_s = time.monotonic() + 2.2 * SHORT_LEASE_S
        while time.monotonic() < until_s:
            assert theirs == set(first.instance_pids())
            assert others == set(second.instance_pids())
            time.sleep(0.1)
        os.kill(first.pid, signal.SIGCONT)
        time.sleep(2)

        assert (theirs, others) == (set(first.instance_pids()), set(second.instance_pids()))
        jobs = load.all_answered()

    assert_sound(broker, log, occupancy, jobs)
    assert set(starts(log).values()) == {1}


def test_instances_that_die_while_their_parent_stands_still_are_anothers_for_good(
    broker: TestServer, log: Path, quick: tuple[Host, Occupancy]
) -> None:
    host, occupancy = quick
    with Load(broker) as load:
        host.add(2)
        host.wait_parts(2, 2)
        first, second = host.workers

        os.kill(first.pid, signal.SIGSTOP)
        for pid in first.instance_pids():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(second.instance_pids()) == 4, what="all four", timeout_s=30)
        os.kill(first.pid, signal.SIGCONT)

        # It starts nothing before the other has given two back.
        host.wait_parts(2, 2)
        jobs = load.all_answered()

    assert_sound(broker, log, occupancy, jobs)


def test_workers_that_are_restarted_one_after_the_other_never_meet_on_an_instance(
    broker: TestServer, log: Path, quick: tuple[Host, Occupancy]
) -> None:
    host, occupancy = quick
    with Load(broker) as load:
        # One after the other, so that it is known who is the oldest.
        for parts in ([4], [2, 2], [2, 1, 1]):
            host.add()
            host.wait_parts(*parts)
        for turn in range(4):
            oldest = host.workers[0]
            if turn % 2:
                assert oldest.process is not None
                oldest.process.kill()
                oldest.process.wait(10)
                host.workers.remove(oldest)
            else:
                assert host.stop(oldest) == [0]
            host.add()
            host.wait_parts(2, 1, 1)
        jobs = load.all_answered()

    assert_sound(broker, log, occupancy, jobs)
