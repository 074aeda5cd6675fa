"""How a job is cancelled: by a mark in Redis, where every instance looks before it starts one.

It needs no worker that runs, and outlives all of them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from producer.contract.names import Keys

#: How long a mark stays; a job that waits longer than this is run after all.
MARK_LIFE_S: Final = 7 * 86_400

_SCRIPT: Final = pathlib.Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")


def cancel_command(keys: Keys, job_ids: Iterable[str]) -> list[Any]:
    """Return the Redis command that marks jobs; a full server takes it.

    It answers with 1 for each that was marked, and 0 for each that was answered before.
    """
    marks = [
        key for job in job_ids for key in (keys.cancelled(job), keys.result(job), keys.fence(job))
    ]
    return ["EVAL", _SCRIPT, len(marks), *marks, MARK_LIFE_S]


def cancel_stamped_command(keys: Keys, stamps: Sequence[tuple[str, str]]) -> list[Any]:
    """Return the command that marks every job that carries one of the ``(header, stamp)``."""
    # Of a stamp there is no result and no fence: these two keys never exist.
    marks = [
        key
        for header, stamp in stamps
        for mark in [keys.cancelled_stamp(header, stamp)]
        for key in (mark, f"{mark}:none", f"{mark}:none")
    ]
    return ["EVAL", _SCRIPT, len(marks), *marks, MARK_LIFE_S]
