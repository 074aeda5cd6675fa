"""A flood of one model holds up another by no more than two of its batches, whatever its priority
and however much older it is.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from typing import Final

import pytest

from producer.client import Client, Reply
from producer.contract.app import make_app
from producer.contract.names import Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import row
from tests.support.queues import tally
from tests.support.servers import TestServer
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

FLOOD: Final = 20_000
#: 625 batches of so long take longer than the jobs of the other model.
BATCH_S: Final = 0.11
OWN_S: Final = 0.01
JOBS: Final = 60
EVERY_S: Final = 1.0
MARGIN_S: Final = 0.02


@pytest.fixture
def settings(broker: TestServer) -> Settings:
    return Settings(broker_url=broker.url)


@pytest.fixture
def few(settings: Settings) -> Iterator[Client]:
    with Client(settings) as client:
        yield client


def flood(settings: Settings, priority: Priority) -> list[str]:
    """Send the flood and ask for none of its answers; returns the ids of its jobs."""
    inputs = ({"x": row(job=number)} for number in range(1, FLOOD + 1))
    with Client(settings) as client:
        return [job.id for job in client.submit_many("flood", inputs, priority=priority)]


def batch_s(settings: Settings, job_ids: list[str]) -> list[float]:
    """Return how long the engine took for the batches of these jobs that are answered."""
    with make_app(settings) as app:
        infer = register(app)
        metas = [infer.AsyncResult(job_id)._get_task_meta() for job_id in job_ids[:3200:32]]
    return [meta["fleet"]["compute_s"] for meta in metas if meta["status"] == "SUCCESS"]


@pytest.mark.parametrize("priority", [Priority.NORMAL, Priority.LOW])
def test_a_flood_of_one_model_delays_another_by_two_of_its_batches_at_most(
    broker: TestServer, settings: Settings, few: Client, priority: Priority
) -> None:
    models = {
        "flood": {**SCRIPTED, "options": {"batch_s": BATCH_S}},
        "few": {**SCRIPTED, "options": {"batch_s": OWN_S}},
    }
    with config_folder(models) as config, running_worker(broker, config):
        sent = flood(settings, priority)
        answered: list[tuple[float, Reply]] = []
        for number in range(JOBS):
            began_s = time.monotonic()
            reply = few.submit("few", {"x": row(job=number + 1)}).reply(60)
            answered.append((time.monotonic() - began_s, reply))
            time.sleep(max(0.0, EVERY_S - answered[-1][0]))
        left = tally(broker, "flood").unfinished

        theirs_s = statistics.median(batch_s(settings, sent))
    took_s = sorted(each for each, _ in answered)
    own_s = statistics.median(reply.compute_s for _, reply in answered)
    p99_s = took_s[-1 - JOBS // 100]
    limit_s = 2 * theirs_s + own_s + MARGIN_S
    print(
        f"flood {priority}: batches of {theirs_s * 1000:.1f} ms, {left} of {FLOOD} left; "
        f"{JOBS} jobs of another: median {statistics.median(took_s) * 1000:.1f} ms, "
        f"p99 {p99_s * 1000:.1f} ms, limit {limit_s * 1000:.1f} ms; load {os.getloadavg()[0]:.1f}"
    )
    assert left > 0
    assert theirs_s >= 0.05
    assert p99_s < limit_s
