"""Flower's password, however it is started, and Flower beside `fleet up`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from producer.contract.errors import ConfigError
from producer.contract.local_broker import local_broker_url
from tests.support.flower import Flower, get, running_flower, send
from tests.support.ports import kept_port
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, children_of, config_folder
from workers.telemetry.flower_access import Access

pytest.importorskip("flower")

pytestmark = [pytest.mark.redis, pytest.mark.timeout(90)]


needs_the_folder = pytest.mark.skipif(
    local_broker_url() is not None, reason="`fleet up` runs in this folder"
)


def is_flower(pid: int) -> bool:
    return b"flower" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_without_a_password_one_is_made_up_and_printed_once(
    server: TestServer, tmp_path: Path
) -> None:
    stock_opens = {"FLOWER_BASIC_AUTH": "", "FLOWER_UNAUTHENTICATED_API": "true"}
    with running_flower(server.url, tmp_path, **stock_opens) as running:
        (said,) = re.findall(r"user (\S+), password (\S+) ", running.said)
        user, password = said

        assert running.get("/", None)[0] == 401
        assert running.get("/", ":")[0] == 401
        assert running.get("/api/tasks", None)[0] == 401
        assert running.get("/", f"{user}:{password}")[0] == 200
        assert running.said.count(password) == 1


def test_the_command_line_cannot_take_the_password_away(server: TestServer, tmp_path: Path) -> None:
    with running_flower(server.url, tmp_path, "--basic-auth=") as running:
        for word in ("", "=", "Og=="):
            for path in ("/", "/api/tasks", "/metrics"):
                assert send(running.port, path, f"Basic {word}")[0] == 401


@pytest.mark.parametrize("text", ["no-colon", "name:", ":word", "a:b,", "näme:word"])
def test_a_password_that_closes_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="FLOWER_BASIC_AUTH must be user:password") as told:
        Access.from_env({"FLOWER_BASIC_AUTH": text})

    assert text not in str(told.value)


def test_flower_does_not_start_with_a_password_that_is_refused(
    server: TestServer, tmp_path: Path
) -> None:
    with kept_port() as port:
        flower = Flower(server.url, tmp_path, port, FLOWER_BASIC_AUTH="näme:word")

        assert flower.process.wait(timeout=20) == 2
    assert "FLOWER_BASIC_AUTH must be user:password" in flower.said
    assert "Traceback" not in flower.said
    assert "näme:word" not in flower.said


@contextlib.contextmanager
def running_up(url: str, config: Path, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `fleet up --flower` with one instance; it ends with the block, if not before."""
    environ = {"FLEET_BROKER_URL": url, "FLEET_CONFIG": str(config), "FLEET_INSTANCES": "1"}
    with said.open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "up", "--flower"],
            cwd=ROOT,
            env={**os.environ, **environ, "PYTHONWARNINGS": "ignore"},
            stdout=log,
            stderr=log,
        )
    try:
        yield up
    finally:
        up.terminate()
        up.wait(timeout=30)


@needs_the_folder
def test_fleet_up_prints_address_and_password_and_goes_on_without_it(
    server: TestServer, tmp_path: Path
) -> None:
    """With a configuration folder that has no flowerconfig.py."""
    said = tmp_path / "up.log"
    with (
        config_folder({"scripted": SCRIPTED}) as config,
        running_up(server.url, config, said) as up,
    ):
        (port, password), *_ = wait_until(
            lambda: re.findall(r":(\d+)  user fleet, password (\S+) ", said.read_text()),
            what="the line about Flower",
            timeout_s=40,
        )
        assert get(int(port), "/", None)[0] == 401
        assert get(int(port), "/", f"fleet:{password}")[0] == 200
        (flower,) = filter(is_flower, children_of(up.pid))
        os.kill(flower, signal.SIGKILL)
        wait_until(lambda: "Flower ended with exit code -9" in said.read_text(), what="its end")
        assert up.poll() is None

    assert up.returncode == 0


@needs_the_folder
def test_fleet_up_sees_the_end_of_its_worker_while_flower_does_not_answer(
    server: TestServer, tmp_path: Path
) -> None:
    said = tmp_path / "up.log"
    with config_folder({"scripted": SCRIPTED}) as config, contextlib.ExitStack() as stack:
        (config / "flowerconfig.py").write_text("import time\ntime.sleep(60)\n")
        up = stack.enter_context(running_up(server.url, config, said))
        wait_until(
            lambda: "instances: ready" in said.read_text(), what="the instance", timeout_s=40
        )
        (worker,) = (pid for pid in children_of(up.pid) if not is_flower(pid))
        os.kill(worker, signal.SIGKILL)

        assert up.wait(timeout=20) == 2

    assert "The worker ended with exit code -9" in said.read_text()
