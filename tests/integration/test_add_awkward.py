"""`fleet add` on files that would keep it, or a person, waiting.

What it says of other awkward models is in tests/unit/workers/adding/test_awkward_models.py.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.parser
import pytest

from tests.support.adding import refused
from tests.support.waiting import wait_until
from tests.support.worker import ROOT

#: Hours of it.
SLOW = """
    <ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) {
        many = Constant<value_int = 10000000000>()
        one = Constant<value_int = 1>()
        go = Cast<to = 9>(one)
        y = Loop(many, go, x) <
            body = b (int64 i, bool before, float[n, 4] v) => (bool after, float[n, 4] w) {
                after = Identity(before)
                w = Tanh(v)
            }
        >
    }
"""


def test_a_model_that_takes_longer_than_a_batch_may_is_refused_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "fleet.toml").write_text("batch_timeout_s = 2\n", encoding="utf-8")
    onnx.save(onnx.parser.parse_model(SLOW), tmp_path / "slow.onnx")

    line = refused(config, tmp_path / "slow.onnx")

    assert "took more than 2 s" in line
    assert "batch_timeout_s in fleet.toml" in line
    assert [path.name for path in config.iterdir()] == ["fleet.toml"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Return both ends of a terminal."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    yield master, slave
    os.close(master)
    os.close(slave)


def test_what_a_slow_model_is_at_is_shown_until_ctrl_c(
    tmp_path: Path, terminal: tuple[int, int]
) -> None:
    master, slave = terminal
    config = tmp_path / "config"
    config.mkdir()
    onnx.save(onnx.parser.parse_model(SLOW), tmp_path / "slow.onnx")
    said = b""

    def has_said(*words: bytes) -> bool:
        nonlocal said
        try:
            said += os.read(master, 65_536)
        except BlockingIOError:
            return False
        return all(word in said for word in words)

    command = subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "add", str(tmp_path / "slow.onnx")],
        cwd=ROOT,
        env={**os.environ, "FLEET_CONFIG": str(config), "TERM": "xterm", "COLUMNS": "100"},
        stdout=slave,
        stderr=slave,
    )
    with command:
        wait_until(
            lambda: has_said(b"slow.onnx: running it with one row and with two, ", b"1 s of at"),
            what="what it is at",
        )
        command.send_signal(signal.SIGINT)
        wait_until(lambda: command.poll() is not None, what="its end")
    has_said()

    assert command.returncode == 130
    assert b"s of at most 300 s" in said
    assert b"interrupted; nothing was added" in said
    assert b"Traceback" not in said
    assert list(config.iterdir()) == []
