"""What live workers say of themselves: read from Redis, where each writes it every few seconds."""

from __future__ import annotations

import json
from typing import Any, cast

import redis

from producer.contract.names import Keys

#: A worker's own words, or a part of them; the keys are those of `InstancePool.status`.
Words = dict[str, Any]


def workers(client: redis.Redis, keys: Keys, *, now_unix_s: float) -> tuple[Words, ...]:
    """Return what each worker said last that is not stale at ``now_unix_s``, by node name."""
    nodes = _fresh(client, keys.workers, now_unix_s)
    texts = client.mget([keys.worker(node) for node in nodes]) if nodes else []
    return tuple(json.loads(text) for text in texts if text is not None)


def models(client: redis.Redis, keys: Keys, *, now_unix_s: float) -> list[str]:
    """Return the models that workers served within the last day."""
    return _fresh(client, keys.models, now_unix_s)


def _fresh(client: redis.Redis, key: str, now_unix_s: float) -> list[str]:
    # Typed for every option of the command; without WITHSCORES the reply is a list of names.
    names = cast("list[bytes]", client.zrangebyscore(key, now_unix_s, "+inf"))
    return sorted(name.decode() for name in names)
