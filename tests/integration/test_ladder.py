"""Out of memory, from the queue to the reply: 320 jobs at a batch of 32 that does not fit, at most
three lacks of memory in all, and none after the process was replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from producer.client import Client, Job, Reply
from producer.contract.app import make_app
from producer.contract.errors import NonFinite, OutOfMemory
from producer.contract.settings import Settings
from tests import onnx_models
from tests.support.commands import FLEET, run_command
from tests.support.listener import Listener
from tests.support.servers import TestServer
from tests.support.tight_engine import Row, seen
from tests.support.waiting import wait_until
from tests.support.worker import Worker, config_folder, running_worker

pytestmark = pytest.mark.redis

MODEL = "tight"
JOBS, MOST_OUT_OF_MEMORY = 320, 3
#: A batch of 32 digits in FP32 takes more, of 16 in FP16 less.
DIGITS_LIMIT = {"FLEET_MEMORY_LIMIT_BYTES": "500000", "FLEET_MEMORY_FIRST_CHUNK_BYTES": "4096"}

#: What memory runs out in is smaller than its twin: half the batch goes before another precision.
INT8: Mapping[str, Any] = {
    "precision": "int8",
    "ladder": ["same/2", "fp16/4"],
    "max_batch_size": 32,
    "engines": {"int8": "int8.onnx", "fp16": "digits_fp16.onnx"},
}

_RAN_OUT = re.compile(r"engine\.out_of_memory model=(\S+) precision=(\S+) rows=(\d+)")


def tight(log: Path, **options: object) -> Mapping[str, Any]:
    return {
        "runtime": "tests.support.tight_engine:Tight",
        "max_batch_size": 32,
        "engines": ["fp32", "fp16"],
        "options": {"log": str(log), "fits": {"fp32": 8, "fp16": 24}, **options},
    }


def submit(client: Client, rows: Sequence[Row], model: str = MODEL) -> list[Job]:
    return client.submit_many(model, ({"x": one(row)} for row in rows))


def one(value: float) -> npt.NDArray[np.float32]:
    return np.array([[value]], dtype=np.float32)


def replies(client: Client, jobs: Sequence[Job]) -> dict[str, Reply]:
    """Return the reply of each job; all must have one."""
    return {job.id: job.reply(0) for job in client.as_completed(jobs, timeout_s=40)}


def ran_out(worker: Worker) -> list[tuple[str, int]]:
    """Return precision and rows of each lack of memory, from the worker's log."""
    return [(precision, int(rows)) for _, precision, rows in _RAN_OUT.findall(worker.log())]


def wait_retried(listener: Listener, fallen: set[str]) -> None:
    """Wait until each of ``fallen``, and nobody else, is told as retried; while its worker lives:
    a batch's events follow its answers, and those of a killed process are lost.
    """

    def heard() -> set[str]:
        return {event["uuid"] for event in listener.events if event["type"] == "task-retried"}

    wait_until(lambda: heard() >= fallen, what="a retry of each in the events")
    assert heard() == fallen


def kill_instance(worker: Worker) -> None:
    """End the one instance and wait for the next."""
    (pid,) = worker.ready_pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (pids := worker.ready_pids()) and pid not in pids, what="another instance")


@pytest.fixture
def listener(server: TestServer, fleet: Client) -> Iterator[Listener]:
    listening = Listener(make_app(Settings(broker_url=server.url)))
    yield listening
    listening.stop()


def test_320_jobs_through_an_engine_that_memory_breaks_and_a_kill(
    server: TestServer, fleet: Client, log: Path, listener: Listener
) -> None:
    with config_folder({MODEL: tight(log, batch_s=0.05)}) as config:
        jobs = submit(fleet, [Row.OK] * JOBS)
        with running_worker(server, config, wait=False) as worker:
            wait_until(lambda: len(seen(log, "run")) > 15, what="some batches")
            pid = seen(log, "run")[0].pid
            os.kill(pid, signal.SIGKILL)
            answered = replies(fleet, jobs)
            told = ran_out(worker)
            status = worker.wait_counters(MODEL, jobs=1)
            shown = run_command(*FLEET, "models", FLEET_BROKER_URL=server.url).stdout
            fallen = {job_id for job_id, reply in answered.items() if reply.out_of_memory}
            wait_retried(listener, fallen)

    assert len(answered) == JOBS
    lacks, runs, loads = seen(log, "oom"), seen(log, "run"), seen(log, "load")
    assert len({run.pid for run in runs}) == 2
    assert 1 <= len(lacks) <= MOST_OUT_OF_MEMORY
    assert {lack.pid for lack in lacks} == {pid}
    assert told == [(lack.precision, lack.rows) for lack in lacks]
    assert max(run.rows for run in runs if run.precision == "fp32") <= 8
    assert max(run.rows for run in runs if run.precision == "fp16") <= 24
    anew = [load for load in loads if load.pid == pid][2:]
    assert [load.precision for load in anew] == [lack.precision for lack in lacks]
    assert fallen
    assert {answered[job_id].precision for job_id in fallen} == {"fp16"}
    assert status["out_of_memory"] <= len(lacks)
    assert "32; fits: 8 in fp32" in " ".join(shown.split())


def test_one_job_that_never_fits_and_one_that_is_not_finite_in_fp16_end_alone(
    server: TestServer, fleet: Client, log: Path
) -> None:
    rows = [Row.OK] * 64
    rows[5], rows[20], rows[40] = Row.NAN_IN_FP16, Row.NEVER_FITS, Row.INFINITE_IN_FP16
    with config_folder({MODEL: tight(log)}) as config:
        jobs = submit(fleet, rows)
        with running_worker(server, config) as worker:
            began_s = time.monotonic()
            with pytest.raises(OutOfMemory, match="one row does not fit in memory in any"):
                jobs[20].reply(timeout_s=30)
            others = [job for job in jobs if job is not jobs[20]]
            answered = replies(fleet, others)
            after = submit(fleet, [Row.OK])[0].reply(timeout_s=10)
            took_s = time.monotonic() - began_s
            counters = worker.wait_counters(MODEL, jobs=65)

    assert len(answered) == 63
    assert all(np.isfinite(reply.outputs["y"]).all() for reply in answered.values())
    again = answered[jobs[5].id]
    assert (again.precision, again.batch_size, again.non_finite) == ("fp32", 1, 1)
    assert after.precision == "fp32"
    assert (counters["failed"], counters["non_finite"]) == (1, 1)
    assert counters["reopened"] >= 1
    assert took_s < 20


def test_a_job_that_is_finite_in_no_precision_that_fits_fails_and_is_no_success_with_nan(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with (
        config_folder({MODEL: tight(log, no_row_in_fp32=True)}) as config,
        running_worker(server, config),
    ):
        jobs = submit(fleet, [Row.OK, Row.NAN_IN_FP16, Row.OK])

        with pytest.raises(NonFinite, match="NaN or infinity"):
            jobs[1].reply(timeout_s=20)
        assert {jobs[n].reply(timeout_s=20).precision for n in (0, 2)} == {"fp16"}


def test_a_process_in_which_an_engine_cannot_be_opened_again_is_replaced(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with config_folder({MODEL: tight(log, opens=2)}) as config:
        jobs = submit(fleet, [Row.OK] * 128)
        with running_worker(server, config, wait=False) as worker:
            answered = replies(fleet, jobs)
            said = worker.log()

    assert len(answered) == 128
    assert "fp32 could not be opened again" in said
    assert {reply.attempts for reply in answered.values()} == {1, 2}
    again = {reply.batch_size for reply in answered.values() if reply.attempts == 2}
    assert again == {1}
    assert len(seen(log, "oom")) <= MOST_OUT_OF_MEMORY


def test_the_largest_batch_is_found_before_the_first_job_where_the_file_asks_for_it(
    server: TestServer, fleet: Client, log: Path
) -> None:
    with (
        config_folder({MODEL: {"find_ceiling": True, **tight(log)}}) as config,
        running_worker(server, config) as worker,
    ):
        searched = len(seen(log, "oom"))
        answered = replies(fleet, submit(fleet, [Row.OK] * 64))
        (instance,) = worker.instances()
        with server.client() as client:
            (key,) = client.keys("fleet:ceilings:tight:*")
            assert client.hlen(key) == 2

    assert instance["models"][MODEL]["ceilings"] == {"fp32": 8, "fp16": 24}
    assert {(reply.precision, reply.out_of_memory) for reply in answered.values()} == {("fp32", 0)}
    assert max(reply.batch_size for reply in answered.values()) == 8
    assert len(seen(log, "oom")) == searched > 0


def test_320_digits_under_a_limit_of_the_arena_with_a_kill_in_between(
    server: TestServer, fleet: Client
) -> None:
    held_out = np.load(onnx_models.DIGITS / "heldout.npz")
    images = (held_out["images"][:JOBS, None, None] / 16).astype(np.float32)
    with config_folder({}) as config:
        shutil.copytree(onnx_models.DIGITS, config / "models" / "digits")
        first = fleet.submit_many("digits", ({"image": image} for image in images[:160]))
        with running_worker(server, config, environ=DIGITS_LIMIT) as worker:
            answered = replies(fleet, first)
            before = ran_out(worker)
            kill_instance(worker)
            second = fleet.submit_many("digits", ({"image": image} for image in images[160:]))
            later = replies(fleet, second)
            lacks = ran_out(worker)

    fallen = [reply for reply in answered.values() if reply.out_of_memory]
    assert 1 <= len(before) <= MOST_OUT_OF_MEMORY
    assert {(reply.precision, reply.batch_size) for reply in fallen} == {("fp16", 16)}
    assert lacks == before
    assert {reply.precision for reply in later.values()} == {"fp32"}
    assert max(reply.batch_size for reply in later.values()) <= 16
    right = [
        int(np.argmax((answered | later)[job.id].outputs["scores"])) == label
        for job, label in zip([*first, *second], held_out["labels"][:JOBS], strict=True)
    ]
    assert np.mean(right) > 0.97


def test_320_digits_in_int8_take_half_of_it_first_as_their_ladder_says(
    server: TestServer, fleet: Client, listener: Listener
) -> None:
    images = np.load(onnx_models.DIGITS / "heldout.npz")["images"][:JOBS, None, None]
    limit = {**DIGITS_LIMIT, "FLEET_MEMORY_LIMIT_BYTES": "400000"}
    with config_folder({"digits8": INT8}) as config:
        folder = config / "models" / "digits8"
        onnx_models.digits_int8_static(folder / "int8.onnx")
        shutil.copy(onnx_models.DIGITS / "digits_fp16.onnx", folder)
        jobs = fleet.submit_many(
            "digits8", ({"image": (image / 16).astype(np.float32)} for image in images)
        )
        with running_worker(server, config, environ=limit) as worker:
            answered = replies(fleet, jobs)
            lacks = ran_out(worker)
            fallen = {job_id for job_id, reply in answered.items() if reply.out_of_memory}
            wait_retried(listener, fallen)

    assert len(answered) == JOBS
    assert lacks == [("int8", 32), ("int8", 16)]
    assert {(answered[it].precision, answered[it].batch_size) for it in fallen} == {("fp16", 4)}
    others = [reply for job_id, reply in answered.items() if job_id not in fallen]
    assert {reply.precision for reply in others} == {"int8"}
    assert max(reply.batch_size for reply in others) <= 8


def test_one_long_row_that_never_fits_fails_alone_and_the_next_job_is_answered(
    server: TestServer, fleet: Client
) -> None:
    limit = {"FLEET_MEMORY_LIMIT_BYTES": str(8 << 20), "FLEET_MEMORY_FIRST_CHUNK_BYTES": "65536"}
    with config_folder({"sequence": with_twin("sequence")}) as config:
        path = config / "models" / "sequence" / "sequence.onnx"
        onnx_models.wide_sequence(path)
        onnx_models.in_fp16(path)
        with running_worker(server, config, environ=limit) as worker:
            began_s = time.monotonic()
            lengths = [4, 4, 4000, 4, 4]
            jobs = fleet.submit_many(
                "sequence", ({"x": np.ones((1, t, 1), np.float32)} for t in lengths)
            )
            with pytest.raises(OutOfMemory, match="Available memory of"):
                jobs[2].reply(timeout_s=20)
            answered = replies(fleet, [job for job in jobs if job is not jobs[2]])
            after = fleet.submit("sequence", {"x": np.ones((1, 4, 1), np.float32)})

            assert after.reply(timeout_s=10).precision == "fp32"
            assert {reply.precision for reply in answered.values()} == {"fp32"}
            assert [lack for lack in ran_out(worker) if lack[1] > 1] == []
            assert time.monotonic() - began_s < 10


def with_twin(name: str) -> Mapping[str, Any]:
    return {"max_batch_size": 32, "engines": {"fp32": f"{name}.onnx", "fp16": f"{name}_fp16.onnx"}}
