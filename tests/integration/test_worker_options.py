"""How a worker is started: what it refuses in one line with an exit code, and what it obeys."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.engines import row
from tests.support.many_refusals import refusals
from tests.support.refusal import CELERY, FLEET, refusal
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder, running_worker, write_model

pytestmark = pytest.mark.redis

NOWHERE: Final = "redis://127.0.0.1:1/0"
MODELS: Final = ("first", "second")


@pytest.fixture
def config() -> Iterator[Path]:
    with config_folder({name: {**SCRIPTED, "options": {}} for name in MODELS}) as folder:
        yield folder


@pytest.fixture
def guarded(server: TestServer) -> Iterator[TestServer]:
    """Have the server ask for a password."""
    with server.client() as client:
        client.config_set("requirepass", "another")
        yield server
        client.config_set("requirepass", "")


#: Worker options that mean nothing here, and what the refusal must name.
REFUSED: Final = {
    ("-P", "solo"): "solo pool",
    ("-P", "threads"): "thread pool",
    ("-P", "processes"): "prefork means ours",
    ("--time-limit", "5"): "batch_timeout_s",
    ("--soft-time-limit", "5"): "batch_timeout_s",
    ("--max-tasks-per-child", "5"): "--max-tasks-per-child",
    ("--max-memory-per-child", "5"): "memory_limit_bytes",
    ("--prefetch-multiplier", "1"): "--prefetch-multiplier",
    ("--disable-prefetch",): "--disable-prefetch",
    ("--pool-start-method", "spawn"): "--pool-start-method",
    ("-X", "fleet.first"): "-Q",
    ("--purge",): "--purge",
    ("-B",): "celery beat",
    ("-Q", "celery"): "fleet.<model>",
    ("-Q", "fleet.first,celery"): "fleet.<model>",
    ("-Q", "fleet.nosuch"): "'nosuch'",
}


@pytest.fixture(scope="module")
def lines(server: TestServer) -> dict[tuple[str, ...], str]:
    """Return what a worker says that is started with each of the options."""
    with config_folder({name: {**SCRIPTED, "options": {}} for name in MODELS}) as folder:
        return refusals(REFUSED, server=server, config=folder)


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_an_option_that_means_nothing_here_is_refused_in_one_line(
    lines: dict[tuple[str, ...], str], options: tuple[str, ...]
) -> None:
    assert REFUSED[options] in lines[options]


@pytest.mark.parametrize("command", [CELERY, FLEET], ids=["celery", "fleet"])
class TestAMistakeIsOneLine:
    def test_no_server(self, command: tuple[str, ...], server: TestServer, config: Path) -> None:
        line = refusal(command, server=server, config=config, url=NOWHERE)

        assert "no Redis at redis://127.0.0.1:1/0" in line
        assert "FLEET_BROKER_URL" in line

    def test_a_wrong_password(
        self, command: tuple[str, ...], guarded: TestServer, config: Path
    ) -> None:
        url = guarded.url.replace("redis://", "redis://:a-secret@")

        line = refusal(command, server=guarded, config=config, url=url)

        assert "password" in line
        assert "a-secret" not in line

    def test_a_model_file_that_is_not_there(
        self, command: tuple[str, ...], server: TestServer, config: Path
    ) -> None:
        write_model(config, "digits", {"engines": {"fp32": "gone.onnx"}})

        assert "gone.onnx" in refusal(command, server=server, config=config)

    def test_a_model_file_that_is_broken(
        self, command: tuple[str, ...], server: TestServer, config: Path
    ) -> None:
        write_model(config, "digits", {"engines": {"fp32": "broken.onnx"}})
        (config / "models" / "digits" / "broken.onnx").write_bytes(b"not a model")

        assert "broken.onnx" in refusal(command, server=server, config=config)

    def test_a_key_that_is_misspelt(
        self, command: tuple[str, ...], server: TestServer, config: Path
    ) -> None:
        (config / "fleet.toml").write_text("grace = 5\n")

        line = refusal(command, server=server, config=config)

        assert "fleet.toml" in line
        assert "grace_s" in line

    def test_a_file_that_is_not_toml(
        self, command: tuple[str, ...], server: TestServer, config: Path
    ) -> None:
        (config / "models" / "first" / "model.toml").write_text("runtime = \n")

        assert "model.toml" in refusal(command, server=server, config=config)


def test_prefork_means_ours_and_a_queue_limits_what_is_served(
    server: TestServer, config: Path
) -> None:
    client = Client(Settings(broker_url=server.url))
    with server.client() as broker:
        broker.flushall()

    with running_worker(
        server, config, "-P", "prefork", "-Q", "fleet.first", node="only-first"
    ) as worker:
        other = client.submit("first", {"x": row()})

        assert other.reply(10).outputs["y"].shape == (1, 3)
        assert worker.status()["models"] == ["first"]
        with server.client() as broker:
            assert broker.zrange("fleet:models", 0, -1) == [b"first"]
        assert worker.stop() == 0


def test_a_name_that_a_living_worker_has_is_refused_and_a_dead_ones_is_not(
    server: TestServer, config: Path
) -> None:
    with running_worker(server, config, node="twin") as first:
        line = refusal(FLEET, "-n", first.node, server=server, config=config)

        assert line.startswith(f"fleet: a worker called {first.node} runs already.")
        assert first.stop(signal.SIGKILL) == -signal.SIGKILL
        with running_worker(server, config, node="twin") as second:
            # The dead one's last words are there for a while, and would do for `ready`.
            wait_until(lambda: f"{second.node} ready." in second.log(), what="the second worker")
            assert second.stop() == 0


@pytest.mark.parametrize(("asked", "there", "runs"), [(9, 2, 2), (1, 2, 1)])
def test_concurrency_is_an_upper_bound_of_the_instances(
    server: TestServer, config: Path, asked: int, there: int, runs: int
) -> None:
    with running_worker(
        server, config, "-c", str(asked), node=f"c{asked}", instances=there, wait=False
    ) as worker:
        wait_until(lambda: len(worker.instances()) == runs, what=f"{runs} instances")

        said = [line for line in worker.log().splitlines() if line.startswith("fleet: ")]
        assert len(said) == (asked > there)
        assert all(f"-c {asked}" in line and str(there) in line for line in said)
        assert f"concurrency: {runs} " in worker.log()
