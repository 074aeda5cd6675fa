"""A model that is added to a running worker and cannot be loaded, or kills whoever loads it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from producer.client import Client
from producer.contract.app import make_app
from producer.contract.settings import Settings
from tests.support.engines import loads, row
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, Worker, config_folder, running_worker

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]


def told(broker: TestServer, worker: Worker, command: str) -> dict[str, str]:
    worker.wait_heard()
    with make_app(Settings(broker_url=broker.url)) as app:
        (reply,) = app.control.broadcast(
            command,
            arguments={"queue": "fleet.added"},
            destination=[worker.node],
            reply=True,
            limit=1,
            timeout=5,
        )
    return dict(reply[worker.node])


def models_of(worker: Worker) -> list[Any]:
    return [
        (each["state"], {name: about["state"] for name, about in each["models"].items()})
        for each in worker.instances()
    ]


@pytest.mark.parametrize("fault", ["no such weights", "abort"])
def test_a_model_that_cannot_be_loaded_costs_the_others_nothing(
    broker: TestServer, tmp_path: Path, fault: str
) -> None:
    (told_to_fail := tmp_path / "fails").write_text(fault)
    log = tmp_path / "log"
    added = {**SCRIPTED, "options": {"log": str(log), "load_fails_while": str(told_to_fail)}}
    models = {"old": {**SCRIPTED, "options": {}}, "added": added}
    with (
        config_folder(models) as config,
        running_worker(broker, config, "-Q", "fleet.old", instances=2) as worker,
        Client(Settings(broker_url=broker.url)) as client,
    ):
        before = worker.instance_pids()

        told(broker, worker, "add_consumer")
        job = client.submit("added", {"x": row(job=1)})
        wait_until(lambda: len(loads(log)) >= 3, what="three tries", timeout_s=60)
        answered = [client.submit("old", {"x": row(job=n)}).reply(20) for n in range(20)]

        kept = set(before) & set(worker.instance_pids())
        print(f"{fault}: {len(loads(log))} loads; kept {len(kept)} of {len(before)}")
        assert len(answered) == 20
        assert len(kept) == (1 if fault == "abort" else 2)

        told(broker, worker, "cancel_consumer")
        whole = [("ready", {"old": "ready"})] * 2
        wait_until(lambda: models_of(worker) == whole, what="both without it", timeout_s=60)

        told_to_fail.unlink()
        told(broker, worker, "add_consumer")
        assert job.reply(60).outputs["y"].shape == (1, 3)
        both = [("ready", {"old": "ready", "added": "ready"})] * 2
        wait_until(lambda: models_of(worker) == both, what="both with it", timeout_s=60)


def test_a_model_that_kills_its_loader_is_not_loaded_by_an_instance_that_replaces_another(
    broker: TestServer, tmp_path: Path
) -> None:
    (told_to_fail := tmp_path / "fails").write_text("abort")
    log = tmp_path / "log"
    added = {**SCRIPTED, "options": {"log": str(log), "load_fails_while": str(told_to_fail)}}
    models = {"old": {**SCRIPTED, "options": {}}, "added": added}
    with (
        config_folder(models) as config,
        running_worker(broker, config, "-Q", "fleet.old", instances=2) as worker,
        Client(Settings(broker_url=broker.url)) as client,
    ):
        told(broker, worker, "add_consumer")
        wait_until(lambda: len(loads(log)) >= 2, what="a load that ends a restart", timeout_s=60)
        (whole,) = wait_until(
            lambda: pids if len(pids := worker.ready_pids()) == 1 else None, what="one that serves"
        )

        os.kill(whole, signal.SIGKILL)

        assert client.submit("old", {"x": row()}).reply(20).outputs["y"].shape == (1, 3)
        wait_until(lambda: worker.ready_pids() - {whole}, what="another that serves")
        told(broker, worker, "cancel_consumer")
        both = [("ready", {"old": "ready"})] * 2
        wait_until(lambda: models_of(worker) == both, what="both without it", timeout_s=60)
