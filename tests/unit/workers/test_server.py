"""Which servers carry jobs and keep them, by what they say of themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from workers import server
from workers.finding import State
from workers.server import ServerFacts, is_supported, kind_and_version


@pytest.mark.parametrize(
    ("about", "kind", "version"),
    [
        ({"redis_version": "7.0.15", "executable": "/usr/bin/redis-server"}, "Redis", "7.0.15"),
        (
            {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2"},
            "Valkey",
            "9.1.2",
        ),
        ({"redis_version": "7.2.4", "server_name": "valkey"}, "Valkey", "7.2.4"),
        ({"redis_version": "7.4.0", "dragonfly_version": "df-v1.40.1"}, "Dragonfly", "df-v1.40.1"),
        ({"redis_version": "6.3.4", "mvcc_depth": 0}, "KeyDB", "6.3.4"),
        ({"redis_version": "6.2.1", "executable": "/opt/keydb-server"}, "KeyDB", "6.2.1"),
        ({"redis_version": "7.4.3", "garnet_version": "1.0.84"}, "Garnet", "1.0.84"),
        ({"redis_version": "7.0.0", "kvrocks_version": "2.11"}, "Kvrocks", "2.11"),
        ({"maxmemory_policy": "noeviction"}, "Redis", ""),
    ],
)
def test_a_server_is_named_by_what_it_is_and_not_by_what_it_imitates(
    about: dict[str, Any], kind: str, version: str
) -> None:
    assert kind_and_version(about) == (kind, version)


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(("Redis", version) for version in ("6.2.0", "6.2.14", "7.0.15", "7.4.2", "8.0.2")),
        *(("Redis", version) for version in ("8.10.1", "8.0-rc1", "")),
        *(("Valkey", version) for version in ("8.0.0", "8.1.1", "9.1.2")),
    ],
)
def test_what_the_scripts_are_tested_on_is_supported(kind: str, version: str) -> None:
    assert is_supported(kind, version)


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        *(("Redis", version) for version in ("2.8.4", "5.0.14", "6.0.16", "9.0.0", "255.255.255")),
        *(("Valkey", version) for version in ("7.2.5", "10.0.0", "255.255.255")),
        ("Dragonfly", "df-v1.40.1"),
        ("KeyDB", "6.2.1"),
        ("KeyDB", ""),
        ("Somebody's", "7.0.0"),
    ],
)
def test_what_nobody_has_tried_is_not(kind: str, version: str) -> None:
    assert not is_supported(kind, version)


FIT = ServerFacts(
    where="redis://here",
    kind="Redis",
    version="8.0.2",
    policy="noeviction",
    is_replica=False,
    maxmemory_bytes=1000,
    used_bytes=100,
    append_only=True,
    fsync="everysec",
    cannot_write=False,
)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, State.OK),
        ({"used_bytes": 899}, State.OK),
        ({"used_bytes": 900}, State.WARNING),
        ({"maxmemory_bytes": 0}, State.WARNING),
        ({"maxmemory_bytes": None}, State.WARNING),
    ],
)
def test_a_server_without_a_limit_or_near_it_is_a_warning(
    facts: dict[str, Any], state: State
) -> None:
    found = server.memory(dataclasses.replace(FIT, **facts), check="memory", watermark=0.9)

    assert found.state is state


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({}, State.OK),
        ({"fsync": "always"}, State.OK),
        ({"fsync": ""}, State.OK),
        ({"fsync": "no"}, State.WARNING),
        ({"append_only": False}, State.WARNING),
        ({"append_only": None}, State.WARNING),
        ({"cannot_write": True}, State.ERROR),
        ({"is_replica": True}, State.ERROR),
    ],
)
def test_what_a_dead_server_would_lose_is_said(facts: dict[str, Any], state: State) -> None:
    found = server.persistence(dataclasses.replace(FIT, **facts), check="persistence")

    assert found.state is state
