"""What is looked at before a worker starts, so that a mistake is one line within seconds.

Imports no runtime: whether a model can be loaded is found by the instances, which say so. A managed
Redis may keep INFO or CONFIG from us; that alone is no reason not to work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import redis

from producer.contract.errors import ConfigError
from producer.contract.greeting import SUPPORTED, greet
from producer.contract.reach import reach
from producer.contract.settings import Settings, redacted
from workers.models import load_models
from workers.settings import WorkerSettings

#: The first numbers of the versions that the scripts are tested on.
_TRIED: Final[Mapping[str, tuple[tuple[int, ...], ...]]] = {
    "Redis": ((6, 2), (7,), (8,)),
    "Valkey": ((8,), (9,)),
}

#: Fields by which servers that imitate Redis say what they are; their `redis_version` is no version
#: of theirs.
_OTHERS: Final = {
    "valkey_version": "Valkey",
    "dragonfly_version": "Dragonfly",
    "garnet_version": "Garnet",
    "kvrocks_version": "Kvrocks",
    "redict_version": "Redict",
}


def check(settings: WorkerSettings, where: Settings | None = None) -> list[str]:
    """Raise ConfigError for the first thing that would keep a worker from doing its job.

    Returns a line for each that may harm it. ``where`` the broker is comes from the environment
    unless it is given.
    """
    where = where or Settings.from_env()
    load_models(settings.config_dir, settings.models or None)
    warnings = list(_check_server(where.broker_url, variable="FLEET_BROKER_URL"))
    if where.result_url != where.broker_url:
        warnings += _check_server(where.result_url, variable="FLEET_RESULT_URL")
    return warnings


def _check_server(url: str, *, variable: str) -> Iterator[str]:
    with reach(url, variable=variable) as client:
        about = _about(client)
        kind, version = kind_and_version(about)
        policy = about.get("maxmemory_policy") or _policy(client)
    where = redacted(url)
    if not is_supported(kind, version):
        raise ConfigError(f"{where} is {kind} {version}. {SUPPORTED} ({variable}).")
    if policy.startswith("allkeys-"):
        raise ConfigError(
            f"{where} has maxmemory-policy {policy}: when it is full it would throw waiting jobs "
            "away without a word. Set `maxmemory-policy noeviction` there."
        )
    if not version:
        yield f"{where} does not tell its version. {SUPPORTED}."
    if not policy:
        yield (
            f"{where} does not tell its maxmemory-policy. It must be noeviction: with allkeys-* a "
            "full server throws waiting jobs away without a word."
        )
    if policy.startswith("volatile-"):
        yield (
            f"{where} has maxmemory-policy {policy}: when it is full it throws results away that "
            "nobody has read. Set `maxmemory-policy noeviction` there."
        )


def _about(client: redis.Redis) -> Mapping[str, Any]:
    """Return what INFO says; where it is refused, what little the greeting does."""
    try:
        return client.info()
    except redis.ResponseError:
        greeting = greet(client)
        name = "valkey_version" if greeting.get("server") == "valkey" else "redis_version"
        return {name: greeting.get("version", "")}


def _policy(client: redis.Redis) -> str:
    try:
        return str(client.config_get("maxmemory-policy").get("maxmemory-policy", ""))
    except redis.ResponseError:
        return ""


def kind_and_version(about: Mapping[str, Any]) -> tuple[str, str]:
    """Return which server says ``about`` itself what INFO told, and its version if it told that."""
    for field, kind in _OTHERS.items():
        if field in about:
            return kind, str(about[field])
    version = str(about.get("redis_version", ""))
    # KeyDB has the version of a Redis, and gives itself away at the end.
    if "mvcc_depth" in about or "keydb" in str(about.get("executable", "")):
        return "KeyDB", version
    return str(about.get("server_name", "redis")).capitalize(), version


def is_supported(kind: str, version: str) -> bool:
    """Return whether the scripts are tested on such a server; one that tells no version may be."""
    numbers = tuple(map(int, re.findall(r"\d+", version)))
    tried = _TRIED.get(kind, ())
    return any(numbers[: len(first)] == first for first in tried) or (bool(tried) and not version)
