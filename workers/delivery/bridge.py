"""The list bridge: jobs that stock Celery apps put into the lists of a queue go into its streams.

Such an app has no code of ours and a plain ``redis://`` broker. Its messages are moved as they
came; nobody here opens a body.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import redis

from producer.contract.message import MAX_LIST_ENVELOPE_BYTES
from producer.contract.names import PRIORITIES, Keys
from workers.delivery import scripts
from workers.delivery.scripts import Call, send

logger = logging.getLogger(__name__)

#: What one call moves: Redis does nothing else meanwhile, and neither does the keeper.
_MESSAGES: Final = 200
_BYTES: Final = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one call did for one queue."""

    messages: int
    #: Whether it stopped before the lists were empty.
    more: bool
    #: Keys with a list's name that hold something else.
    foreign: tuple[str, ...]


def bridge(keys: Keys, queue: str, *, now_unix_s: float, at_most: int = _MESSAGES) -> Call[Moved]:
    """Move messages from the lists of ``queue`` into its streams."""

    def read(answer: list[Any]) -> Moved:
        messages, more, *foreign = answer
        names = tuple(key.decode(errors="replace") for key in foreign)
        return Moved(messages=messages, more=bool(more), foreign=names)

    return Call(
        script=scripts.BRIDGE,
        keys=[keys.delayed(queue), *keys.streams(queue), *keys.lists(queue)],
        args=[now_unix_s, at_most, _BYTES, MAX_LIST_ENVELOPE_BYTES, *PRIORITIES],
        read=read,
    )


class Bridge:
    """Looks into the lists of some queues and moves what is there."""

    def __init__(self, *, client: redis.Redis, keys: Keys) -> None:
        self._client, self._keys = client, keys
        self._told: set[str] = set()

    def move(self, queues: Sequence[str]) -> bool:
        """Move a bounded number of messages of each of ``queues``; returns whether more are left.

        A look costs Redis a few microseconds, so it may be taken often.
        """
        waiting = [queue for queue, found in zip(queues, self._look(queues), strict=True) if found]
        now_unix_s = time.time()
        calls = [bridge(self._keys, queue, now_unix_s=now_unix_s) for queue in waiting]
        moved: list[Moved] = send(self._client, *calls) if calls else []
        for each in moved:
            self._tell(each.foreign)
        return any(each.more for each in moved)

    def _look(self, queues: Sequence[str]) -> list[int]:
        pipe = self._client.pipeline(transaction=False)
        for queue in queues:
            pipe.exists(*self._keys.lists(queue))
        return pipe.execute()

    def _tell(self, foreign: Iterable[str]) -> None:
        """Log each key that is somebody's own, once."""
        for key in foreign:
            if key not in self._told:
                self._told.add(key)
                logger.warning("list.foreign", extra={"key": key, "reason": "it holds no list"})
