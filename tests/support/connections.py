"""Who is connected to a server, as the kernel and the server know it; Linux only."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from tests.support.servers import TestServer


def connections(server: TestServer, pid: int) -> set[str]:
    """Return the addresses from which a process is connected to the server."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(fd.readlink().name.removeprefix("socket:[").rstrip("]"))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {
        f"127.0.0.1:{int(row[1].partition(':')[2], 16)}"
        for row in rows
        if row[9] in inodes and int(row[2].partition(":")[2], 16) == server.port
    }


def channels(client: Any) -> list[bytes]:
    """Return the channels that clients listen on, as opposed to workers."""
    return [name for name in client.pubsub_channels() if b"pidbox" not in name]
