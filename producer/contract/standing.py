"""What workers say that explains why replies do not come: asked when a wait is over."""

from __future__ import annotations

import functools
import math
import os
import threading
import time
from typing import Final

import redis

from producer.contract import live, queues
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client

#: Whoever asks has waited long enough.
_WITHIN_S: Final = 0.5
#: How long it is believed what workers said, or that they could not be asked.
_FRESH_S: Final = 1.0
#: Characters of a worker's words on one model.
_LONGEST: Final = 300


def standing(settings: Settings) -> str:
    """Return it in sentences, or nothing where nothing is known: that no worker runs, or which
    models none has loaded, and why.

    Of many who wait in vain at once one asks for all.
    """
    return _question(os.getpid(), settings.broker_url, settings.prefix).answer()


class _Question:
    """One question to the workers of a fleet, and their answer for a moment."""

    def __init__(self, broker_url: str, prefix: str) -> None:
        self._broker_url, self._keys = broker_url, Keys(prefix=prefix)
        self._lock = threading.Lock()
        self._answer, self._asked_s = "", -math.inf

    def answer(self) -> str:
        with self._lock:
            if time.monotonic() - self._asked_s > _FRESH_S:
                self._answer = self._ask()
                self._asked_s = time.monotonic()
            return self._answer

    def _ask(self) -> str:
        limits = {"socket_timeout": _WITHIN_S, "socket_connect_timeout": _WITHIN_S}
        try:
            with redis_client(self._broker_url, **limits) as client:
                workers = live.workers(client, self._keys, now_unix_s=time.time())
        except (redis.RedisError, OSError):
            return ""
        return said_by(workers)


@functools.lru_cache(maxsize=32)
def _question(_pid: int, broker_url: str, prefix: str) -> _Question:
    """By process: a forked child may find the lock of its parent held for good."""
    return _Question(broker_url, prefix)


def said_by(workers: tuple[live.Words, ...]) -> str:
    """Return it from the words of all workers that live."""
    if not workers:
        return "No worker runs at the moment. "
    models = sorted({model for worker in workers for model in worker.get("models", ())})
    troubles = {model: queues.served_by(workers, model).trouble for model in models}
    return "".join(
        f"No running worker has {model!r} loaded: {trouble.rstrip('.')[:_LONGEST]}. "
        for model, trouble in troubles.items()
        if trouble
    )
