"""What decides how many rows fit, as a short text: instances with the same one share ceilings."""

from __future__ import annotations

import hashlib
import json
import os
import resource

from workers.engines.base import Engine
from workers.models import ModelSpec

_GIB = 1 << 30


def memory_kind(spec: ModelSpec, engine: Engine) -> str:
    """Return the same text for instances in which the same batches of ``spec`` fit.

    The sizes of its files stand for the model itself: one that was exchanged is learned anew.
    """
    decides = [
        engine.runtime,
        engine.memory,
        _system_limit_gib(),
        resource.getrlimit(resource.RLIMIT_AS)[0],
        spec.memory_limit_bytes,
        spec.memory_first_chunk_bytes,
        spec.memory_shared_by,
        spec.precision,
        {name: path.stat().st_size if path else 0 for name, path in spec.engines.items()},
    ]
    return hashlib.blake2b(json.dumps(decides).encode(), digest_size=8).hexdigest()


def _system_limit_gib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _GIB
