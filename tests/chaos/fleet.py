"""The processes under test: a server, workers that a supervisor starts again, and clients."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.names import Keys
from tests.chaos.account import Account
from tests.chaos.processes import MARK, living_children, marked
from tests.chaos.sender import MODEL, NUMBERS_A_JOB
from tests.support.servers import TestServer, running_server
from tests.support.worker import ROOT, SCRIPTED, Worker, config_folder

KEYS: Final = Keys()
QUEUE: Final = f"fleet.{MODEL}"

_LOOK_EVERY_S: Final = 0.1
#: A supervisor waits a moment before it starts again what ended, as systemd and Docker do.
_RESTART_AFTER_S: Final = 0.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a fleet is, and what it is told."""

    workers: int = 2
    instances: int = 2
    clients: int = 3
    claim_ttl_s: float = 6.0
    max_attempts: int = 10
    result_ttl_s: int = 3600
    fence_ttl_s: int = 3600
    batch_s: float = 0.05
    max_batch_size: int = 8
    #: Code around the model, as ``module:Class``; with it a batch begins while another runs.
    code: str | None = None

    def environ(self, server: TestServer, mark: str) -> dict[str, str]:
        return {
            "FLEET_BROKER_URL": server.url,
            "FLEET_INSTANCES": str(self.instances),
            "FLEET_CLAIM_TTL_S": str(self.claim_ttl_s),
            "FLEET_MAX_ATTEMPTS": str(self.max_attempts),
            "FLEET_RESULT_TTL_S": str(self.result_ttl_s),
            "FLEET_FENCE_TTL_S": str(self.fence_ttl_s),
            MARK: mark,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A parent that ended, as its supervisor saw it."""

    pid: int
    status: int
    began_unix_s: float
    at_unix_s: float


class ClientProcess:
    """One process of `tests.chaos.sender`."""

    def __init__(self, folder: Path, name: str, environ: dict[str, str]) -> None:
        self.name = name
        with (folder / f"{name}.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.sender", str(folder), name],
                env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def send(self, first: int, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{first} {count}\n".encode())
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        if self.process.stdin is not None:
            # What was not read yet is lost with its reader.
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


class Fleet:
    """Everything under test, and what the faults did to it."""

    def __init__(
        self, shape: Shape, server: TestServer, folder: Path, config: Path, account: Account
    ) -> None:
        self.shape, self.server, self.folder, self.account = shape, server, folder, account
        self.mark = folder.name
        self._environ = shape.environ(server, self.mark)
        self.workers = [
            Worker(server, config, self._environ, f"w{number}") for number in range(shape.workers)
        ]
        for worker in self.workers:
            worker.log_path = folder / f"{worker.node}.log"
        self.clients: list[ClientProcess] = []
        self._clients_started = 0
        #: Parents that a fault ends, with the exit status it asks for.
        self.expected: dict[int, int | None] = {}
        self.ended: list[Ended] = []
        self._next_number = 1
        #: When the server was away or refused to work, from and until.
        self._away: list[tuple[float, float]] = []
        #: Guards the clients and the numbers.
        self._lock = threading.RLock()
        self._supervising = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def start(self) -> None:
        """Start everything; returns when every instance is ready."""
        for worker in self.workers:
            worker.start()
        for _ in range(self.shape.clients):
            self.start_client()
        for worker in self.workers:
            worker.wait_ready(self.shape.instances, timeout_s=60)
        self._supervising.set()
        self._supervisor.start()

    def stop(self) -> list[int]:
        """End clients and workers in good order; returns the exit statuses of the workers."""
        self._stop_supervisor()
        for client in self.clients:
            client.kill()
        return [worker.stop() for worker in self.workers]

    def kill(self) -> None:
        """Leave nothing behind, whatever the state."""
        self._stop_supervisor()
        for client in self.clients:
            client.kill()
        for worker in self.workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait(timeout=30)
            worker.folder.cleanup()
        for process in marked(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    # -- clients

    def start_client(self) -> ClientProcess:
        with self._lock:
            self._clients_started += 1
            name = f"c{self._clients_started}"
            self.account.follow(self.folder, name)
            client = ClientProcess(self.folder, name, self._environ)
            self.clients.append(client)
            return client

    def kill_client(self, client: ClientProcess) -> None:
        """kill -9; another takes its place."""
        with self._lock:
            client.kill()
            self.clients.remove(client)
            self.account.abandoned(client.name)
            self.start_client()

    def send(self, count: int) -> int:
        """Have the clients send ``count`` jobs; returns the first of their numbers."""
        with self._lock:
            first = self._next_number
            for i, client in enumerate(self.clients):
                share = count // len(self.clients) + (i < count % len(self.clients))
                if share:
                    client.send(self.numbers(NUMBERS_A_JOB * share), share)
            return first

    def numbers(self, count: int) -> int:
        """Take ``count`` numbers that no other job has; returns the first."""
        with self._lock:
            first, self._next_number = self._next_number, self._next_number + count
            return first

    # -- what the faults do, and say

    def end(self, worker: Worker, how: signal.Signals, *, status: int | None) -> None:
        """Signal a parent; it is to end with ``status``, or however it likes."""
        assert worker.process is not None
        self.expected[worker.pid] = status
        worker.process.send_signal(how)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """The server is away, or refuses to work, for the length of the block."""
        began_unix_s = time.time()
        try:
            yield
        finally:
            self._away.append((began_unix_s, time.time()))

    def was_away(self, from_unix_s: float, until_unix_s: float) -> bool:
        """Whether the server was away at some time between the two."""
        return any(began < until_unix_s and from_unix_s < ended for began, ended in self._away)

    # -- what the kernel and the server say

    def parents_of_instances(self) -> dict[int, int]:
        """Return the parent of every instance that lives, by pid."""
        return {pid: worker.pid for worker in self.workers for pid in living_children(worker.pid)}

    def instance_pids(self) -> list[int] | None:
        """Return the pids of all instances, or None while any is missing."""
        pids: list[int] = []
        for worker in self.workers:
            its = living_children(worker.pid)
            if len(its) != self.shape.instances:
                return None
            pids += its
        return pids

    def unfinished(self) -> int:
        """Return how many jobs wait or are held."""
        with self.server.client() as client:
            pipe = client.pipeline(transaction=False)
            for stream in KEYS.streams(QUEUE):
                pipe.xlen(stream)
            return sum(pipe.execute())

    # -- the supervisor

    def _supervise(self) -> None:
        began_unix_s = dict.fromkeys((worker.node for worker in self.workers), time.time())
        while self._supervising.is_set():
            for worker in self.workers:
                assert worker.process is not None
                status = worker.process.poll()
                if status is None:
                    continue
                self.ended.append(
                    Ended(
                        pid=worker.pid,
                        status=status,
                        began_unix_s=began_unix_s[worker.node],
                        at_unix_s=time.time(),
                    )
                )
                time.sleep(_RESTART_AFTER_S)
                if self._supervising.is_set():
                    began_unix_s[worker.node] = time.time()
                    worker.start()
            time.sleep(_LOOK_EVERY_S)

    def _stop_supervisor(self) -> None:
        self._supervising.clear()
        if self._supervisor.is_alive():
            self._supervisor.join(timeout=10)


@contextlib.contextmanager
def running_fleet(shape: Shape, folder: Path, account: Account) -> Iterator[Fleet]:
    """Run a fleet for the length of the block; nothing of it is left but ``folder``."""
    options = {"log": str(folder / "starts.log"), "batch_s": shape.batch_s}
    model: dict[str, Any] = {
        **SCRIPTED,
        "max_batch_size": shape.max_batch_size,
        "options": options,
    }
    if shape.code:
        model["code"] = shape.code
    with running_server() as server, config_folder({MODEL: model}) as config:
        fleet = Fleet(shape, server, folder, config, account)
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.kill()


def quiet(client: redis.Redis) -> bool:
    """Return whether no job waits or is held."""
    return not any(client.xlen(stream) for stream in KEYS.streams(QUEUE))
