"""The `fleet` command as a person or a program meets it, without any server."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from producer.cli import cli

_WORKER_SIDE = ("demo", "up", "worker")


def fleet(*args: str, **environ: str) -> Result:
    return CliRunner().invoke(cli, args, env=dict(environ), prog_name="fleet")


@pytest.fixture
def nobody() -> str:
    """Return the URL of a port where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"redis://user:secret@127.0.0.1:{probe.getsockname()[1]}/0"


def test_help_teaches_where_to_begin() -> None:
    result = fleet("--help", COLUMNS="80")

    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    for words in (
        "fleet demo",
        "fleet up",
        "FLEET_BROKER_URL",
        "status",
        "models",
        "queue",
        "dead",
    ):
        assert words in result.output


def test_help_waits_for_nothing_that_reads_arrays() -> None:
    script = (
        "import sys; from producer.entry import main; sys.argv[1:] = ['--help']\n"
        "try: main()\n"
        "finally: assert not {'numpy', 'kombu', 'celery'} & set(sys.modules), 'heavy'"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "command",
    [
        *("status", "models", "up", "demo", "queue", "health", "add", "build", "doctor"),
        *("dead", "dead list", "dead show", "dead requeue", "dead purge"),
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    result = fleet(*command.split(), "--help", COLUMNS="80")

    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
    assert "Usage: fleet" in result.output
    assert fleet(*command.split(), "-h", COLUMNS="80").output == result.output


def test_the_worker_explains_itself_and_leaves_nothing_to_celery() -> None:
    # A process of its own: what is not understood here replaces the process by Celery's worker.
    command = [sys.executable, "-m", "producer.entry", "worker"]
    long, short = (
        subprocess.run([*command, option], check=False, capture_output=True, text=True, timeout=20)
        for option in ("--help", "-h")
    )

    assert (long.returncode, short.stdout) == (0, long.stdout)
    assert "each worker needs its own" in long.stdout


def test_a_command_that_ctrl_c_ends_says_nothing_and_exits_as_a_shell_expects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(20)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        command = subprocess.Popen(
            [sys.executable, "-m", "producer.entry", "status"],
            env={**os.environ, "FLEET_BROKER_URL": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with command, silent.accept()[0]:
            command.send_signal(signal.SIGINT)
            said, _ = command.communicate(timeout=20)

    assert (command.returncode, said.strip()) == (130, b"")


@pytest.mark.parametrize(
    "command",
    ["status", "models", "queue", "dead list", "dead requeue --all", "dead purge --all --yes"],
)
def test_no_server_is_one_line_without_the_password(command: str, nobody: str) -> None:
    result = fleet(*command.split(), FLEET_BROKER_URL=nobody)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "FLEET_BROKER_URL" in result.stderr
    assert "secret" not in result.stderr


def test_a_url_of_another_kind_is_one_line() -> None:
    result = fleet("status", FLEET_BROKER_URL="amqp://localhost")

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", _WORKER_SIDE)
def test_without_the_worker_side_its_commands_say_what_to_install(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    result = fleet(command, "--anything")

    assert result.exit_code == 2
    assert "pip install" in result.stderr


def test_a_package_of_an_app_that_is_also_called_workers_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = importlib.util.find_spec("json")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: theirs)

    assert "pip install" in fleet("up").stderr


def test_an_unknown_command_is_refused() -> None:
    assert fleet("no-such-thing").exit_code == 2


@pytest.mark.parametrize(
    "options", [["-P", "gevent"], ["-Psolo"], ["--pool=threads"], ["-c", "2", "--pool", "solo"]]
)
def test_another_pool_is_one_line_before_celery_can_import_it(options: list[str]) -> None:
    result = fleet("worker", *options)

    assert result.exit_code == 2
    assert "cannot hold engines" in result.stderr
    assert result.stderr.count("\n") == 1
