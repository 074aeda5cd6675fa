"""Which process is meant, and whether it is certain that it is over: only the kernel can say.

A life is written into Redis by who lives it, as ``place:pid:ticks``: the processes among which its
pid means something, and when it began. Whoever shares that place can ask the kernel; everybody else
learns nothing, as on a system without /proc.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Final

from workers.instances.host import host_id

_PROC: Final = Path("/proc")

#: The fields of /proc/PID/stat behind the program's name, which may hold any letter.
_STATE: Final = 0
_THREADS: Final = 17
_BEGAN_TICKS: Final = 19

#: States of a process that runs no more and holds nothing.
_ENDED: Final = "ZX"

_LIFE: Final = re.compile(r"([0-9a-f]+):([1-9][0-9]*):([0-9]+)")


def life_of(pid: int) -> str:
    """Return the life of a process of ours; empty where the kernel does not tell."""
    stat = _stat(pid)
    return f"{place()}:{pid}:{stat[_BEGAN_TICKS]}" if stat and place() else ""


def is_over(life: str) -> bool:
    """Return whether it is certain that no thread of that process runs, and never will.

    Every doubt counts as life: another place, a process that may not be looked at, a stopped one.
    """
    told = _LIFE.fullmatch(life)
    if not told or told[1] != place():
        return False
    pid, began_ticks = int(told[2]), told[3]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        # Another user's, whom /proc may hide.
        return False
    stat = _stat(pid)
    if not stat:
        return False
    # Its number was given to another; or it waits for its parent to ask how it ended. The first
    # thread may have ended before the others.
    return stat[_BEGAN_TICKS] != began_ticks or (
        stat[_STATE] in _ENDED and int(stat[_THREADS]) <= 1
    )


@functools.cache
def place() -> str:
    """Return the name of all processes that this one knows by their pids; empty if it cannot.

    Of one kernel, since it was started; of one namespace of pids; and of one namespace of clocks,
    for the kernel tells the time at which a process began by the clock of whoever asks. All these
    names are the same in virtual machines that were resumed from one snapshot; the host's is not.
    """
    try:
        if os.readlink(_PROC / "self") != str(os.getpid()):
            # /proc shows another namespace than the one that we are in.
            return ""
        pids, clocks = (os.readlink(_PROC / "self" / "ns" / kind) for kind in ("pid", "time"))
    except OSError:
        return ""
    words = f"{host_id()} {pids} {clocks} {platform.node()}"
    return hashlib.sha256(words.encode()).hexdigest()[:16]


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; empty when it says nothing."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(") ")[2].split()
