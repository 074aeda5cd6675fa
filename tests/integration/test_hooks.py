"""Python around a model, in a real worker: what its hooks do to their own job, and to no other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from producer.client import Client, Job
from producer.contract.errors import FleetError
from producer.contract.names import Keys
from tests.onnx_models import DIGITS
from tests.support.engines import started
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, alive, config_folder, running_worker

MODEL = "told"
KEYS = Keys()
HOOKED = {**SCRIPTED, "code": "tests.support.hooks:Told"}


@pytest.fixture
def hooked(log: Path) -> Iterator[Path]:
    """Return a configuration with one model, whose hooks do what their inputs say."""
    with config_folder({MODEL: {**HOOKED, "options": {"log": str(log)}}}) as folder:
        yield folder


def error_of(job: Job, timeout_s: float = 30) -> FleetError:
    with pytest.raises(FleetError) as told:
        job.reply(timeout_s)
    return told.value


def learn(fleet: Client) -> None:
    """Let the worker know how short a batch is: else it begins nothing beside one."""
    for _ in range(3):
        fleet.submit(MODEL, {}).reply(20)


def dead_letters(client: redis.Redis) -> list[dict[bytes, bytes]]:
    found: Any = client.xrange(KEYS.dead(f"fleet.{MODEL}"))
    return [fields for _, fields in found]


BEFORE = """
import numpy as np

class Digits:
    def preprocess(self, inputs):
        pixels = np.frombuffer(inputs["raw"], np.uint8).reshape(-1, 1, 8, 8)
        return {"image": pixels.astype(np.float32) / 255}
"""

BEHIND = """
class Digits:
    def postprocess(self, outputs, inputs):
        rows = len(inputs["image"])
        return [{"digit": int(row.argmax()), "of": rows} for row in outputs["scores"]]
"""


@pytest.mark.parametrize("code", [BEFORE, BEHIND])
def test_a_real_model_may_have_either_hook_beside_its_file(
    server: TestServer, fleet: Client, code: str
) -> None:
    model = {"max_batch_size": 4, "engines": {"fp32": str(DIGITS / "digits.onnx")}}
    # Seven rows in one job, and batches of four: cut for the engine, whole for its hooks.
    raw = np.random.default_rng(1).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
    image = raw.astype(np.float32) / 255
    with config_folder({MODEL: {"code": "digits_code:Digits", **model}, "plain": model}) as config:
        (config / "models" / MODEL / "digits_code.py").write_text(code)
        with running_worker(server, config):
            scores = fleet.submit("plain", {"image": image}).reply(20).outputs["scores"]
            sent = {"raw": raw.tobytes()} if code == BEFORE else {"image": image}
            reply = fleet.submit(MODEL, sent).reply(20)

    if code == BEFORE:
        np.testing.assert_allclose(reply.outputs["scores"], scores, rtol=1e-5)
    else:
        assert reply.outputs == [{"digit": int(row.argmax()), "of": 7} for row in scores]


def test_what_one_hook_does_harms_none_of_its_batch_mates(
    server: TestServer, client: redis.Redis, fleet: Client, hooked: Path, log: Path
) -> None:
    expected = {
        ("before", "refuse no picture"): ("BAD_REQUEST", "preprocess refused the job: ValueError"),
        ("before", "fail width"): ("MODEL_CODE_FAILED", "preprocess raised KeyError: 'width'"),
        ("before", "exit 3"): ("MODEL_CODE_FAILED", "preprocess raised SystemExit: 3"),
        ("before", "kind"): ("MODEL_CODE_FAILED", "preprocess must return a dict of arrays"),
        ("before", "shape"): ("MODEL_CODE_FAILED", "input 'x' must have shape [rows, 3]"),
        ("behind", "refuse no label"): ("BAD_REQUEST", "postprocess refused the job: ValueError"),
        ("behind", "fail label"): ("MODEL_CODE_FAILED", "postprocess raised KeyError: 'label'"),
        ("behind", "kind"): ("MODEL_CODE_FAILED", "it returned a object that is not"),
    }
    good = [fleet.submit(MODEL, {"data": n, "job": n}) for n in range(1, 9)]
    bad = [fleet.submit(MODEL, {when: word, "job": 9}) for when, word in expected]
    good += [fleet.submit(MODEL, {"data": n, "job": n}) for n in range(10, 18)]

    with running_worker(server, hooked) as worker:
        pids = worker.instance_pids()
        errors = [error_of(job) for job in bad]
        replies = [job.reply(20) for job in good]
        assert worker.instance_pids() == pids
        counters = worker.wait_counters(MODEL, jobs=24)

    assert [error.code for error in errors] == [code for code, _ in expected.values()]
    for error, (_, says) in zip(errors, expected.values(), strict=True):
        assert says in str(error)
    assert [reply.outputs["read"] for reply in replies] == [*range(1, 9), *range(10, 18)]
    assert {reply.batch_size for reply in replies} == {19}
    assert (counters["succeeded"], counters["failed"], counters["batches"]) == (16, 8, 1)
    assert dead_letters(client) == []


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_hook_that_kills_its_process_ends_as_a_dead_letter(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path, when: str
) -> None:
    hook_log = log.with_name("hooks.log")
    jobs = {n: fleet.submit(MODEL, {"data": n, "job": n}) for n in range(1, 9)}
    poison = fleet.submit(MODEL, {when: "kill", "job": 9, "log": str(hook_log)})

    # Three starts are what a worker gives a job by itself.
    most, environ = (3, {}) if when == "before" else (2, {"FLEET_MAX_ATTEMPTS": "2"})
    with (
        config_folder({MODEL: HOOKED}) as config,
        running_worker(server, config, environ=environ),
    ):
        error = error_of(poison, 60)
        replies = {n: job.reply(60) for n, job in jobs.items()}
        (letter,) = wait_until(lambda: dead_letters(client), what="the dead letter")

    lines = hook_log.read_text().splitlines()
    assert error.code == "WORKER_LOST"
    assert sum(line.startswith(f"{when} 9 ") for line in lines) == most
    assert (int(letter[b"attempts"]), letter[b"job"].decode()) == (most, poison.id)
    assert max(reply.attempts for reply in replies.values()) <= 2


def test_a_hook_that_kills_its_process_beside_a_batch_counts_as_a_start(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path, tmp_path: Path
) -> None:
    hook_log, held = tmp_path / "hooks.log", tmp_path / "held"
    options = {"log": str(log), "held_while": str(held)}
    model = {**HOOKED, "max_batch_size": 1, "options": options}
    with config_folder({MODEL: model}) as config, running_worker(server, config) as worker:
        (pid,) = worker.instance_pids()
        learn(fleet)
        held.touch()
        # Together: what comes once a batch has begun is not taken beside it.
        deadly = {"before": "kill", "job": 3, "log": str(hook_log)}
        inputs: list[dict[str, Any]] = [{"job": 2}, deadly, *({"job": n} for n in range(4, 8))]
        before, poison, *others = fleet.submit_many(MODEL, inputs)
        wait_until(lambda: not alive(pid), what="the end of the process")
        held.unlink()
        error = error_of(poison, 60)
        attempts = [job.reply(60).attempts for job in (before, *others)]
        letters = wait_until(lambda: dead_letters(client), what="the dead letter")
        assert worker.process is not None
        assert worker.process.poll() is None

    assert error.code == "WORKER_LOST"
    assert len(hook_log.read_text().splitlines()) == 3
    assert [letter[b"job"].decode() for letter in letters] == [poison.id]
    assert attempts == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_hook_over_the_time_limit_ends_as_timeout_and_its_mates_are_answered(
    server: TestServer, client: redis.Redis, fleet: Client, log: Path, when: str
) -> None:
    model = {**HOOKED, "max_batch_size": 4, "time_limit_s": 1}
    model["options"] = {"log": str(log), "batch_s": 0.05}
    with config_folder({MODEL: model}) as config, running_worker(server, config):
        jobs = [fleet.submit(MODEL, {"job": n}) for n in range(1, 7)]
        slow = fleet.submit(MODEL, {when: "sleep 60", "job": 7})
        jobs += [fleet.submit(MODEL, {"job": n}) for n in range(8, 14)]

        error = error_of(slow, 50)
        attempts = [job.reply(50).attempts for job in jobs]
        letters = wait_until(lambda: dead_letters(client), what="the dead letter")

    assert error.code == "TIMEOUT"
    assert max(attempts) <= 2
    assert [letter[b"job"].decode() for letter in letters] == [slow.id]


def test_the_next_batch_goes_through_its_hooks_while_the_engine_runs(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    hook_log, batch_s = tmp_path / "hooks.log", 0.02
    model = {**HOOKED, "max_batch_size": 1, "options": {"log": str(log), "batch_s": batch_s}}
    inputs = [{"before": "work 0.02", "job": n, "log": str(hook_log)} for n in range(1, 81)]
    in_a_row_s, together_s = [], []
    with config_folder({MODEL: model}) as config, running_worker(server, config):
        # By turns, and the best counts: what else the machine does may come and go.
        for first in range(0, 80, 20):
            began_s = time.monotonic()
            for each in inputs[first : first + 10]:
                fleet.submit(MODEL, each).reply(20)
            in_a_row_s.append(time.monotonic() - began_s)

            began_s = time.monotonic()
            for job in fleet.submit_many(MODEL, inputs[first + 10 : first + 20]):
                job.reply(20)
            together_s.append(time.monotonic() - began_s)

    runs = {start.job: start.at_unix_s for start in started(log)}
    words = (line.split() for line in hook_log.read_text().splitlines())
    hooks = {int(job): float(at_unix_s) for when, job, at_unix_s in words if when == "before"}
    beside = {n for n in range(1, 80) if runs[n] < hooks[n + 1] < runs[n] + batch_s}
    print(f"10 calls: {min(in_a_row_s):.2f} s in a row, {min(together_s):.2f} s together")
    # How much faster that is depends on how many cores are free: nearly twice where one is.
    assert min(together_s) < min(in_a_row_s)
    assert beside <= {n for n in range(1, 80) if n % 20 > 10}
    assert len(beside) >= 28


def test_a_batch_ahead_is_given_back_uncounted_when_its_turn_does_not_come(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    hook_log, held = tmp_path / "hooks.log", tmp_path / "held"
    options = {"log": str(log), "held_while": str(held)}
    model = {**HOOKED, "max_batch_size": 1, "options": options}
    with config_folder({MODEL: model}) as config, running_worker(server, config) as worker:
        learn(fleet)
        held.touch()
        # Together: what comes once a batch has begun is not taken beside it.
        inputs: list[dict[str, Any]] = [{"job": 2}, {"job": 3, "log": str(hook_log)}]
        slow, behind = fleet.submit_many(MODEL, inputs)
        wait_until(hook_log.exists, what="the hook beside the batch")
        wait_until(
            lambda: not list(journal(server, "fleet.told", behind.id)), what="a start taken back"
        )
        os.kill(worker.instance_pids()[0], signal.SIGKILL)
        held.unlink()

        replies = (slow.reply(30), behind.reply(30))

    assert [reply.attempts for reply in replies] == [2, 1]


def journal(server: TestServer, queue: str, job_id: str) -> Iterator[bytes]:
    """Yield what the journal says of a job, if it was begun and has not ended."""
    with server.client() as client:
        found: Any = client.hget(KEYS.journal(queue), job_id)
    if found:
        yield found


def test_a_batch_ahead_is_given_back_uncounted_on_drain(
    server: TestServer, fleet: Client, log: Path, tmp_path: Path
) -> None:
    hook_log = tmp_path / "hooks.log"
    model = {**HOOKED, "max_batch_size": 1, "options": {"log": str(log), "batch_s": 0.4}}
    fleet.submit(MODEL, {"job": 1})
    current = fleet.submit(MODEL, {"job": 2})
    ahead = fleet.submit(MODEL, {"job": 3, "log": str(hook_log)})
    with config_folder({MODEL: model}) as config:
        with running_worker(server, config) as worker:
            wait_until(hook_log.exists, what="the hook beside the batch")
            assert worker.stop() == 0
        assert current.reply(5).attempts == 1
        assert list(journal(server, "fleet.told", ahead.id)) == []

        with running_worker(server, config, node="w2"):
            assert ahead.reply(20).attempts == 1


def test_a_thread_that_the_code_left_holds_no_drain_up(server: TestServer) -> None:
    code = (
        "import threading, time\nfrom tests.support.hooks import Told\n"
        "class Around(Told):\n    def __init__(self):\n        super().__init__()\n"
        "        threading.Thread(target=time.sleep, args=(600,)).start()\n"
    )
    with config_folder({MODEL: {**SCRIPTED, "code": "around:Around"}}) as config:
        (config / "models" / MODEL / "around.py").write_text(code)
        with running_worker(server, config) as worker:
            began_s = time.monotonic()

            assert worker.stop() == 0

    # As long as the parent's patience is, 20 s by default, it would be killed after.
    assert time.monotonic() - began_s < 10


def test_code_that_fails_to_import_is_a_failed_load_with_its_text(
    server: TestServer, fleet: Client
) -> None:
    with config_folder({MODEL: {**SCRIPTED, "code": "around:Around"}}) as config:
        code = config / "models" / MODEL / "around.py"
        code.write_text("import no_such_tokenizer\n")
        with running_worker(server, config, wait=False) as worker:
            job = fleet.submit(MODEL, {"job": 1})
            broken = wait_until(
                lambda: next((i for i in worker.instances() if i["state"] == "broken"), None),
                what="a broken instance",
            )
            code.write_text("from tests.support.hooks import Told as Around\n")

            assert job.reply(30).attempts == 1

    assert "cannot be imported: ModuleNotFoundError" in broken["text"]
    assert "no_such_tokenizer" in broken["text"]


def test_workers_take_no_bytes_for_a_model_without_hooks(
    server: TestServer, fleet: Client, config: Path
) -> None:
    with running_worker(server, config):
        error = error_of(fleet.submit("scripted", {"x": b"raw"}))

    assert error.code == "BAD_REQUEST"
    assert "not bytes" in str(error)
