"""How waiting jobs become batches, seen from the engine's own log of what it ran."""

from __future__ import annotations

import collections
import statistics
import time
from pathlib import Path

import numpy as np

from producer.client import Client
from producer.contract.names import Keys
from tests.support.engines import Do, batches, row, starts
from tests.support.queues import tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"


def rows(count: int, job: int, do: Do = Do.OK, argument: float = 0.0) -> np.ndarray:
    return np.repeat(row(do, argument, job), count, axis=0)


def options(log: Path, **more: object) -> dict[str, object]:
    return {**SCRIPTED, "options": {"log": str(log), **more}}


def test_waiting_jobs_fill_batches_to_the_limit(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with config_folder({MODEL: options(log)}) as config:
        jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 321)))

        with running_worker(server, config):
            for job in fleet.as_completed(jobs, timeout_s=30):
                job.reply(0)

    first_ten = batches(log)[:10]
    assert sum(size == 32 for size in first_ten) >= 9
    assert max(batches(log)) == 32


def test_an_idle_worker_answers_five_jobs_within_milliseconds(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with config_folder({MODEL: options(log)}) as config, running_worker(server, config):
        fleet.submit(MODEL, {"x": row(job=99)}).reply(10)
        times = []
        for number in range(1, 6):
            began_s = time.perf_counter()
            fleet.submit(MODEL, {"x": row(job=number)}).reply(10)
            times.append(time.perf_counter() - began_s)

    print(f"p50 of five jobs: {statistics.median(times) * 1000:.1f} ms")
    assert starts(log) == dict.fromkeys([99, 1, 2, 3, 4, 5], 1)


def test_a_job_of_a_thousand_rows_is_split_and_joined(
    server: TestServer, fleet: Client, log: Path
) -> None:
    inputs = np.stack([np.zeros(1000), np.linspace(0, 9, 1000), np.ones(1000)], axis=1)

    with config_folder({MODEL: options(log)}) as config, running_worker(server, config) as worker:
        reply = fleet.submit(MODEL, {"x": inputs.astype(np.float32)}).reply(20)
        counters = worker.wait_counters(MODEL, jobs=1)

    assert np.allclose(reply.outputs["y"], inputs * 2)
    assert reply.batch_size == 32
    assert (counters["batches"], counters["rows"]) == (32, 1000)
    assert sum(counters["closed"].values()) == 1
    assert max(int(line.split()[4]) for line in log.read_text().splitlines()[2:]) == 32


def test_large_jobs_are_shared_by_two_instances(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with (
        config_folder({MODEL: options(log, batch_s=0.003)}) as config,
        running_worker(server, config, instances=2),
    ):
        # Both are there: one that starts later finds less, or nothing.
        jobs = fleet.submit_many(MODEL, ({"x": rows(1000, n)} for n in range(1, 33)))
        for job in fleet.as_completed(jobs, timeout_s=40):
            job.reply(0)

    runs = (line.split() for line in log.read_text().splitlines() if line.startswith("start"))
    jobs_of = collections.defaultdict(set)
    for _, number, pid, *_ in runs:
        jobs_of[pid].add(number)
    shares = sorted(map(len, jobs_of.values()))
    assert sum(shares) == 32
    assert len(shares) == 2
    assert shares[0] >= 8


def test_a_model_may_wait_for_more_jobs(server: TestServer, fleet: Client, log: Path) -> None:
    model = {**options(log), "max_queue_delay_s": 2.0}

    with config_folder({MODEL: model}) as config, running_worker(server, config) as worker:
        jobs = []
        for number in range(1, 5):
            jobs.append(fleet.submit(MODEL, {"x": row(job=number)}))
            time.sleep(0.02)
        replies = [job.reply(10) for job in jobs]
        closed = worker.wait_counters(MODEL, jobs=4)["closed"]

    assert [reply.batch_size for reply in replies] == [4] * 4
    assert closed["delay"] == 1


def test_a_model_that_waits_for_more_jobs_holds_up_no_other(
    server: TestServer, fleet: Client, log: Path
) -> None:
    patient = {**options(log), "max_queue_delay_s": 10.0}

    with (
        config_folder({MODEL: patient, "other": options(log)}) as config,
        running_worker(server, config),
    ):
        waiting = fleet.submit(MODEL, {"x": row(job=1)})
        wait_until(lambda: tally(server, MODEL).claimed == 1, what="its claim")
        fleet.submit("other", {"x": row(job=2)}).reply(5)
        waiting.reply(5)


def test_jobs_of_different_shapes_are_answered_from_one_claim(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with config_folder({MODEL: options(log)}) as config:
        jobs = fleet.submit_many(MODEL, ({"x": rows(n % 3 + 1, n)} for n in range(1, 20)))

        with running_worker(server, config):
            replies = [job.reply(20) for job in fleet.as_completed(jobs, timeout_s=20)]

    assert sorted(len(reply.outputs["y"]) for reply in replies) == sorted(
        n % 3 + 1 for n in range(1, 20)
    )


def test_high_priority_overtakes_what_waits(server: TestServer, fleet: Client, log: Path) -> None:
    with config_folder({MODEL: {**options(log), "max_batch_size": 4}}) as config:
        low = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 101)), priority="low")
        high = fleet.submit(MODEL, {"x": row(job=1000)}, priority="high")

        with running_worker(server, config):
            for job in fleet.as_completed([*low, high], timeout_s=20):
                job.reply(0)

    order = [int(line.split()[1]) for line in log.read_text().splitlines() if "start" in line]
    assert order.index(1000) < 4


def test_queues_are_empty_when_all_is_answered(
    server: TestServer, fleet: Client, log: Path
) -> None:
    keys = Keys()
    with config_folder({MODEL: options(log)}) as config, running_worker(server, config):
        for job in fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 50))):
            job.reply(10)

    with server.client() as client:
        lengths = [client.xlen(stream) for stream in keys.streams(f"fleet.{MODEL}")]
        assert lengths == [0, 0, 0]
        assert client.hlen(keys.journal(f"fleet.{MODEL}")) == 0
