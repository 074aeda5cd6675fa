"""Arrays of megabytes through kills, and what the worker's parent takes of them: nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.processes import resident_kib
from producer.client import Client
from producer.contract.names import Keys
from producer.contract.settings import Settings
from tests.support.engines import starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

MODEL = "wide"
JOBS = 150
RESULT_TTL_S = 3600
#: Floats of a row of 1 MB, and of one of 20 MB.
MEGABYTE, TWENTY = 262_144, 20 * 262_144
#: What a parent may grow by while it answers nothing of what passes by: its own status and logs.
GROWTH_KIB = 4096


@pytest.fixture
def config(log: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    options = {"log": str(log), "width": request.param}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


def inputs(job: int, width: int) -> dict[str, Any]:
    wide = np.full((1, width), job, dtype=np.float32)
    wide[0, :3] = (0, 0, job)
    return {"x": wide}


def lives_s(server: TestServer) -> list[int]:
    """Return how long each array that is there will be kept."""
    with server.client() as client:
        keys = client.scan_iter(f"{Keys().blob('')}*", count=1000)
        lives: list[Any] = [client.ttl(key) for key in keys]
        return lives


@pytest.mark.parametrize("config", [MEGABYTE], indirect=True)
def test_no_array_of_a_job_is_missing_or_left_when_instances_and_redis_are_killed(
    broker: TestServer, config: Path, log: Path
) -> None:
    with (
        running_worker(broker, config, instances=2) as worker,
        Client(Settings(broker_url=broker.url)) as client,
    ):
        jobs = client.submit_many(MODEL, (inputs(job, MEGABYTE) for job in range(1, JOBS + 1)))
        of = {job.id: number for number, job in enumerate(jobs, start=1)}
        for count, job in enumerate(client.as_completed(jobs, timeout_s=120), start=1):
            assert job.reply(0).outputs["y"][0, -1] == 2 * of[job.id]
            if count in (20, 60, 100):
                os.kill(worker.instance_pids()[0], signal.SIGKILL)
            if count == 80:
                broker.kill()
                broker.start()
        print(f"unfinished {tally(broker, MODEL)}, starts {max(starts(log).values())}")
        assert_all_ended(broker, MODEL)
        # What an instance had stored of a reply when it died, or the client could not delete.
        print(f"left of replies: {len(lives_s(broker))}")
        assert len(lives_s(broker)) < JOBS / 3
        assert max(lives_s(broker), default=0) <= RESULT_TTL_S + 60


@pytest.mark.parametrize("config", [MEGABYTE, TWENTY], indirect=True, ids=["1 MB", "20 MB"])
def test_the_parent_of_a_worker_takes_nothing_of_the_arrays(
    broker: TestServer, config: Path, request: pytest.FixtureRequest
) -> None:
    width = request.node.callspec.params["config"]
    jobs = 100 if width == MEGABYTE else 12
    with (
        running_worker(broker, config) as worker,
        Client(Settings(broker_url=broker.url)) as client,
    ):
        client.submit(MODEL, inputs(1, width)).reply(timeout_s=60)
        before_kib = resident_kib(worker.pid)

        for job in client.submit_many(MODEL, (inputs(job, width) for job in range(1, jobs + 1))):
            assert job.reply(timeout_s=120).outputs["y"].shape == (1, width)

        after_kib = resident_kib(worker.pid)
        print(f"parent: {before_kib} KiB, then {after_kib} KiB")
        assert after_kib - before_kib < GROWTH_KIB
