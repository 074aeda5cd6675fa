"""How much faster calls are whose hooks run beside the engine, on a machine that is quiet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.servers import TestServer
from tests.support.worker import SCRIPTED, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

#: Both take so long: the hook compresses, which is work and no sleep; the engine waits, as one does
#: that computes on a device.
EACH_S = 0.02
CALLS = 100
ROUNDS = 3


@pytest.mark.parametrize("hook", ["before", "behind"])
def test_calls_with_a_hook_that_takes_as_long_as_the_engine_are_1_6_times_as_fast_together(
    server: TestServer, tmp_path: Path, hook: str
) -> None:
    model = {
        **SCRIPTED,
        "max_batch_size": 1,
        "code": "tests.support.hooks:Told",
        "options": {"log": str(tmp_path / "starts.log"), "batch_s": EACH_S},
    }
    inputs = [{hook: f"work {EACH_S}", "job": n} for n in range(1, CALLS + 1)]
    ratios = []
    with (
        config_folder({"told": model}) as config,
        running_worker(server, config),
        Client(Settings(broker_url=server.url)) as fleet,
    ):
        for _ in range(ROUNDS):
            began_s = time.monotonic()
            for each in inputs:
                fleet.submit("told", each).reply(20)
            in_a_row_s = time.monotonic() - began_s

            began_s = time.monotonic()
            for job in fleet.submit_many("told", inputs):
                job.reply(20)
            together_s = time.monotonic() - began_s

            ratios.append(in_a_row_s / together_s)
            print(
                f"{CALLS} calls, {hook}: {in_a_row_s:.2f} s in a row, {together_s:.2f} s together"
            )

    # The best of the rounds: where other programs take the cores, nothing can run beside.
    assert max(ratios) >= 1.6, ratios
