"""Processes as the kernel knows them: children, zombies, memory; Linux only."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Every process of a storm carries this variable, with the storm's own value.
MARK: Final = "CHAOS_STORM"

_GONE: Final = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What /proc says of one process."""

    pid: int
    parent: int
    state: str
    name: str

    @property
    def zombie(self) -> bool:
        return self.state == "Z"


def look(pid: int) -> Process | None:
    """Return what is known of a process, or None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except _GONE:
        return None
    head, _, rest = stat.rpartition(")")
    state, parent = rest.split()[:2]
    return Process(pid=pid, parent=int(parent), state=state, name=head.partition("(")[2])


def children(pid: int) -> list[Process]:
    """Return the children of a process, zombies too."""
    found: list[Process] = []
    # A thread may end meanwhile, and the process too.
    with contextlib.suppress(*_GONE):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(*_GONE):
                pids = (thread / "children").read_text().split()
                found += [child for child in map(look, map(int, pids)) if child is not None]
    return found


def living_children(pid: int) -> list[int]:
    return [child.pid for child in children(pid) if not child.zombie]


def marked(value: str) -> Iterator[Process]:
    """Yield the living processes that carry the mark with this value."""
    wanted = f"{MARK}={value}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(*_GONE):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                process = look(int(folder.name))
                if process is not None and process.pid != os.getpid():
                    yield process


def memory_bytes(pid: int) -> int | None:
    """Return the memory that a process has for itself (anonymous).

    What it maps from files comes and goes with its neighbours.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except _GONE:
        return None
    for line in lines:
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    return None
