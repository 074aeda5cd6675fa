"""The runtime that answers is named wherever a person looks: replies, commands, Celery's own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import redis

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.onnx_models import linear
from tests.support.building import model_folder
from tests.support.commands import FLEET, run_command
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import running_worker

pytestmark = pytest.mark.redis

ROW = {"x": np.zeros((1, 4), np.float32)}


def test_replies_commands_and_celery_name_the_runtime_and_why(
    server: TestServer, client: redis.Redis, fleet: Client, tmp_path: Path
) -> None:
    model_folder(tmp_path, linear)

    with running_worker(server, tmp_path) as worker:
        reply = fleet.submit("my", ROW).reply(20)
        environ = {"FLEET_BROKER_URL": server.url}
        models = json.loads(run_command(*FLEET, "models", "--json", **environ).stdout)
        table = run_command(*FLEET, "models", COLUMNS="200", **environ).stdout
        status = run_command(*FLEET, "status", COLUMNS="200", **environ).stdout
        worker.wait_heard()
        control = make_app(Settings(broker_url=server.url)).control
        stats = control.inspect([worker.node], timeout=5).stats() or {}

    assert reply.runtime.startswith("onnxruntime 1.")
    (instance,) = models["my"]["instances"][:1]
    assert instance["runtime"] == reply.runtime
    assert instance["why_runtime"].startswith("auto: ")
    assert reply.runtime in table
    assert f"my ({reply.runtime})" in status
    (told,) = [each["models"]["my"] for each in stats[worker.node]["pool"]["instances"]][:1]
    assert told["runtime"] == reply.runtime
    assert told["why_runtime"] == instance["why_runtime"]


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ("onnxruntime-cuda", "this onnxruntime has no CUDAExecutionProvider"),
        ("tensorrt", "needs an NVIDIA GPU"),
    ],
)
def test_a_worker_without_the_runtime_that_was_asked_for_says_so_and_does_not_answer(
    server: TestServer, client: redis.Redis, tmp_path: Path, runtime: str, says: str
) -> None:
    folder = model_folder(tmp_path, linear)
    toml = folder / "model.toml"
    toml.write_text(f'runtime = "{runtime}"\n{toml.read_text()}')

    with running_worker(server, tmp_path, wait=False) as worker:
        # It is tried again later, and says so then.
        text = wait_until(
            lambda: [each["text"] for each in worker.instances() if each["state"] == "broken"],
            what="the model to be refused",
        )[0]

    assert says in text


def test_plans_need_a_gpu_and_the_command_says_so_with_exit_code_2(tmp_path: Path) -> None:
    model_folder(tmp_path, linear)

    done = run_command(*FLEET, "build", "my", "--plans", FLEET_CONFIG=str(tmp_path))

    assert done.returncode == 2
    assert "needs an NVIDIA GPU, its driver" in done.stderr
    assert len(done.stderr.splitlines()) == 1
