"""How many cores this process may use, and the CPU slots that fit on them.

Workers share the slots of the cores that they share: those of the host, or those that a cgroup or
an affinity of their own grants them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from workers.instances import cgroup
from workers.instances.host import host_id
from workers.instances.instance import Instance, Kind

_CGROUP_ROOT: Final = cgroup.ROOT
_OWN_CGROUP: Final = cgroup.OWN


def slots(*, threads: int, wanted: int = 0) -> int:
    """Return how many instances of ``threads`` cores there are; ``wanted`` above 0 is obeyed."""
    return wanted or max(1, int(cores() // threads))


def instances(numbers: Iterable[int]) -> list[Instance]:
    """Return the CPU slots of these numbers."""
    uuid = f"CPU-{host_id()}{_domain(_CGROUP_ROOT, _OWN_CGROUP)}"
    return [Instance(kind=Kind.CPU, uuid=uuid, slot=number, name="CPU") for number in numbers]


def cores() -> float:
    """Return the cores this process may use: its affinity, or less where a cgroup grants less."""
    limits = [granted for _, granted in _cgroup_limits(_CGROUP_ROOT, _OWN_CGROUP)]
    return min([float(len(_affinity())), *limits])


def _affinity() -> set[int]:
    # macOS has no affinity to ask for, and no cgroups.
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _domain(root: Path, own: Path) -> str:
    """Return what tells our cores from others of the host; nothing where we may use them all.

    A cgroup is known by its inode, which is the same from within a container and from outside.
    """
    affinity = _affinity()
    limit = min(_cgroup_limits(root, own), key=lambda limit: limit[1], default=None)
    if limit is not None and limit[1] < len(affinity):
        return f".cgroup-{limit[0].stat().st_ino}"
    if len(affinity) < (os.cpu_count() or 1):
        return f".cores-{sum(1 << core for core in affinity):x}"
    return ""


def _cgroup_limits(root: Path, own: Path) -> Iterator[tuple[Path, float]]:
    """Yield each cgroup around this process that sets a limit, and the cores that it grants."""
    for folder in cgroup.folders(root, own, controller="cpu"):
        quota = cgroup.read(folder / "cpu.max") or _version_1(folder)
        limit, _, period = quota.partition(" ")
        if limit.isdigit() and period.isdigit() and int(period) > 0:
            yield folder, int(limit) / int(period)


def _version_1(folder: Path) -> str:
    """Return a version 1 quota in the words of version 2; a quota of -1 means no limit."""
    return f"{cgroup.read(folder / 'cpu.cfs_quota_us')} {cgroup.read(folder / 'cpu.cfs_period_us')}"
