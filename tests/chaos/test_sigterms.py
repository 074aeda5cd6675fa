"""A hundred workers that are told to end under load, in the middle of batches of a megabyte and of
loads: every one ends in good order, and nothing is lost.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from producer.client import Client, Job
from producer.contract.settings import Settings
from tests.support.engines import left_unfinished_by, loads, row, starts
from tests.support.queues import assert_all_ended, tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(1200)]

MODEL = "wide"
WORKERS, SEED = 100, 1
#: 32 rows of 8,192 floats are a batch of 1 MiB.
WIDTH, BATCH_S = 8192, 0.2
LOAD_S, GRACE_S = 1.0, 20
INSTANCES = 2


class Moment(enum.StrEnum):
    """What a worker does when it is told to end."""

    LOADING = "all load"
    MIXED = "one loads, one runs"
    RUNNING = "all run"


#: Enough for the queue not to run empty before the worker is told to end.
JOBS: Final = {Moment.LOADING: 100, Moment.MIXED: 450, Moment.RUNNING: 200}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class End:
    moment: Moment
    status: int
    took_s: float
    #: Jobs that waited or ran.
    unfinished: int


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "width": WIDTH, "batch_s": BATCH_S, "load_s": LOAD_S}
    with config_folder({MODEL: {**SCRIPTED, "options": options}}) as folder:
        yield folder


def wide(job: int) -> dict[str, np.ndarray]:
    x = np.zeros((1, WIDTH), np.float32)
    x[:, :3] = row(job=job)
    return {"x": x}


class Load:
    """Sends jobs, and keeps them."""

    def __init__(self, client: Client) -> None:
        self._client, self.jobs = client, list[Job]()

    def send(self, moment: Moment) -> None:
        first = len(self.jobs) + 1
        self.jobs += self._client.submit_many(MODEL, map(wide, range(first, first + JOBS[moment])))


def bring_to(moment: Moment, worker: Worker, load: Load, log: Path, loaded: int) -> int | None:
    """Return when ``worker`` is at ``moment``, with the instance that was killed for that.

    ``loaded`` loads are those of others.
    """
    wait_until(lambda: len(loads(log)) == loaded + INSTANCES, what="the loads", timeout_s=40)
    if moment is not Moment.LOADING:
        worker.wait_ready(INSTANCES)
    load.send(moment)
    if moment is not Moment.MIXED:
        return None
    victim = worker.instance_pids()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(loads(log)) == loaded + INSTANCES + 1, what="the next load")
    return victim


def end_of(worker: Worker, moment: Moment, unfinished: int) -> End:
    began_s = time.monotonic()
    status = worker.stop()
    took_s = time.monotonic() - began_s
    return End(moment=moment, status=status, took_s=took_s, unfinished=unfinished)


def test_a_hundred_sigterms_under_load_all_end_in_time(
    broker: TestServer, config: Path, log: Path
) -> None:
    chance, ends, moments = random.Random(SEED), list[End](), list(Moment)
    killed = set[int | None]()
    # A job may be in the hands of several that are killed.
    environ = {"FLEET_GRACE_S": str(GRACE_S), "FLEET_MAX_ATTEMPTS": "10"}
    with contextlib.closing(Client(Settings(broker_url=broker.url))) as client:
        load = Load(client)
        for turn in range(WORKERS):
            moment, loaded = moments[turn % len(moments)], len(loads(log))
            with running_worker(
                *(broker, config),
                node=f"w{turn}",
                instances=INSTANCES,
                environ=environ,
                wait=False,
            ) as worker:
                killed.add(bring_to(moment, worker, load, log, loaded))
                time.sleep(chance.uniform(0, 0.4))
                ends.append(end_of(worker, moment, tally(broker, MODEL).unfinished))

        with running_worker(broker, config, instances=INSTANCES, node="last", environ=environ):
            for job in load.jobs:
                job.reply(120)

    for moment in moments:
        its = [end for end in ends if end.moment is moment]
        slowest_s = max(end.took_s for end in its)
        print(f"{moment}: {len(its)} ends, the slowest after {slowest_s:.2f} s")
    print(f"starts: {dict(collections.Counter(starts(log).values()))} of {len(load.jobs)} jobs")
    assert min(end.unfinished for end in ends) > 0
    assert {end.status for end in ends} == {0}
    assert max(end.took_s for end in ends) < GRACE_S
    assert starts(log).keys() == set(range(1, len(load.jobs) + 1))
    assert left_unfinished_by(log) <= killed
    assert_all_ended(broker, MODEL)
