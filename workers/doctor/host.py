"""What this host or container grants: cores, memory, and a folder for what is built."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from workers.build.store import cache_folder
from workers.finding import Finding, State
from workers.instances import cgroup, cpu
from workers.instances.discovery import Inventory
from workers.instances.instance import Kind
from workers.settings import WorkerSettings

_GIB: Final = 1 << 30

#: Less room than this for variants and plans, each about as large as its model, is worth a line.
_LITTLE_BYTES: Final = _GIB
_KINDS: Final = {Kind.GPU: "GPUs", Kind.MIG: "MIG slices", Kind.CPU: "CPU slots"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What was found."""

    cores: float
    memory_bytes: int
    #: Whether a cgroup sets that limit; without one it is all there is.
    is_limited: bool
    cache: Path
    cache_is_writable: bool
    cache_free_bytes: int


def read_host(config_dir: Path) -> Host:
    """Look at this host; nothing is left behind."""
    limit, granted = cgroup.memory_limit_bytes(), cgroup.memory_bytes()
    cache = cache_folder(config_dir)
    # A folder that is not there yet is made when something is built.
    nearest = next(path for path in (cache, *cache.parents) if os.path.lexists(path))
    is_folder = nearest.is_dir()
    return Host(
        cores=cpu.cores(),
        memory_bytes=granted,
        is_limited=limit is not None and limit <= granted,
        cache=cache,
        cache_is_writable=is_folder and _can_be_written(nearest),
        cache_free_bytes=shutil.disk_usage(nearest).free if is_folder else 0,
    )


def _can_be_written(folder: Path) -> bool:
    """Return whether a file can be made; what rights say is not all, on /proc or for root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cores(host: Host, settings: WorkerSettings) -> Finding:
    """Return whether an instance has the cores that it is told to use."""
    text = f"{host.cores:g} granted, {settings.threads} for each CPU slot."
    if settings.threads > host.cores:
        do = "Lower `threads` in fleet.toml, or grant more."
        return Finding("cores", State.WARNING, text, do)
    return Finding("cores", State.OK, text)


def memory(host: Host, settings: WorkerSettings, cpu_slots: int) -> Finding:
    """Return whether what the instances may take is there."""
    whose = "that a cgroup grants" if host.is_limited else "of this machine"
    text = f"{host.memory_bytes / _GIB:.1f} GiB {whose}."
    wanted = (settings.memory_limit_bytes or 0) * cpu_slots
    if wanted > host.memory_bytes:
        text += (
            f" {cpu_slots} CPU slots may take {wanted / _GIB:.1f} GiB: the kernel would kill them."
        )
        return Finding("memory", State.WARNING, text, "Lower memory_limit_bytes or instances.")
    return Finding("memory", State.OK, text)


def cache(host: Host) -> Finding:
    """Return whether variants and plans can be kept."""
    if not host.cache_is_writable:
        text = f"{host.cache} cannot be written: no variant and no plan can be built here."
        do = "Let FLEET_CACHE name a folder that this user may write."
        return Finding("cache", State.WARNING, text, do)
    free = f"{host.cache_free_bytes / _GIB:.1f} GiB free"
    if host.cache_free_bytes < _LITTLE_BYTES:
        do = "Make room, or let FLEET_CACHE name a folder on a larger disk."
        return Finding("cache", State.WARNING, f"{host.cache} has {free}.", do)
    return Finding("cache", State.OK, f"{host.cache} can be written, {free}.")


def instances(inventory: Inventory, holders: Mapping[str, str] | None) -> Finding:
    """Return what a worker would run on, and how much of it others hold."""
    kinds = [each.kind for each in inventory.instances]
    counts = [f"{_KINDS[kind]}: {kinds.count(kind)}" for kind in _KINDS if kind in kinds]
    known = holders or {}
    held = {known[each.key] for each in inventory.instances if each.key in known}
    by = f"; held by {', '.join(sorted(held))}" if held else ""
    return Finding("instances", State.OK, f"{', '.join(counts)}{by}.")
