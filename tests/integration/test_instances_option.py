"""Which instances a worker is told to use, and what their processes are given."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from producer.contract import live
from producer.contract.live import Words
from producer.contract.names import Keys
from tests.support.refusal import FLEET, refusal
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, running_worker
from workers.instances.host import host_id

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]

#: What the parent must never hold: the runtimes and CUDA, as the kernel sees them.
_RUNTIMES = ("onnxruntime", "nvinfer", "libcuda", "tensorrt")


def environ_of(pid: int) -> dict[str, str]:
    """Return the variables that a process was started with."""
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if line)


def mapped(pid: int) -> set[str]:
    """Return which of the runtimes a process has loaded any file of."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in _RUNTIMES if name in maps}


@pytest.fixture
def named(server: TestServer, config: Path, tmp_path: Path) -> Iterator[Words]:
    """What a worker says that `fleet worker --instances` gave two CPU slots by name."""
    environ = {
        **os.environ,
        "FLEET_BROKER_URL": server.url,
        "FLEET_CONFIG": str(config),
        "PYTHONPATH": str(ROOT),
    }
    with (tmp_path / "worker.log").open("wb") as log, server.client() as client:
        client.flushall()
        worker = subprocess.Popen(
            [*FLEET, "--instances", "cpu/5,cpu/3", "-n", "named@test"],
            env=environ,
            cwd=ROOT,
            stdout=log,
            stderr=log,
        )
        try:
            yield wait_until(lambda: _ready(client, 2), what="two instances", timeout_s=30)
        finally:
            worker.terminate()
            assert worker.wait(30) == 0


def _ready(client: redis.Redis, count: int) -> Words | None:
    words, *_ = live.workers(client, Keys(), now_unix_s=time.time()) or ({},)
    states = [instance["state"] for instance in words.get("instances", [])]
    return words if states == ["ready"] * count else None


def test_a_worker_uses_the_instances_that_are_named_in_their_order(
    named: Words, tmp_path: Path
) -> None:
    keys = [instance["instance"] for instance in named["instances"]]

    assert [key.rpartition("/")[2] for key in keys] == ["5", "3"]
    assert all(key.startswith(f"CPU-{host_id()}") for key in keys)
    for instance in named["instances"]:
        environ = environ_of(instance["pid"])
        assert environ["FLEET_INSTANCE_KEY"] == instance["instance"]
        assert environ["OMP_NUM_THREADS"] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in environ
    assert named["holders"] == dict.fromkeys(keys, "named@test")
    assert {instance["holder"] for instance in named["instances"]} == {"named@test"}
    # Who starts one by hand sees without an option when it is ready for what.
    assert (tmp_path / "worker.log").read_text().count("model.loaded model=scripted") == 2


@pytest.mark.parametrize(
    ("instances", "says"),
    [
        ("two", "FLEET_INSTANCES must be all, a number, or names"),
        ("GPU-00000000", "names GPU-00000000, which is not here. There are: none but CPU slots"),
    ],
)
def test_an_instance_that_cannot_be_is_refused_in_one_line(
    server: TestServer, config: Path, instances: str, says: str
) -> None:
    assert says in refusal(FLEET, "--instances", instances, server=server, config=config)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through /proc")
def test_a_runtime_is_in_the_instances_and_never_in_their_parent(server: TestServer) -> None:
    with running_worker(server, ROOT / "configs", environ={"FLEET_MODELS": "digits"}) as worker:
        (instance,) = worker.instance_pids()

        assert "onnxruntime" in mapped(instance)
        assert mapped(worker.pid) == set()
