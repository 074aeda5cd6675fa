"""How many cores this process may use, and how many CPU instances fit on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def slots(*, threads: int, wanted: int = 0) -> int:
    """Return how many instances of ``threads`` cores to run; ``wanted`` above 0 is obeyed."""
    return wanted or max(1, int(cores() // threads))


def cores() -> float:
    """Return the cores this process may use: its affinity, or less where a cgroup grants less."""
    # macOS has no affinity to ask for, and no cgroups.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(own), *_cgroup_quotas(_CGROUP_ROOT, _OWN_CGROUP)])


def _cgroup_quotas(root: Path, own: Path) -> Iterator[float]:
    """Yield the cores that each cgroup around this process grants, where it sets a limit."""
    for folder in _cgroup_folders(root, own):
        quota = _read(folder / "cpu.max") or _version_1(folder)
        limit, _, period = quota.partition(" ")
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            yield int(limit) / int(period)


def _cgroup_folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield every folder from the process's own cgroup up to the root."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = root / "cpu" if controllers else root
        yield folder
        for part in Path(path.lstrip("/")).parts:
            folder = folder / part
            yield folder


def _version_1(folder: Path) -> str:
    """Return a version 1 quota in the words of version 2; a quota of -1 means no limit."""
    return f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
