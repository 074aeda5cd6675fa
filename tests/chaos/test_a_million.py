"""A million jobs that wait: they cost the workers no memory, and neither sending nor claiming more
of them gets slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from producer.client import Client
from producer.contract.names import Keys, queue_of
from producer.contract.settings import Settings
from tests.chaos.processes import memory_bytes
from tests.support.engines import row
from tests.support.queues import tally
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

MODEL = "scripted"
FEW, MANY, MORE = 1_000, 1_000_000, 10_000
#: Three measurements of each; the best of them is the least disturbed by others on the machine.
REPEATS = 3
RATIO = 1.5
GROWTH_BYTES = 10 * 1024 * 1024
INPUT: Final = {"x": row(job=1)}
INSTANCES = 2


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, no batch ends, and what waits goes on waiting."""
    gate = tmp_path / "gate"
    gate.touch()
    return gate


@pytest.fixture
def worker(broker: TestServer, gate: Path) -> Iterator[Worker]:
    options = {"held_while": str(gate)}
    # A batch is held for longer than any is allowed to run.
    environ = {"FLEET_BATCH_TIMEOUT_S": "3600"}
    with (
        config_folder({MODEL: {**SCRIPTED, "options": options}}) as config,
        running_worker(broker, config, instances=INSTANCES, environ=environ) as worker,
    ):
        yield worker


class Queue:
    """The queue of the model: filled, and let run."""

    def __init__(self, broker: TestServer, gate: Path, client: Client) -> None:
        self._broker, self._gate, self._client = broker, gate, client

    def waiting(self) -> int:
        return tally(self._broker, MODEL).waiting

    def fill_up_to(self, count: int) -> None:
        while (missing := count - self.waiting()) > 0:
            self._client.submit_many(MODEL, [INPUT] * min(missing, MORE))

    def publish_s(self) -> float:
        """Send MORE jobs; returns how long that took."""
        many = [INPUT] * MORE
        began_s = time.monotonic()
        self._client.submit_many(MODEL, many)
        return time.monotonic() - began_s

    def claim_s(self) -> float:
        """Let MORE jobs be claimed and answered; returns how long that took."""
        goal, began_s = self.waiting() - MORE, time.monotonic()
        self._gate.unlink()
        wait_until(lambda: self.waiting() <= goal, what="the claims", timeout_s=120)
        took_s = time.monotonic() - began_s
        self._gate.touch()
        return took_s

    def measure(self, count: int) -> tuple[float, float]:
        """Return the best times of publishing and claiming MORE jobs while ``count`` wait."""
        publish_s, claim_s = [], []
        for _ in range(REPEATS):
            self.fill_up_to(count)
            publish_s.append(self.publish_s())
            claim_s.append(self.claim_s())
        return min(publish_s), min(claim_s)


def memory(worker: Worker) -> list[int]:
    """Return the bytes of the parent and of each instance."""
    return [memory_bytes(pid) or 0 for pid in (worker.pid, *worker.instance_pids())]


def body_bytes(broker: TestServer) -> int:
    with broker.client() as client:
        ((_, fields),) = client.xrange(Keys().streams(queue_of(MODEL))[1], count=1)
    return len(fields[b"body"])


def redis_bytes(broker: TestServer) -> int:
    with broker.client() as client:
        return int(client.info("memory")["used_memory"])


def test_a_million_waiting_jobs(broker: TestServer, worker: Worker, gate: Path) -> None:
    with Client(Settings(broker_url=broker.url)) as client:
        queue = Queue(broker, gate, client)
        queue.fill_up_to(FEW)
        few = queue.measure(FEW)
        before, empty_bytes, began_s = memory(worker), redis_bytes(broker), time.monotonic()

        queue.fill_up_to(MANY)

        filled_s, each_bytes = (
            time.monotonic() - began_s,
            (redis_bytes(broker) - empty_bytes) / MANY,
        )
        many = queue.measure(MANY)
        after = memory(worker)

    grown = [f"{(now - then) / 1e6:+.1f} MB" for now, then in zip(after, before, strict=True)]
    print(f"{MANY} jobs of {body_bytes(broker)} bytes sent in {filled_s:.0f} s")
    print(f"each takes {each_bytes:.0f} bytes of Redis")
    for what, then, now in zip(("publish", "claim and answer"), few, many, strict=True):
        print(f"{what} {MORE}: {then:.2f} s, then {now:.2f} s, {now / then:.2f} times")
    print(f"parent and instances {grown}")
    assert all(now <= RATIO * then for then, now in zip(few, many, strict=True))
    assert all(now - then < GROWTH_BYTES for now, then in zip(after, before, strict=True))
