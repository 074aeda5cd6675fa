"""Fixtures of the integration tests: what a test leaves in Redis is looked at when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from producer.client import Client
from producer.contract.settings import Settings
from tests.support.ledgers import KEYS, QUEUE
from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import SCRIPTED, config_folder
from workers.delivery import ledger as delivery
from workers.delivery.scripts import send

#: Keys that may live for ever: queues, what is known of the fleet, and kombu's own bindings.
_LASTING = ("fleet:stream:", "fleet:dead:", "fleet:models", "fleet:workers", "_kombu.")


@pytest.fixture(autouse=True)
def no_lasting_keys(server: TestServer) -> Iterator[None]:
    """Fail a test that leaves a key which nothing ever removes."""
    yield
    with server.client() as client:
        found: list[str] = []

        def gone() -> bool:
            found[:] = _lasting(client)
            return not found

        # A result may be read a moment before the record of its job is gone. What was seen counts:
        # at another look something that comes and goes may be there.
        with contextlib.suppress(AssertionError):
            wait_until(gone, what="their end", timeout_s=5)
        assert found == []


def _lasting(client: Any) -> list[str]:
    keys = [key.decode() for key in client.keys("*")]
    return [key for key in keys if client.ttl(key) == -1 and not key.startswith(_LASTING)]


@pytest.fixture
def fleet(server: TestServer, client: redis.Redis) -> Client:
    """Return an app's client of the fleet on the test server."""
    return Client(Settings(broker_url=server.url))


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    """Return a configuration with one model, the scripted engine, which notes its starts."""
    with config_folder({"scripted": {**SCRIPTED, "options": {"log": str(log)}}}) as folder:
        yield folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the file in which the scripted engine notes every start."""
    return tmp_path / "starts.log"


@pytest.fixture
def broker(client: redis.Redis) -> Iterator[redis.Redis]:
    """Return the server with the queue of `tests/support/ledgers.py`."""
    send(client, delivery.ensure_groups(KEYS, [QUEUE]))
    yield client
    # Jobs are left unfinished here on purpose.
    client.flushall()
