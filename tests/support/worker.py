"""A real worker for tests: `celery -A workers.app worker` in a process of its own, with models of
a test.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.app import make_app
from producer.contract.counters import add_counters
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client
from tests.support.servers import TestServer
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).resolve().parent.parent.parent

#: The engine of `tests.support.engines`, which does what its inputs say.
SCRIPTED: Final = {"runtime": "tests.support.engines:Scripted", "max_batch_size": 32}


#: Numbers of CPU slots that no worker of these tests has had.
_UNUSED: Final = itertools.count(1000)


def own_slots(count: int) -> str:
    """Return so many CPU slots for FLEET_INSTANCES, which no other worker of the host shares."""
    return ",".join(f"cpu/{next(_UNUSED)}" for _ in range(count))


class Worker:
    """One worker: a parent process and its instances.

    A number in FLEET_INSTANCES means slots of its own, new ones at each start: only tests of the
    sharing itself want workers to wait for each other, and these leave it to fleet.toml.
    """

    def __init__(
        self,
        server: TestServer,
        config: Path,
        environ: Mapping[str, str],
        node: str,
        clone: Path = ROOT,
    ):
        self.config, self.node, self._clone = config, f"{node}@test", clone
        self.folder = tempfile.TemporaryDirectory(prefix="fleet-worker-")
        self.log_path = Path(self.folder.name, f"{node}.log")
        self.environ = {
            **os.environ,
            "FLEET_BROKER_URL": server.url,
            "FLEET_CONFIG": str(config),
            "PYTHONPATH": str(clone),
            "PYTHONWARNINGS": "ignore",
            **environ,
        }
        self.process: subprocess.Popen[bytes] | None = None
        #: To the broker as the worker itself reaches it.
        self.client = redis_client(self.environ["FLEET_BROKER_URL"])
        self._keys = Keys(prefix=self.environ.get("FLEET_PREFIX", ""))

    def start(self, *options: str) -> None:
        """Start it; returns at once."""
        environ = dict(self.environ)
        if (count := environ.get("FLEET_INSTANCES", "")).isdigit():
            environ["FLEET_INSTANCES"] = own_slots(int(count))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "-A", "workers.app", "worker"),
                    *("-l", "INFO", "-n", self.node, *options),
                ],
                env=environ,
                cwd=self._clone,
                stdout=log,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def status(self) -> dict[str, Any]:
        """Return what the worker last said of itself; empty when it has not spoken.

        One of its name that a test has killed is still told of for a while.
        """
        try:
            text = self.client.get(self._keys.worker(self.node))
        except redis.RedisError:
            return {}
        said = dict(json.loads(text)) if text else {}
        return said if said.get("pid") == self.pid else {}

    def instances(self) -> list[dict[str, Any]]:
        return list(self.status().get("instances", []))

    def instance_pids(self) -> list[int]:
        """Return the living children, as the kernel knows them."""
        return children_of(self.pid)

    def wait_ready(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until ``count`` instances are ready."""
        try:
            wait_until(
                lambda: self._alive() and len(self.ready_pids()) >= count,
                what=f"{count} ready instances of {self.node}",
                timeout_s=timeout_s,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None

    def wait_heard(self) -> None:
        """Wait until the parent answers remote control; its instances may be ready before."""
        settings = Settings(
            broker_url=self.environ["FLEET_BROKER_URL"], prefix=self.environ.get("FLEET_PREFIX", "")
        )
        with make_app(settings) as app:
            wait_until(
                lambda: app.control.ping(destination=[self.node], limit=1, timeout=1),
                what=f"an answer of {self.node} to a ping",
                timeout_s=30,
            )

    def stop(self, how: signal.Signals = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Send a signal and return the exit status."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=timeout_s)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def counters(self, model: str) -> dict[str, Any]:
        """Return the totals of one model over all instances."""
        total: dict[str, Any] = {}
        for instance in self.instances():
            total = add_counters(total, instance["counters"].get(model, {}))
        return total

    def wait_counters(self, model: str, *, jobs: int) -> dict[str, Any]:
        """Return the totals of one model once they count ``jobs`` jobs."""
        return wait_until(
            lambda: found if (found := self.counters(model)).get("jobs", 0) >= jobs else None,
            what=f"{jobs} counted jobs of {model}",
        )

    def ready_pids(self) -> set[int]:
        """Return the instances that said last that they are ready."""
        return {instance["pid"] for instance in self.instances() if instance["state"] == "ready"}

    def _alive(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.log()}")
        return True


@contextlib.contextmanager
def config_folder(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Path]:
    """Make a configuration folder with ``models``, each given as the values of its file."""
    with tempfile.TemporaryDirectory(prefix="fleet-config-") as name:
        folder = Path(name)
        (folder / "fleet.toml").write_text("")
        for model, values in models.items():
            write_model(folder, model, values)
        yield folder


def write_model(config: Path, model: str, values: Mapping[str, Any]) -> None:
    """Write one model.toml; nested mappings become tables."""
    folder = config / "models" / model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.toml").write_text("\n".join(_toml(values)) + "\n")


@contextlib.contextmanager
def running_worker(
    server: TestServer,
    config: Path,
    *options: str,
    node: str = "w1",
    instances: int | None = 1,
    environ: Mapping[str, str] | None = None,
    wait: bool = True,
    clone: Path = ROOT,
) -> Iterator[Worker]:
    """Run a worker for the length of the block; nothing of it is left.

    ``instances`` are its own; None: what ``config`` says, shared with other workers. ``clone`` is
    where its code lies.
    """
    given = {"FLEET_INSTANCES": str(instances)} if instances else {}
    given |= environ or {}
    worker = Worker(server, config, given, node, clone)
    worker.start(*options)
    children: list[int] = []
    try:
        if wait:
            worker.wait_ready(instances or 1)
        yield worker
    finally:
        assert worker.process is not None
        if worker.process.poll() is None:
            children = worker.instance_pids()
            worker.process.kill()
            worker.process.wait(timeout=30)
        worker.folder.cleanup()
        worker.client.connection_pool.disconnect()
        wait_until(lambda: not any(map(alive, children)), what="no orphan", timeout_s=5)


@contextlib.contextmanager
def standing_still(worker: Worker) -> Iterator[None]:
    """Let the instances of a worker that runs do nothing for the length of the block."""
    pids = worker.instance_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = subprocess.run(
        ["ps", "--no-headers", "-o", "pid,stat", "--ppid", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = (line.split() for line in found.stdout.splitlines())
    return [int(child) for child, state in rows if not state.startswith("Z")]


def alive(pid: int) -> bool:
    """Return whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _toml(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    if table:
        yield f"[{table}]"
    for key, value in values.items():
        if key not in nested:
            yield f"{key} = {json.dumps(value)}"
    for key, value in nested.items():
        yield from _toml(value, f"{table}.{key}" if table else key)
