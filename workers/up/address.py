"""Where the embedded server answers and with what password: kept in its folder, for its return."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import secrets
import socket
from pathlib import Path
from typing import Any, Final

from producer.contract.settings import Server

_HOST: Final = "127.0.0.1"
_FILE: Final = "address.json"

#: Ports that no system gives to whoever connects somewhere, so that they are free the next time;
#: and a client that tries again and again while nobody listens would end up with itself.
_LASTING: Final = range(20_000, 30_000)
_TRIES: Final = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A port of the loopback, and the password that is asked for there."""

    port: int
    password: str = dataclasses.field(repr=False)

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@{_HOST}:{self.port}/0"

    def is_meant_by(self, url: str) -> bool:
        """Whether ``url`` leads here, or did before another program took the port."""
        server = Server.from_url(url)
        return (server.host, server.password) == (_HOST, self.password)

    @property
    def is_free(self) -> bool:
        """Whether nobody listens there at the moment."""
        with socket.socket() as probe:
            # As the server itself does: what an ended one left on the port is no obstacle.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, self.port))
            except OSError:
                return False
        return True

    @classmethod
    def new(cls) -> Address:
        """Return one with a password that nobody knows, on a port that nobody listens on."""
        password = secrets.token_hex(16)
        tried = (cls(port=port, password=password) for port in random.sample(_LASTING, _TRIES))
        return next(
            (each for each in tried if each.is_free), cls(port=free_port(), password=password)
        )

    @classmethod
    def kept_in(cls, folder: Path) -> Address | None:
        """Return the address that was kept, if there is one."""
        said = _said_in(folder)
        try:
            port = int(said["port"])
            return cls(port=port, password=str(said["password"])) if 0 < port < 65_536 else None
        except (ValueError, TypeError, KeyError):
            return None

    def keep_in(self, folder: Path) -> None:
        said = {**dataclasses.asdict(self), "folder": os.fspath(folder.resolve())}
        write_private(folder / _FILE, json.dumps(said))


def copied_from(folder: Path) -> Path | None:
    """Return the folder that ``folder`` is a copy of, where that still has the address; one that
    was moved is no copy.
    """
    made_in = _said_in(folder).get("folder")
    if not isinstance(made_in, str) or not made_in:
        return None
    original = Path(made_in)
    try:
        if original.samefile(folder):
            return None
    except OSError:
        return None
    address = Address.kept_in(folder)
    return original if address and Address.kept_in(original) == address else None


def _said_in(folder: Path) -> dict[str, Any]:
    """Return what is kept of the address, nothing where that makes no sense."""
    try:
        said = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def free_port() -> int:
    """Return a port of the loopback that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else may read, whole or not at all."""
    half = path.with_name(f".{path.name}.half")
    half.unlink(missing_ok=True)
    with os.fdopen(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    half.replace(path)
