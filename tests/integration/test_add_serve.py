"""`fleet add` beside a worker that runs: it serves the new model without a restart, or says why
not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from producer.client import Client
from producer.contract.names import Keys
from tests import onnx_models
from tests.support.commands import CELERY, FLEET, run_command
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, own_slots, running_worker
from workers.models import config_words

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

DIGITS = onnx_models.DIGITS / "digits.onnx"


@pytest.fixture(scope="module")
def worker(server: TestServer) -> Iterator[Worker]:
    """Run two instances that serve all that their folder holds."""
    with (
        config_folder({"scripted": {**SCRIPTED, "options": {}}}) as config,
        running_worker(server, config, node="adding", instances=2) as running,
    ):
        yield running


def add(server: TestServer, config: Path, *words: str) -> str:
    ran = run_command(
        *(*FLEET, "add", str(DIGITS), *words),
        FLEET_CONFIG=str(config),
        FLEET_BROKER_URL=server.url,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def models_of(worker: Worker) -> list[str]:
    """Return the models that a worker serves, as it says from now on."""
    worker.client.delete(Keys().worker(worker.node))
    return list(wait_until(worker.status, what="a word of the worker")["models"])


def test_a_model_is_served_as_soon_as_it_is_added(
    server: TestServer, fleet: Client, worker: Worker
) -> None:
    worker.wait_ready(2)
    pids = worker.ready_pids()

    said = add(server, worker.config, "--name", "mine")

    assert "Served by 1 worker, 2 instances. In Python:" in said
    assert "start your workers again" not in said
    with np.load(onnx_models.DIGITS / "test.npz") as file:
        reply = fleet.submit("mine", {"image": file["image"][:1]}).reply(5)
    assert reply.outputs["scores"].shape == (1, 10)
    # What was said last may still be that they load; others would never be these.
    wait_until(lambda: worker.ready_pids() == pids, what="the same instances to be ready")


def test_a_full_server_is_told_with_what_to_do(server: TestServer, worker: Worker) -> None:
    worker.wait_ready(2)
    with server.client() as client:
        client.config_set("maxmemory", 1)
        try:
            said = add(server, worker.config, "--name", "unasked")
        finally:
            client.config_set("maxmemory", 0)

    assert "Not served yet: Redis is full" in said
    assert "start more workers, or give it more memory." in said
    assert "control add_consumer fleet.unasked" in said
    run_command(*CELERY, "control", "add_consumer", "fleet.unasked", FLEET_BROKER_URL=server.url)
    wait_until(lambda: "unasked" in worker.status()["models"], what="the model")


def test_a_model_may_be_added_for_later(server: TestServer, worker: Worker) -> None:
    worker.wait_ready(2)

    said = add(server, worker.config, "--name", "later", "--no-serve")

    assert "Next: fleet up (or start your workers again)" in said
    assert "later" not in models_of(worker)


def test_a_worker_that_was_told_what_to_serve_is_let_alone(
    server: TestServer, worker: Worker, tmp_path: Path
) -> None:
    """As the one that lacks a model of the folder here, and whoever reads another folder."""
    worker.wait_ready(2)
    add(server, worker.config, "--name", "lacking", "--no-serve")

    for name, config in (("third", worker.config), ("alone", tmp_path)):
        said = json.loads(add(server, config, "--name", name, "--json"))

        assert said["served"] == {"workers": 0, "instances": 0, "trouble": "", "older": []}
        assert name not in models_of(worker)


def test_a_replaced_file_that_a_worker_serves_is_told_when_it_will_be(
    server: TestServer, worker: Worker
) -> None:
    worker.wait_ready(2)

    said = add(server, worker.config, "--name", "scripted", "--replace")

    assert f"{worker.node} serves the file that was there until it is started again" in said
    assert "Served by" not in said


def test_a_model_that_no_worker_can_load_is_told(server: TestServer, tmp_path: Path) -> None:
    small = {"memory_limit_bytes": 1}
    with config_folder({"scripted": {**SCRIPTED, "options": {}}}) as config:
        (config / "fleet.toml").write_text("".join(f"{k} = {v}\n" for k, v in small.items()))
        with running_worker(server, config, node="small") as running:
            said = add(server, config, "--name", "large")

            assert running.status()["config"] == config_words(config)
    assert "Not served yet: " in said
    assert "Next: mend that, then start your workers again" in said


def test_a_worker_that_waits_for_an_instance_says_so_in_place_of_loading(
    server: TestServer,
) -> None:
    model = {"scripted": {**SCRIPTED, "options": {}}}
    slot = {"FLEET_INSTANCES": own_slots(1)}
    with (
        config_folder(model) as config,
        config_folder(model) as other,
        running_worker(server, other, node="has", instances=None, environ=slot),
        running_worker(
            server, config, node="waits", instances=None, environ=slot, wait=False
        ) as waiting,
    ):
        wait_until(lambda: waiting.status().get("waiting"), what="a worker that waits")

        said = add(server, config, "--name", "late")

    assert "Not served yet: waiting for an instance" in said


def test_a_url_that_is_none_is_refused_before_anything_is_added(tmp_path: Path) -> None:
    ran = run_command(
        *(*FLEET, "add", str(DIGITS), "--name", "mine", "--json"),
        FLEET_CONFIG=str(tmp_path),
        FLEET_BROKER_URL="http://nowhere",
    )

    assert ran.returncode == 2
    assert "is not a Redis URL" in ran.stderr
    assert not (tmp_path / "models").exists()
