"""Models that a running worker takes on, or leaves to others: `celery control add_consumer` and
`cancel_consumer`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.names import Keys, is_stream_queue, model_of, queue_of
from workers.delivery.ledger import ensure_groups
from workers.delivery.scripts import send
from workers.models import load_models
from workers.serving import MODEL_LIFE_S, Serving

NOT_OURS: Final = (
    "a fleet worker serves fleet.<model> queues only; other queues belong to a plain Celery worker."
)


def add(serving: Serving, queue: str, *, client: redis.Redis, keys: Keys, config_dir: Path) -> str:
    """Serve the model of ``queue`` from now on; returns what to say of it.

    ConfigError says what is wrong with the name or with the model's file.
    """
    model = _model(queue)
    if model in serving.models:
        return f"{queue} is served here already"
    load_models(config_dir, [model])
    # An instance claims as soon as it has loaded the model, and an app may send at once.
    send(client, ensure_groups(keys, [queue]))
    client.zadd(keys.models, {model: time.time() + MODEL_LIFE_S})
    serving.add(model)
    return f"{queue} is served here as soon as its model is loaded, in one instance after the other"


def remove(serving: Serving, queue: str, *, node: str) -> str:
    """Claim no more jobs of ``queue``; returns what to say of it, ConfigError why not."""
    model = _model(queue)
    if model not in serving.models:
        raise ConfigError(f"{queue} is not served here, but {_queues(serving.models)}.")
    if serving.models == (model,):
        raise ConfigError(
            f"{queue} is all that this worker serves. Add another first, or end the worker: "
            f"celery -A workers.app control shutdown -d {node}"
        )
    serving.remove(model)
    return f"{queue} is no longer served here; what waits in it waits for another worker"


def _model(queue: str) -> str:
    if not is_stream_queue(queue):
        raise ConfigError(f"{queue}: {NOT_OURS}")
    return model_of(queue)


def _queues(models: Sequence[str]) -> str:
    return ", ".join(map(queue_of, models))
