"""What every queue holds and who serves it: the one way in which both sides count.

`fleet queue`, `fleet models`, Flower's broker page and the autoscaler show and decide by these
numbers. They cost the same whatever waits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import redis

from producer.contract import live
from producer.contract.live import Words
from producer.contract.names import FREE, GROUP, PRIORITIES, Keys, model_of

_SCRIPT: Final = Path(__file__).with_name("queues.lua").read_text(encoding="utf-8")

#: Keys that one step of a search looks at.
_SEARCH_AT_ONCE: Final = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one queue holds, over all its priorities, at one moment."""

    #: Could be claimed now; what an instance gave back waits again.
    waiting: int
    #: In the hands of an instance: it runs, or is next.
    claimed: int
    #: Waits until it is due.
    delayed: int
    dead: int
    #: How long ago the oldest of the waiting was sent; None when none waits, or nobody asked.
    oldest_s: float | None

    @property
    def queued(self) -> int:
        """Jobs that wait or run."""
        return self.waiting + self.claimed

    @property
    def nothing(self) -> bool:
        """Whether the queue holds nothing at all."""
        return not (self.queued or self.delayed or self.dead)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Who serves one queue, as its workers said last."""

    workers: int = 0
    #: Their instances that are ready to run its jobs.
    ready: int = 0
    #: Jobs answered a second, over the last ten; None when nobody serves it.
    answered_per_s: float | None = None
    #: Why an instance cannot load its model, where that is so and none is ready.
    trouble: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """One queue, as people see it."""

    name: str
    held: Held
    served: Served


def look(
    client: redis.Redis, keys: Keys, names: Iterable[str], *, now_unix_s: float
) -> list[Queue]:
    """Return the queues of ``names``, in their order, with all that is known of them."""
    held = count(client, keys, names, oldest=True)
    workers = live.workers(client, keys, now_unix_s=now_unix_s)
    return [
        Queue(name=name, held=held[name], served=served_by(workers, model_of(name)))
        for name in held
    ]


def count(
    client: redis.Redis, keys: Keys, names: Iterable[str], *, oldest: bool = False
) -> dict[str, Held]:
    """Return what each of ``names`` holds; ``oldest`` costs reading one entry of each stream."""
    wanted = list(dict.fromkeys(names))
    parts = [
        key for name in wanted for key in (*keys.streams(name), keys.delayed(name), keys.dead(name))
    ]
    # One script: a claim between two answers would count its jobs twice or not at all, and a full
    # server refuses MULTI.
    script = client.register_script(_SCRIPT)
    found: Any = script(keys=parts, args=[GROUP, FREE, len(PRIORITIES), int(oldest)])
    return {
        name: Held(
            waiting=waiting,
            claimed=claimed,
            delayed=delayed,
            dead=dead,
            oldest_s=age_ms / 1000 if age_ms >= 0 else None,
        )
        for name, (waiting, claimed, delayed, dead, age_ms) in zip(wanted, found, strict=True)
    }


def served_by(workers: Iterable[Words], model: str) -> Served:
    """Return what live ``workers`` say of one model, added up."""
    serving = [worker for worker in workers if model in worker.get("models", ())]
    # A worker names the models it has answered for.
    rates = [worker.get("answered_per_s", {}).get(model, 0.0) for worker in serving]
    instances = [each for worker in serving for each in worker.get("instances", ())]
    ready = sum(_is_ready(instance, model) for instance in instances)
    troubles = [trouble for each in instances if (trouble := _trouble(each, model))]
    return Served(
        workers=len(serving),
        ready=ready,
        answered_per_s=round(sum(rates), 1) if rates else None,
        trouble=troubles[0] if troubles and not ready else "",
    )


def _is_ready(instance: Mapping[str, Any], model: str) -> bool:
    """Whether an instance would run a job of ``model`` now; one may lack another model."""
    engine = instance.get("models", {}).get(model, {})
    return instance.get("state") in ("ready", "broken") and engine.get("state") == "ready"


def _trouble(instance: Mapping[str, Any], model: str) -> str:
    """Return why an instance cannot load ``model``; the load may end its process, too."""
    models = instance.get("models", {})
    if model in models:
        return str(models[model].get("text", "")) if models[model].get("state") == "broken" else ""
    return str(instance.get("text", "")) if instance.get("state") == "broken" else ""


def find(client: redis.Redis, keys: Keys) -> set[str]:
    """Return the queues that have a stream, delayed jobs or dead letters, served or not.

    Walks over every key of the database, a step at a time: for people, not for a loop.
    """
    pattern = f"{_literal(keys.prefix)}fleet:[sd]*"
    ours: Any = client.scan_iter(match=pattern, count=_SEARCH_AT_ONCE)
    found = (keys.queue_in(key.decode(errors="replace")) for key in ours)
    return {queue for queue in found if queue is not None}


def _literal(text: str) -> str:
    """Return ``text`` as a pattern of Redis that matches it alone."""
    return re.sub(r"([\\*?\[\]])", r"\\\1", text)
