"""Fixtures of the chaos tests: servers of their own for each, because they kill them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import TestServer, running_server


@pytest.fixture
def broker() -> Iterator[TestServer]:
    with running_server() as server:
        yield server


@pytest.fixture
def results() -> Iterator[TestServer]:
    """A second server, for a fleet whose results are not where its jobs are."""
    with running_server() as server:
        yield server


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "starts.log"
