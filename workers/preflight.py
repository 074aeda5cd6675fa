"""What is looked at before a worker starts, so that a mistake is one line within seconds.

Imports no runtime: whether a model can be loaded is found by the instances, which say so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.reach import reach
from producer.contract.settings import Settings, redacted
from workers.models import load_models
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

#: Streams with everything the scripts ask of them.
_OLDEST_REDIS: Final = (6, 2)


def check(settings: WorkerSettings, where: Settings | None = None) -> None:
    """Raise ConfigError for the first thing that would keep a worker from doing its job.

    ``where`` the broker is comes from the environment unless it is given.
    """
    where = where or Settings.from_env()
    load_models(settings.config_dir, settings.models or None)
    _check_server(where.broker_url, variable="FLEET_BROKER_URL")
    if where.result_url != where.broker_url:
        _check_server(where.result_url, variable="FLEET_RESULT_URL")


def _check_server(url: str, *, variable: str) -> None:
    with reach(url, variable=variable) as client:
        try:
            info = client.info()
        except redis.ResponseError as error:
            # Managed servers may keep INFO from us; that alone is no reason not to work.
            logger.warning("redis.info_refused", extra={"url": redacted(url), "reason": str(error)})
            return
    if unfit := _unfit(info):
        raise ConfigError(f"{redacted(url)} {unfit}")
    policy = info.get("maxmemory_policy", "")
    if policy.startswith("volatile-"):
        logger.warning("redis.may_drop_results", extra={"url": redacted(url), "policy": policy})


def _unfit(info: Mapping[str, Any]) -> str | None:
    """Return why a server that says ``info`` of itself cannot carry jobs, if it cannot."""
    version = str(info.get("redis_version", ""))
    if _numbers(version) < _OLDEST_REDIS:
        return f"is version {version}; 6.2 or newer is needed."
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys-"):
        return (
            f"has maxmemory-policy {policy}: when it is full it would throw waiting jobs away "
            "without a word. Set `maxmemory-policy noeviction` there."
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; what cannot be read is taken for new enough."""
    parts = version.split(".")[:2]
    return tuple(map(int, parts)) if parts and all(map(str.isdigit, parts)) else _OLDEST_REDIS
