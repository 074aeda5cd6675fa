"""What the fleet says about itself: read from Redis, where workers write it every few seconds.

Reads and adds up; how it is shown belongs to `producer.cli`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import redis

from producer.contract.counters import add_counters
from producer.contract.names import Keys, queue_of

#: A worker's own words, or a part of them; the keys are those of `workers.telemetry`.
Words = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All that live workers say, at one moment."""

    #: One entry a worker, by node name.
    workers: tuple[Words, ...]
    #: Models that workers served within the last day, with the jobs that wait or run.
    queued: Mapping[str, int]

    def totals(self) -> dict[str, Words]:
        """Return the counters of every model, summed over all instances."""
        sums: dict[str, Words] = {model: {} for model in self.queued}
        for instance in self.instances():
            for model, counters in instance.get("counters", {}).items():
                sums[model] = add_counters(sums.get(model, {}), counters)
        return sums

    def instances(self) -> Iterable[Words]:
        """Yield what every instance of every worker says."""
        for worker in self.workers:
            yield from worker.get("instances", ())

    def engines(self) -> dict[str, list[Words]]:
        """Return, for every model, what the instances that loaded it say of its engine."""
        loaded: dict[str, list[Words]] = {model: [] for model in self.queued}
        for instance in self.instances():
            for model, engine in instance.get("models", {}).items():
                loaded.setdefault(model, []).append(engine)
        return loaded


def read(client: redis.Redis, keys: Keys, *, now_unix_s: float) -> Fleet:
    """Return what the workers that are not stale at ``now_unix_s`` said last."""
    nodes = _live(client, keys.workers, now_unix_s)
    models = _live(client, keys.models, now_unix_s)
    texts = client.mget([keys.worker(node) for node in nodes]) if nodes else []
    return Fleet(
        workers=tuple(json.loads(text) for text in texts if text is not None),
        queued={model: _queued(client, keys, model) for model in models},
    )


def _live(client: redis.Redis, key: str, now_unix_s: float) -> list[str]:
    # Typed for every option of the command; without WITHSCORES the reply is a list of names.
    names = cast("list[bytes]", client.zrangebyscore(key, now_unix_s, "+inf"))
    return sorted(name.decode() for name in names)


def _queued(client: redis.Redis, keys: Keys, model: str) -> int:
    return sum(client.xlen(stream) for stream in keys.streams(queue_of(model)))
