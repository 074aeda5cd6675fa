"""CPU seconds of processes as the kernel counts them (Linux): the process with all its threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

#: Places of the fields in /proc/<pid>/stat, counted after the name, which may hold spaces.
_PARENT: Final = 1
_USER: Final = 11
_SYSTEM: Final = 12

#: The columns of the line `cpu` in /proc/stat; guests are counted in user and nice already.
_KINDS: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
_IDLE: Final = frozenset({"idle", "iowait"})


def cpu_s(pid: int) -> float:
    """Return what the process has used so far, its ended threads included."""
    fields = _stat(pid)
    return (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S


def resident_kib(pid: int) -> int:
    """Return the memory that the process has at hand."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def children(pid: int) -> list[int]:
    """Return the ids of the processes that ``pid`` has started and that still live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(_stat(int(folder.name))[_PARENT]) == pid:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            # It ended while we looked.
            continue
    return sorted(found)


def machine_cpu_s() -> float:
    """Return what all cores have worked so far, for whomever; stolen time of a guest included."""
    line = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = dict(zip(_KINDS, map(int, line.split()[1:]), strict=False))
    return sum(count for kind, count in ticks.items() if kind not in _IDLE) / _TICKS_PER_S


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
