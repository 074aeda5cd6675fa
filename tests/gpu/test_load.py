"""Two minutes of load on one real card: every job answered, rightly, and no memory grows."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.onnx_models import DIGITS
from tests.support.servers import TestServer
from tests.support.worker import Worker, running_worker
from workers.demo.digits import held_out
from workers.instances.instance import Instance
from workers.instances.nvml import Nvml

pytestmark = [pytest.mark.gpu, pytest.mark.redis, pytest.mark.timeout(280)]

LOAD_S = 120.0
#: Jobs that are sent before their answers are read.
ROUND = 1000
#: Plans are built when the worker starts for the first time.
STARTS_WITHIN_S = 120.0

LEAST_RIGHT = 0.98
#: What a device may take more at the end than after the first rounds.
MOST_GROWTH_BYTES = 256 << 20


@pytest.fixture
def worker(
    server: TestServer, card: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    """Run a worker with the digits on the card."""
    shutil.copytree(DIGITS, tmp_path / "models" / "digits")
    # Whether the driver is one of those we allow has a test of its own.
    (tmp_path / "fleet.toml").write_text('driver = ""\nmodels = ["digits"]\n')
    environ = {"FLEET_INSTANCES": card.uuid, "FLEET_CACHE": str(tmp_path / "cache")}
    with running_worker(server, tmp_path, instances=None, environ=environ, wait=False) as worker:
        worker.wait_ready(1, timeout_s=STARTS_WITHIN_S)
        yield worker


def test_two_minutes_of_load_are_answered_on_the_card(
    worker: Worker, server: TestServer, nvml: Nvml, card: Instance
) -> None:
    digits = held_out(DIGITS.parent.parent)
    client = Client(Settings(broker_url=server.url))
    (instance,) = worker.instances()
    ran_by = instance["models"]["digits"]["runtime"]
    answered = right = 0
    used: list[int] = []

    began_s = time.monotonic()
    for first in itertools.count(0, ROUND):
        if time.monotonic() - began_s >= LOAD_S:
            break
        places = [(first + step) % len(digits.images) for step in range(ROUND)]
        for place, outputs in zip(places, _answers(client, digits.images, places), strict=True):
            answered += 1
            right += int(np.argmax(outputs["scores"]) == digits.labels[place])
        used.append(nvml.read(card).memory_used_bytes or 0)
    took_s = time.monotonic() - began_s

    print(f"{ran_by}: {answered:,} jobs in {took_s:.0f} s, {answered / took_s:,.0f} a second")
    print(f"{right / answered:.2%} right; device memory {used[0]:,} to {used[-1]:,} bytes")
    print(f"counters {worker.counters('digits')}")
    # What computes on cores is called so; onnxruntime-cuda and tensorrt do not.
    assert not ran_by.startswith("onnxruntime 1"), "the card was not used"
    assert right / answered >= LEAST_RIGHT
    assert used[-1] - used[min(3, len(used) - 1)] <= MOST_GROWTH_BYTES
    assert worker.counters("digits")["failed"] == 0


def _answers(client: Client, images: Any, places: list[int]) -> Iterator[Any]:
    jobs = client.submit_many("digits", ({"image": images[place]} for place in places))
    for job in list(jobs):
        yield job.reply(timeout_s=60).outputs
