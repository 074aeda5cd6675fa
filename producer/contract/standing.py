"""What workers say that explains why replies do not come: asked when a wait is over."""

from __future__ import annotations

import time
from typing import Final

import redis

from producer.contract import live, queues
from producer.contract.names import Keys
from producer.contract.settings import Settings, redis_client

#: Whoever asks has waited long enough.
_WITHIN_S: Final = 0.5
#: Characters of a worker's words on one model.
_LONGEST: Final = 300


def standing(settings: Settings) -> str:
    """Return it in sentences, or nothing where nothing is known: that no worker runs, or which
    models none has loaded, and why.
    """
    limits = {"socket_timeout": _WITHIN_S, "socket_connect_timeout": _WITHIN_S}
    try:
        with redis_client(settings.broker_url, **limits) as client:
            workers = live.workers(client, Keys(prefix=settings.prefix), now_unix_s=time.time())
    except (redis.RedisError, OSError):
        return ""
    return said_by(workers)


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
