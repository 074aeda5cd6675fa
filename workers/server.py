"""What a Redis server says of itself, and what of that would harm the fleet.

A managed Redis may keep INFO or CONFIG from us; that alone is no reason not to work.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

import redis

from producer.contract.greeting import SUPPORTED, greet
from workers.finding import Finding, State

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

_NOEVICTION: Final = "Set `maxmemory-policy noeviction` there."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server told; what it kept from us is empty or None."""

    #: Its URL without the password.
    where: str
    kind: str
    version: str
    policy: str
    is_replica: bool
    #: 0: no limit.
    maxmemory_bytes: int | None
    used_bytes: int | None
    append_only: bool | None
    #: When the append-only file is written to disk: always, everysec or no.
    fsync: str
    #: Whether the last write of the append-only file failed.
    cannot_write: bool


def read(client: redis.Redis, where: str, *, thorough: bool = False) -> ServerFacts:
    """Ask a server that was reached; ``thorough`` also asks what a worker needs no right for."""
    about = _about(client)
    kind, version = kind_and_version(about)
    append_only = about.get("aof_enabled")
    return ServerFacts(
        where=where,
        kind=kind,
        version=version,
        policy=str(about.get("maxmemory_policy") or _config(client, "maxmemory-policy")),
        is_replica=about.get("role") == "slave",
        maxmemory_bytes=_whole(about.get("maxmemory")),
        used_bytes=_used_bytes(about),
        append_only=None if append_only is None else bool(append_only),
        fsync=_config(client, "appendfsync") if thorough else "",
        cannot_write=about.get("aof_last_write_status", "ok") != "ok",
    )


def version(facts: ServerFacts, *, check: str, variable: str) -> Finding:
    """Return whether the scripts are tested on such a server."""
    where = facts.where
    if not is_supported(facts.kind, facts.version):
        text = f"{where} is {facts.kind} {facts.version}."
        return Finding(check, State.ERROR, text, f"{SUPPORTED} ({variable}).")
    if not facts.version:
        return Finding(check, State.WARNING, f"{where} does not tell its version.", f"{SUPPORTED}.")
    return Finding(check, State.OK, f"{where} is {facts.kind} {facts.version}.")


def policy(facts: ServerFacts, *, check: str) -> Finding:
    """Return what the server does when it is full."""
    where, said = facts.where, facts.policy
    if said.startswith("allkeys-"):
        text = (
            f"{where} has maxmemory-policy {said}: when it is full it would throw waiting jobs "
            "away without a word."
        )
        return Finding(check, State.ERROR, text, _NOEVICTION)
    if not said:
        text = f"{where} does not tell its maxmemory-policy."
        must = (
            "It must be noeviction: with allkeys-* a full server throws waiting jobs away without "
            "a word."
        )
        return Finding(check, State.WARNING, text, must)
    if said.startswith("volatile-"):
        text = (
            f"{where} has maxmemory-policy {said}: when it is full it throws results away that "
            "nobody has read."
        )
        return Finding(check, State.WARNING, text, _NOEVICTION)
    return Finding(check, State.OK, f"{said}.")


def memory(facts: ServerFacts, *, check: str, watermark: float) -> Finding:
    """Return how full the server is; senders are refused above ``watermark`` of its limit."""
    most, used = facts.maxmemory_bytes, facts.used_bytes
    if most is None or used is None:
        text = "It does not tell how full it is, so that only a full server holds senders back."
        return Finding(check, State.WARNING, text, "Let this user send INFO.")
    if most == 0:
        text = f"{_mib(used)} used, and no maxmemory: nothing holds senders back before it is full."
        do = "Set `maxmemory` there to less than the memory that it may use."
        return Finding(check, State.WARNING, text, do)
    text = f"{_mib(used)} of {_mib(most)} used."
    if used >= watermark * most:
        do = "Start more workers, or give it more: senders get OVERLOADED."
        return Finding(check, State.WARNING, text, do)
    return Finding(check, State.OK, text)


def persistence(facts: ServerFacts, *, check: str) -> Finding:
    """Return what is left when the server dies."""
    keep = "Set `appendonly yes` and `appendfsync everysec` there."
    if facts.is_replica:
        text = f"{facts.where} is a replica, which takes no jobs."
        return Finding(check, State.ERROR, text, "Name its master, or its Sentinels.")
    if facts.append_only is None:
        text = "It does not tell whether it keeps an append-only file."
        return Finding(check, State.WARNING, text, keep)
    if not facts.append_only:
        text = (
            "No append-only file: when it dies, jobs and results since its last snapshot are lost."
        )
        return Finding(check, State.WARNING, text, keep)
    if facts.cannot_write:
        text = "It cannot write its append-only file, and then refuses all writes."
        return Finding(check, State.ERROR, text, "Look at its log, and at the room on its disk.")
    if facts.fsync == "no":
        text = (
            "Its append-only file reaches the disk when the system likes: up to 30 s may be lost."
        )
        return Finding(check, State.WARNING, text, keep)
    when = f", to disk: {facts.fsync}" if facts.fsync else ""
    return Finding(check, State.OK, f"Append-only file{when}.")


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


def _about(client: redis.Redis) -> Mapping[str, Any]:
    """Return what INFO says; where it is refused, what little the greeting does."""
    try:
        return client.info()
    except redis.ResponseError:
        greeting = greet(client)
        name = "valkey_version" if greeting.get("server") == "valkey" else "redis_version"
        return {name: greeting.get("version", "")}


def _config(client: redis.Redis, name: str) -> str:
    try:
        return str(client.config_get(name).get(name, ""))
    except redis.ResponseError:
        return ""


def _used_bytes(about: Mapping[str, Any]) -> int | None:
    """Return what the server counts when it looks whether it is full."""
    used = _whole(about.get("used_memory"))
    return None if used is None else used - (_whole(about.get("mem_not_counted_for_evict")) or 0)


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
