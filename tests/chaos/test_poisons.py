"""Jobs that kill whoever runs them: each ends as one dead letter, all others are answered, and a
suspect runs alone.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client, Job
from producer.contract.errors import WorkerLost
from producer.contract.settings import Settings
from tests.support.engines import Do, row, started, starts
from tests.support.queues import assert_all_ended
from tests.support.servers import TestServer
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

MODEL = "scripted"
MAX_ATTEMPTS = 3
#: Long enough for the log to show that nothing was begun beside a job that runs alone.
BATCH_S = 0.1


@pytest.fixture
def client(broker: TestServer) -> Iterator[Client]:
    with Client(Settings(broker_url=broker.url)) as client:
        yield client


def model(log: Path, size: int) -> dict[str, Any]:
    return {**SCRIPTED, "max_batch_size": size, "options": {"log": str(log), "batch_s": BATCH_S}}


def submit(client: Client, count: int, poisons: dict[int, Do]) -> dict[int, Job]:
    numbers = range(1, count + 1)
    inputs = ({"x": row(poisons.get(n, Do.OK), job=n)} for n in numbers)
    return dict(zip(numbers, client.submit_many(MODEL, inputs), strict=True))


def lost(jobs: dict[int, Job], timeout_s: float) -> set[int]:
    """Wait for every job; returns those that ended as WORKER_LOST."""
    found = set()
    for number, job in jobs.items():
        try:
            job.reply(timeout_s)
        except WorkerLost:
            found.add(number)
    return found


def assert_suspects_ran_alone(log: Path, first_batch: int) -> None:
    """After the first batch every start is one job's, and no other begins in its process beside
    it.
    """
    after = started(log)[first_batch:]
    assert {start.rows for start in after} == {1}
    by_pid: dict[int, list[float]] = collections.defaultdict(list)
    for start in after:
        by_pid[start.pid].append(start.at_unix_s)
    gaps = [b - a for times in by_pid.values() for a, b in itertools.pairwise(times)]
    print(f"{len(after)} starts alone, at least {min(gaps):.3f} s apart in each process")
    assert min(gaps) >= BATCH_S


def assert_starts(log: Path, count: int, poisons: Iterable[int]) -> None:
    counts = starts(log)
    print(f"starts: {dict(sorted(collections.Counter(counts.values()).items()))}")
    assert counts.keys() == set(range(1, count + 1))
    assert all(counts[poison] == MAX_ATTEMPTS for poison in poisons)
    assert max(n for job, n in counts.items() if job not in poisons) <= 2


def test_three_poisons_in_one_claim_of_sixty_four(
    broker: TestServer, client: Client, log: Path
) -> None:
    count, poisons = 64, {1: Do.KILL, 30: Do.ABORT, 64: Do.KILL}
    jobs = submit(client, count, poisons)

    with (
        config_folder({MODEL: model(log, count)}) as config,
        running_worker(broker, config) as worker,
    ):
        parent = worker.pid
        dead = lost(jobs, 120)
        assert worker.pid == parent

    assert dead == poisons.keys()
    assert [start.rows for start in started(log)[:count]] == [count] * count
    assert_starts(log, count, poisons)
    assert_suspects_ran_alone(log, count)
    assert_all_ended(broker, MODEL, dead=len(poisons))


class Supervisor(threading.Thread):
    """Starts a worker again when it has ended, as systemd and Docker do."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(name="supervisor", daemon=True)
        self._worker, self._ending = worker, threading.Event()
        self.restarts = 0

    def run(self) -> None:
        while not self._ending.wait(0.1):
            assert self._worker.process is not None
            if self._worker.process.poll() is not None:
                self.restarts += 1
                self._worker.start()

    def stop(self) -> None:
        self._ending.set()
        self.join(30)


def test_a_poison_that_kills_its_parent_too(broker: TestServer, client: Client, log: Path) -> None:
    count, poison = 128, 77
    jobs = submit(client, count, {poison: Do.KILL_PARENT})
    environ = {"FLEET_CLAIM_TTL_S": "6"}

    with (
        config_folder({MODEL: model(log, count)}) as config,
        running_worker(broker, config, environ=environ, wait=False) as worker,
    ):
        supervisor = Supervisor(worker)
        supervisor.start()
        try:
            dead = lost(jobs, 200)
        finally:
            supervisor.stop()

    print(f"{supervisor.restarts} restarts of the worker")
    assert dead == {poison}
    assert supervisor.restarts == MAX_ATTEMPTS
    assert [start.rows for start in started(log)[:count]] == [count] * count
    assert_starts(log, count, {poison})
    assert_suspects_ran_alone(log, count)
    assert_all_ended(broker, MODEL, dead=1)
