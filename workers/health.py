"""`fleet health`: whether the worker on this host works, asked of its own node.

Through Celery's remote control, so that the worker's loop itself must answer: neither a process
that hangs nor another worker's answer passes for health.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import redis
from celery.utils.nodenames import default_nodename, host_format
from kombu.exceptions import OperationalError

from producer.contract.app import FleetApp, make_app
from producer.contract.errors import ConfigError
from producer.contract.reach import reach

#: A worker answers at once unless its machine is busy; a supervisor waits a few seconds longer.
_ANSWER_WITHIN_S: Final = 6.0


class NotHealthy(Exception):
    """The worker does not work; the text says why."""


def health(node: str | None = None) -> str:
    """Return a line about the worker ``node``, by default this host's; NotHealthy says why not."""
    node = host_format(default_nodename(node))
    try:
        with make_app() as app:
            reach(app.settings.broker_url).close()
            return verdict(node, _ask(app, node))
    except (ConfigError, OperationalError, redis.RedisError) as error:
        raise NotHealthy(str(error)) from error


def verdict(node: str, stats: Mapping[str, Any] | None) -> str:
    """Judge what a worker said to ``inspect stats``; None means that it said nothing."""
    if stats is None:
        raise NotHealthy(
            f"{node} does not answer within {_ANSWER_WITHIN_S:g} s. `fleet status` lists the "
            "workers that run; name one with -n."
        )
    if waiting := stats["pool"].get("waiting"):
        # It works as it should: others of its host have the instances.
        return f"{node}: {waiting}."
    instances = [each for each in stats["pool"]["instances"] if each["state"] != "stopped"]
    ready = [instance for instance in instances if instance["state"] == "ready"]
    if not ready:
        raise NotHealthy(f"No instance of {node} is ready: {_states(instances) or 'it has none'}.")
    # One that serves some models says why it cannot load another.
    lacks = "".join(sorted({f"; {text}" for each in ready if (text := each["text"])}))
    return f"{node}: {len(ready)} of {len(instances)} instances ready{lacks}."


def _ask(app: FleetApp, node: str) -> Mapping[str, Any] | None:
    # The first answer is enough; without a limit every call would take the whole time.
    inspect = app.control.inspect(destination=[node], limit=1, timeout=_ANSWER_WITHIN_S)
    return (inspect.stats() or {}).get(node)


def _states(instances: list[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"instance {instance['slot']} is {instance['state']}"
        + (f": {text}" if (text := instance["text"]) else "")
        for instance in instances
    )
