"""The embedded server: closed to others, and gone with whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from producer.contract.errors import ConfigError
from producer.contract.settings import Settings, redis_client
from workers import preflight
from workers.embedded import embedded_server
from workers.settings import WorkerSettings

pytestmark = pytest.mark.redis


def wait_until(holds: Callable[[], bool], *, what: str, within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"


def test_it_keeps_a_log_evicts_nothing_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with embedded_server() as server, redis.Redis.from_url(server.url) as client:
        info = client.info()
        assert (info["aof_enabled"], info["maxmemory_policy"]) == (1, "noeviction")
        assert list(tmp_path.iterdir())

    assert server.process.returncode is not None
    assert not list(tmp_path.iterdir())


def test_nobody_gets_in_without_the_password() -> None:
    with embedded_server() as server:
        url = f"redis://127.0.0.1:{urlsplit(server.url).port}/0"
        with redis_client(url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_password_is_in_no_repr() -> None:
    with embedded_server() as server:
        assert str(urlsplit(server.url).password) not in repr(server)


def test_it_dies_with_a_parent_that_is_killed() -> None:
    program = (
        "import time\n"
        "from workers.embedded import embedded_server\n"
        "with embedded_server() as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert lives(pid)
        owner.send_signal(signal.SIGKILL)

    wait_until(lambda: not lives(pid), what="the server's end")


def test_a_server_that_throws_keys_away_is_refused() -> None:
    with embedded_server() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")

        with pytest.raises(ConfigError, match="noeviction"):
            preflight.check(WorkerSettings(), Settings(broker_url=server.url))


def test_a_wrong_password_is_named_without_being_shown() -> None:
    with embedded_server() as server:
        parts = urlsplit(server.url)
        url = f"redis://:wrong@{parts.hostname}:{parts.port}/0"

        with pytest.raises(ConfigError, match="FLEET_BROKER_URL") as caught:
            preflight.check(WorkerSettings(), Settings(broker_url=url))

    assert "password" in str(caught.value)
    assert "wrong" not in str(caught.value).replace("wrong or", "")
