"""What the fleet says about itself: read from Redis, where workers write it every few seconds.

Reads and adds up; how it is shown belongs to `producer.cli`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

import redis

from producer.contract import live, queues
from producer.contract.counters import add_counters
from producer.contract.live import Words
from producer.contract.names import Keys, queue_of

#: Of a batch that runs for longer the state of its instance tells: it looks like idleness.
_LONG_BATCH_S: Final = 5.0


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
    models = {queue_of(model): model for model in live.models(client, keys, now_unix_s=now_unix_s)}
    held = queues.count(client, keys, models)
    return Fleet(
        workers=live.workers(client, keys, now_unix_s=now_unix_s),
        queued={model: held[queue].queued for queue, model in models.items()},
    )


def state_of(instance: Words) -> str:
    """Return an instance's state with what explains it."""
    state, why = str(instance["state"]), str(instance.get("text", ""))
    batch_s = float(instance.get("batch_s", 0.0))
    if not why and batch_s >= _LONG_BATCH_S:
        # An older worker does not say of which model.
        model = instance.get("batch_model")
        why = f"runs a batch{f' of {model}' if model else ''} for {batch_s:.0f} s now"
    return f"{state}: {why}" if why else state
