"""Fixtures that every test may use: one real server, empty at the start of each test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import hypothesis
import kombu.pools
import pytest
import redis

from tests.support.servers import TestServer, binaries, running_server

# What a developer has set for a fleet of their own must not reach the tests.
for name in [name for name in os.environ if name.startswith("FLEET_")]:
    del os.environ[name]

# Nor what the `make` that runs the tests says to those that tests run.
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
    os.environ.pop(name, None)

# A thousand processes are started here. Where nobody may keep bytecode, as images like to have it,
# each would compile every module anew, for half of the time that it takes to start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where the tests run in a script's background SIGINT is ignored, under nohup SIGHUP, and so they
# would be in every process that is started here; now those start with the usual meaning.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that takes long says that the machine is busy, not that the code is wrong.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Set before anything imports the runtime, as the product's engine does.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of the scripts on every server that is here."""
    marked = metafunc.definition.get_closest_marker("scripts")
    if marked and "server" in metafunc.fixturenames:
        servers = [
            pytest.param(
                binary, id=name, marks=() if binary else pytest.mark.skip(f"no {name} server here")
            )
            for name, binary in binaries().items()
        ]
        metafunc.parametrize("server", servers, indirect=True, scope="session")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Let go of what exceptions among a test's parameters were raised through.

    Parameters last as long as the run, and their tracebacks would keep clients and connections.
    """
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec else ():
        if isinstance(value, BaseException):
            value.__traceback__ = value.__cause__ = value.__context__ = None


@pytest.fixture(scope="module", autouse=True)
def connections_of_its_own() -> None:
    """Let no file use connections that the tests of another have cut.

    kombu keeps them for all apps of a process, by URL.
    """
    kombu.pools.reset()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[TestServer]:
    with running_server(binary=getattr(request, "param", None)) as running:
        yield running


@pytest.fixture
def client(server: TestServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        yield client
