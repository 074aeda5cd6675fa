"""What `celery purge` does to a queue of the fleet: jobs that wait are deleted, and with them their
large arrays, wherever these lie. What an instance has claimed is left to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import redis

from producer.contract.blobs import Blobs, Named
from producer.contract.names import FREE, GROUP

_PURGE: Final = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")

#: Jobs of one round trip: their files are deleted together, and the server does nothing else while
#: it deletes them.
_AT_ONCE: Final = 100


def purge(client: redis.Redis, blobs: Blobs, queue: str) -> int:
    """Delete the jobs that wait in ``queue``; return how many there were.

    No more than are there at the beginning, or it would not end while others send faster.
    """
    script = client.register_script(_PURGE)
    keys = blobs.keys
    places = [keys.delayed(queue), keys.journal(queue), *keys.streams(queue)]
    told = [GROUP, FREE, str(_AT_ONCE), keys.blob(""), keys.kept_blob("")]
    purged, taken, left = 0, _AT_ONCE, _number_in(client, blobs, queue)
    while taken >= _AT_ONCE and left > 0:
        answer: Any = script(keys=places, args=told)
        taken, deleted, *files = answer
        purged += deleted
        left -= taken
        # After their jobs: one that is claimed in between needs its arrays.
        blobs.remove_files(map(Named.read, files))
    return purged


def _number_in(client: redis.Redis, blobs: Blobs, queue: str) -> int:
    with client.pipeline(transaction=False) as pipe:
        pipe.zcard(blobs.keys.delayed(queue))
        for stream in blobs.keys.streams(queue):
            pipe.xlen(stream)
        return sum(pipe.execute())
