"""What a fault of one job does to its batch-mates: nothing; and what becomes of the job itself."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer.client import Client, Job
from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import FleetError
from producer.contract.message import Message, to_fields
from producer.contract.names import Keys, Priority
from producer.contract.settings import Settings
from producer.tasks import register
from tests.support.engines import Do, row, started, starts
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker, write_model

MODEL = "scripted"
QUEUE = f"fleet.{MODEL}"
KEYS = Keys()


def code_of(job: Job, timeout_s: float = 30) -> str:
    """Return ``ok`` or the code of the job's error."""
    try:
        job.reply(timeout_s)
    except FleetError as error:
        return error.code
    return "ok"


def dead_letters(client: redis.Redis) -> list[dict[bytes, bytes]]:
    found: Any = client.xrange(KEYS.dead(QUEUE))
    return [fields for _, fields in found]


def test_every_bad_job_of_a_window_ends_in_its_own_state(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path, log: Path
) -> None:
    stream = KEYS.stream(QUEUE, Priority.NORMAL)
    infer = register(make_app(Settings(broker_url=server.url)))
    good = [fleet.submit(MODEL, {"x": row(job=n)}) for n in range(1, 9)]
    bad = {
        "BAD_REQUEST dtype": fleet.submit(MODEL, {"x": np.array([[1, 2, 3]], dtype=np.int64)}),
        "BAD_REQUEST shape": fleet.submit(MODEL, {"x": np.zeros((1, 7), np.float32)}),
        "BAD_REQUEST input": fleet.submit(MODEL, {"z": row()}),
        "BAD_REQUEST rows": fleet.submit(MODEL, {"x": np.zeros((0, 3), np.float32)}),
        "BAD_REQUEST value": fleet.submit(MODEL, {"x": row(Do.REFUSE, job=20)}),
        "ENGINE_FAILED raise": fleet.submit(MODEL, {"x": row(Do.RAISE, job=21)}),
        "OUT_OF_MEMORY memory": fleet.submit(MODEL, {"x": row(Do.MEMORY_ERROR, job=22)}),
        "OUT_OF_MEMORY array": fleet.submit(MODEL, {"x": row(Do.ARRAY_MEMORY_ERROR, job=23)}),
        "EXPIRED": fleet.submit(MODEL, {"x": row(job=24)}, expires_s=0.01),
        "CANCELLED": fleet.submit(MODEL, {"x": row(job=25)}),
    }
    bad["CANCELLED"].cancel()
    other = infer.apply_async(("nosuch", {"x": row(job=26)}), queue=QUEUE)
    packed = wire.dumps(([MODEL, {"x": row(job=27)}], {}, {}))
    raw = raw_entries(packed)
    for fields in raw.values():
        client.xadd(stream, fields)
    client.lpush("celery", b"a task of another app")
    good += [fleet.submit(MODEL, {"x": row(job=n)}) for n in range(9, 17)]
    time.sleep(0.05)

    with running_worker(server, config) as worker:
        pids = (worker.pid, worker.instance_pids())
        began_s = time.monotonic()
        codes = {name: code_of(job) for name, job in bad.items()}
        answers = [code_of(job) for job in good]
        with pytest.raises(FleetError) as told:
            other.get(timeout=10)
        letters = wait_until(
            lambda: found if len(found := dead_letters(client)) == len(raw) else None,
            what="a dead letter for each raw entry",
        )
        took_s = time.monotonic() - began_s
        assert (worker.pid, worker.instance_pids()) == pids

    assert answers == ["ok"] * 16
    assert codes == {name: name.split()[0] for name in bad}
    assert told.value.code == "UNKNOWN_MODEL"
    assert {letter[b"code"] for letter in letters} == {b"BAD_MESSAGE"}
    for job_id in ("malformed", "pickled", "future", "stranger"):
        with pytest.raises(FleetError) as error:
            infer.AsyncResult(job_id).get(timeout=5)
        assert error.value.code == "BAD_MESSAGE"
    assert client.lrange("celery", 0, -1) == [b"a task of another app"]
    assert took_s < 10
    client.delete("celery")


def raw_entries(packed: bytes) -> dict[str, Any]:
    """Return stream entries that no app of ours would send."""

    def entry(job_id: str, **changes: Any) -> dict[str, Any]:
        headers = {"id": job_id, "task": changes.pop("task", "fleet.infer")}
        message = Message(
            **{
                "headers": headers,
                "properties": {},
                "content_type": wire.CONTENT_TYPE,
                "content_encoding": "binary",
                "body": packed,
                **changes,
            }
        )
        return to_fields(message, job_id=job_id, rows=1)

    without_id = entry("x")
    del without_id["id"]
    return {
        "malformed": {"id": "malformed", "rows": 1, "env": b"\xc1", "body": b""},
        "pickled": entry(
            "pickled", content_type="application/x-python-serialize", body=b"\x80\x04"
        ),
        "future": entry("future", body=b"\x63" + packed[1:]),
        "stranger": entry("stranger", task="their.task"),
        "without id": without_id,
        "strange fields": {"hello": "world"},
    }


def test_a_model_nobody_serves_is_refused_at_the_call(
    server: TestServer, client: redis.Redis, config: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))

    with running_worker(server, config), pytest.raises(FleetError) as told:
        infer.delay("nosuch", {"x": row()})

    assert told.value.code == "UNKNOWN_MODEL"


@pytest.mark.parametrize(("do", "position"), [(Do.KILL, 0), (Do.ABORT, 7), (Do.KILL, 15)])
def test_a_job_that_kills_its_process_harms_nobody_else(
    server: TestServer, fleet: Client, log: Path, do: Do, position: int
) -> None:
    # Three starts are what a worker gives a job by itself.
    most, environ = (3, {}) if position == 0 else (2, {"FLEET_MAX_ATTEMPTS": "2"})
    model = {**SCRIPTED, "max_batch_size": 16, "options": {"log": str(log), "batch_s": 0.05}}
    numbers = list(range(1, 33))
    poison = numbers[position]
    with config_folder({MODEL: model}) as config:
        jobs = {
            n: fleet.submit(MODEL, {"x": row(do if n == poison else Do.OK, job=n)}) for n in numbers
        }

        with running_worker(server, config, environ=environ) as worker:
            parent = worker.pid
            codes = {n: code_of(job, 60) for n, job in jobs.items()}
            assert worker.pid == parent
            with server.client() as client:
                (letter,) = wait_until(lambda: dead_letters(client), what="the dead letter")

    counts = starts(log)
    assert codes == {n: "WORKER_LOST" if n == poison else "ok" for n in numbers}
    assert counts[poison] == most
    assert max(counts[n] for n in numbers if n != poison) <= 2
    assert letter[b"code"] == b"WORKER_LOST"
    assert letter[b"attempts"].decode() == str(most)
    assert letter[b"job"].decode() == jobs[poison].id


def test_while_a_suspect_runs_alone_nothing_is_begun_beside_it(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config) as worker:
        (pid,) = worker.instance_pids()
        suspect = fleet.submit(MODEL, {"x": row(Do.SLEEP, 1.0, job=1)})
        wait_until(lambda: starts(log).get(1), what="the first start")
        os.kill(pid, signal.SIGKILL)
        others = fleet.submit_many(MODEL, ({"x": row(job=n)} for n in range(2, 40)))

        reply = suspect.reply(20)
        for job in others:
            job.reply(20)

    lines = [line.split() for line in log.read_text().splitlines() if line.startswith("start")]
    second = [line for line in lines if line[1] == "1"][1]
    beside = [
        line
        for line in lines
        if line[2] == second[2] and float(second[5]) < float(line[5]) < float(second[5]) + 0.95
    ]
    assert reply.attempts == 2
    assert reply.batch_size == 1
    assert beside == []


def test_a_slow_load_takes_no_jobs_and_is_done_once_for_each_process(
    server: TestServer, fleet: Client, log: Path
) -> None:
    # Longer than Celery's own pool waits for a process, which is 4 s.
    load_s = 5
    model = {**SCRIPTED, "options": {"log": str(log), "load_s": load_s}}
    with (
        config_folder({MODEL: model}) as config,
        running_worker(server, config, instances=2) as worker,
    ):
        victim, other = worker.instance_pids()

        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: victim not in worker.instance_pids(), what="the death")
        for number in range(1, 20):
            fleet.submit(MODEL, {"x": row(job=number)}).reply(10)
        wait_until(lambda: log.read_text().count("load") == 3, what="its successor", timeout_s=40)
        worker.wait_ready(2, timeout_s=40)
        loads = [line.split() for line in log.read_text().splitlines() if "load" in line]

    loaded_unix_s = {int(pid): float(began_unix_s) + load_s for _, pid, _, _, began_unix_s in loads}
    ran = started(log)
    assert ran[0].pid == other
    assert victim not in {start.pid for start in ran}
    # On a machine on which the jobs take as long as the load, its successor takes the last ones.
    assert [start for start in ran if start.at_unix_s < loaded_unix_s[start.pid]] == []
    assert len(loads) == 3
    assert len(loaded_unix_s) == 3


@pytest.mark.parametrize("how", ["cannot find the weights", "abort"])
def test_a_model_that_cannot_load_claims_nothing_and_works_once_repaired(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path, how: str
) -> None:
    trouble = tmp_path / "trouble"
    trouble.write_text(how)
    model = {**SCRIPTED, "options": {"log": str(log), "load_fails_while": str(trouble)}}
    with (
        config_folder({MODEL: model}) as config,
        running_worker(server, config, wait=False) as worker,
    ):
        job = fleet.submit(MODEL, {"x": row(job=1)})

        broken = wait_until(lambda: broken_instance(worker), what="a broken instance", timeout_s=30)
        assert starts(log) == {}
        trouble.unlink()

        assert job.reply(40).attempts == 1
        expected = "SIGABRT" if how == "abort" else how
        assert expected in broken["text"]


def broken_instance(worker: Worker) -> dict[str, Any] | None:
    return next((i for i in worker.instances() if i["state"] == "broken"), None)


def test_one_broken_model_does_not_stop_another(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    trouble = tmp_path / "trouble"
    trouble.write_text("no weights")
    good = {**SCRIPTED, "options": {"log": str(log)}}
    bad = {**SCRIPTED, "options": {"load_fails_while": str(trouble)}}
    with (
        config_folder({MODEL: good, "other": bad}) as config,
        running_worker(server, config, wait=False) as worker,
    ):
        reply = fleet.submit(MODEL, {"x": row(job=1)}).reply(20)
        worker.wait_ready()
        (instance,) = worker.instances()

    assert reply.model == MODEL
    assert instance["text"] == "other: no weights"


def test_a_hung_batch_is_ended_and_its_job_fails_in_the_end(
    server: TestServer, client: redis.Redis, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config, environ={"FLEET_BATCH_TIMEOUT_S": "1"}) as worker:
        hung = fleet.submit(MODEL, {"x": row(Do.SLEEP, 60, job=1)})
        code = code_of(hung, 40)
        after = fleet.submit(MODEL, {"x": row(job=2)}).reply(20)
        assert "its batch of scripted ran for more than 1 s" in worker.log()

    assert code == "TIMEOUT"
    assert starts(log)[1] == 1
    assert after.attempts == 1
    assert [letter[b"code"] for letter in dead_letters(client)] == [b"TIMEOUT"]


def test_the_one_job_over_the_time_limit_ends_as_timeout_and_its_mates_are_answered(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path
) -> None:
    limited = {**SCRIPTED, "time_limit_s": 1, "options": {"log": str(log)}}
    with config_folder({MODEL: limited}) as config:
        jobs = [fleet.submit(MODEL, {"x": row(job=number)}) for number in range(1, 8)]
        spinning = fleet.submit(MODEL, {"x": row(Do.SPIN, 60, job=8)})
        with running_worker(server, config) as worker:
            codes = [code_of(job, 60) for job in jobs]
            late = code_of(spinning, 60)
            worker.wait_ready()

    counts = starts(log)
    assert codes == ["ok"] * 7
    assert late == "TIMEOUT"
    assert counts[8] == 2
    assert max(counts.values()) == 2
    assert [letter[b"attempts"] for letter in dead_letters(client)] == [b"2"]


def test_a_senders_own_time_limit_ends_its_job_alone(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))
    slow = infer.apply_async((MODEL, {"x": row(Do.SLEEP, 60, job=1)}), time_limit=1)
    mates = [infer.delay(MODEL, {"x": row(job=number)}) for number in (2, 3)]

    with running_worker(server, config):
        answers = [mate.get(timeout=30)["y"].shape for mate in mates]
        with pytest.raises(FleetError) as told:
            slow.get(timeout=30)

    assert answers == [(1, 3), (1, 3)]
    assert told.value.code == "TIMEOUT"
    assert max(starts(log).values()) <= 2


def test_a_job_that_kills_whoever_reads_it_ends_as_a_dead_letter(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path
) -> None:
    reads = {**SCRIPTED, "runtime": "tests.support.engines:KillsReaders"}
    with config_folder({MODEL: {**reads, "options": {"log": str(log)}}}) as config:
        jobs = [fleet.submit(MODEL, {"x": row(job=number)}) for number in range(1, 8)]
        poison = fleet.submit(MODEL, {"x": row(Do.KILL, job=8)})
        with running_worker(server, config, environ={"FLEET_MAX_ATTEMPTS": "1"}):
            code = code_of(poison, 60)
            codes = [code_of(job) for job in jobs]

    killed = [line for line in log.read_text().splitlines() if line.startswith("read 8 ")]
    assert code == "WORKER_LOST"
    assert codes == ["ok"] * 7
    assert starts(log) == dict.fromkeys(range(1, 8), 1)
    # Read twice like any job, and once more alone.
    assert len(killed) == 3
    ((letter),) = dead_letters(client)
    assert letter[b"job"].decode() == poison.id
    assert letter[b"attempts"] == b"3"


def test_an_instance_that_stands_still_is_replaced_and_its_jobs_are_answered(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    with running_worker(server, config, environ={"FLEET_CLAIM_TTL_S": "3"}) as worker:
        (pid,) = worker.instance_pids()
        slow = fleet.submit(MODEL, {"x": row(Do.SLEEP, 1.0, job=1)})
        wait_until(lambda: starts(log).get(1), what="the start")

        os.kill(pid, signal.SIGSTOP)

        assert slow.reply(30).attempts == 2
        assert worker.instance_pids() != [pid]


def test_a_job_submitted_twice_runs_once(
    server: TestServer, fleet: Client, config: Path, log: Path
) -> None:
    first = fleet.submit(MODEL, {"x": row(job=1)}, job_id="same")
    second = fleet.submit(MODEL, {"x": row(job=1)}, job_id="same")

    with running_worker(server, config):
        first.reply(10)
        fleet.submit(MODEL, {"x": row(job=2)}).reply(10)

    assert starts(log) == {1: 1, 2: 1}
    assert second.id == "same"


def test_a_delayed_job_runs_when_it_is_due(
    server: TestServer, client: redis.Redis, config: Path, log: Path
) -> None:
    infer = register(make_app(Settings(broker_url=server.url)))

    with running_worker(server, config):
        began_s = time.monotonic()
        result = infer.apply_async((MODEL, {"x": row(job=1)}), countdown=1)
        result.get(timeout=10)
        took_s = time.monotonic() - began_s

    assert 0.9 < took_s < 5


def test_a_repaired_model_file_is_read_again(
    server: TestServer, fleet: Client, config: Path, log: Path, tmp_path: Path
) -> None:
    trouble = tmp_path / "trouble"
    trouble.write_text("no weights")
    write_model(config, MODEL, {**SCRIPTED, "options": {"load_fails_while": str(trouble)}})

    with running_worker(server, config, wait=False) as worker:
        wait_until(lambda: broken_instance(worker), what="a broken instance")
        write_model(config, MODEL, {**SCRIPTED, "options": {"log": str(log)}})
        worker.wait_ready()
        fleet.submit(MODEL, {"x": row(job=1)}).reply(10)

    assert starts(log) == {1: 1}
