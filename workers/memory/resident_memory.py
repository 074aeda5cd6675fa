"""How much memory this process holds, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Return the resident memory of this process; ``None`` where the kernel does not tell it so."""
    # What was freed and is kept for later would hide what is taken next.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def grown_bytes(before: int | None) -> int | None:
    """Return how much more it is than ``before``."""
    now = resident_bytes()
    return None if before is None or now is None else max(0, now - before)
