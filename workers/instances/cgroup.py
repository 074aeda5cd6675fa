"""The cgroups around this process: folders in which a container's limits are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")


def folders(root: Path, own: Path, *, controller: str) -> Iterator[Path]:
    """Yield every folder from the root down to the process's own cgroup."""
    for line in read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        folder = root / controller if controllers else root
        yield folder
        for part in Path(path.lstrip("/")).parts:
            folder = folder / part
            yield folder


def read(path: Path) -> str:
    """Return what a file of the kernel says; nothing where it is not there."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def memory_limit_bytes(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Return the least memory that a cgroup around this process grants, None without a limit."""
    said = (
        read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
        for folder in folders(root, own, controller="memory")
    )
    # Version 1 says a number near 2**63 where there is no limit.
    return min((int(text) for text in said if text.isdigit() and int(text) < 1 << 60), default=None)


def memory_bytes() -> int:
    """Return the memory of this machine, or what a cgroup grants of it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(memory_limit_bytes() or there, there)
