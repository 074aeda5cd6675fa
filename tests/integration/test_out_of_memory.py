"""A batch that does not fit is answered smaller, in FP16, and the reply says so."""

from __future__ import annotations

from pathlib import Path

from producer.client import Client
from tests.support.engines import row, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker

MODEL = "scripted"


def model(log: Path, **above: int) -> dict[str, object]:
    return {
        **SCRIPTED,
        "options": {"log": str(log), "out_of_memory_above": above},
        "engines": ["fp32", "fp16"],
    }


def test_a_batch_out_of_memory_is_answered_in_fp16_at_half_the_size(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with config_folder({MODEL: model(log, fp32=8, fp16=24)}) as config:
        jobs = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(1, 321)))

        with running_worker(server, config) as worker:
            replies = [job.reply(0) for job in fleet.as_completed(jobs, timeout_s=30)]
            counters = worker.wait_counters(MODEL, jobs=320)

    fallen = [reply for reply in replies if reply.out_of_memory]
    assert len(replies) == 320
    assert fallen
    assert {reply.precision for reply in fallen} == {"fp16"}
    assert max(reply.batch_size for reply in replies if reply.precision == "fp32") <= 8
    assert max(reply.batch_size for reply in replies if reply.precision == "fp16") <= 16
    assert 1 <= counters["out_of_memory"] <= 3


def test_an_engine_in_which_no_row_fits_claims_nothing(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with (
        config_folder({MODEL: model(log, fp32=0, fp16=0)}) as config,
        running_worker(server, config, wait=False) as worker,
    ):
        fleet.submit(MODEL, {"x": row(job=1)})

        broken = wait_until(
            lambda: next((i for i in worker.instances() if i["state"] == "broken"), None),
            what="its report",
        )

    assert "OutOfMemory" in broken["text"] or "memory" in broken["text"]
    assert starts(log) == {}
