"""Which host this is, as the kernel knows it: containers have host names of their own."""

from __future__ import annotations

import functools
import platform
import uuid
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def host_id() -> str:
    """Return a name that all processes of this kernel share and nothing else has."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        # macOS; there are no containers that share its kernel.
        return f"{platform.node()}-{uuid.getnode():x}"
