"""`fleet up`: usable from a plain prompt, and nothing is left of it however it ends."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from producer.contract.local_broker import NOTE, local_broker_url

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc"),
]

_CLONE = Path(__file__).resolve().parents[2]

_PROMPT = (
    "import numpy; from producer.tasks import infer\n"
    "x = numpy.zeros((1, 1, 8, 8), 'float32')\n"
    "print(infer.delay('digits', {'image': x}).get(timeout=10))\n"
)


def wait_until(holds: Callable[[], bool], *, what: str, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.05)


def environ(folder: Path, **more: str) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("FLEET_")}
    return {**own, "TMPDIR": str(folder), "FLEET_INSTANCES": "1", **more}


def below(pid: int) -> list[int]:
    """Return the living processes that ``pid`` started, and theirs."""
    children: dict[int, list[int]] = {}
    for proc in Path("/proc").iterdir():
        # Processes come and go while we look.
        with contextlib.suppress(OSError):
            if proc.name.isdigit():
                parent = int((proc / "stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(proc.name))
    found, todo = [], [pid]
    while todo:
        todo += (those := children.get(todo.pop(), []))
        found += those
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


class Up:
    """One `fleet up` on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "up"],
            cwd=_CLONE,
            env=environ(folder),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_own_terminal,  # noqa: PLW1509 - this process has one thread
        )
        os.close(slave)
        self.said = ""
        self.started: list[int] = []

    def wait_ready(self) -> None:
        wait_until(self._ready, what="a ready fleet")
        self.started = below(self.process.pid)
        # A server, a worker and its one instance.
        assert len(self.started) >= 3

    def _ready(self) -> bool:
        self.listen()
        assert self.process.poll() is None, self.said
        return "Ctrl-C" in self.said

    def ends(self, within_s: float = 30) -> int:
        """Return the exit code; reads on meanwhile, or a full terminal would hold it up."""
        wait_until(self._ended, what="the end of `fleet up`", within_s=within_s)
        return self.process.returncode

    def _ended(self) -> bool:
        self.listen()
        return self.process.poll() is not None

    def listen(self) -> None:
        while select.select([self.master], [], [], 0)[0]:
            try:
                self.said += os.read(self.master, 65536).decode()
            except OSError:
                return


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    if local_broker_url():
        pytest.skip("`fleet up` runs in this folder at the moment")
    started = Up(tmp_path)
    try:
        started.wait_ready()
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def assert_nothing_lives(up: Up) -> None:
    wait_until(lambda: not any(map(lives, up.started)), what="the end of every process", within_s=5)


def assert_nothing_left(up: Up, folder: Path) -> None:
    assert_nothing_lives(up)
    assert not list(folder.iterdir())
    assert not NOTE.exists()


def test_a_plain_prompt_in_the_folder_finds_the_broker(up: Up, tmp_path: Path) -> None:
    prompt = subprocess.run(
        [sys.executable, "-c", _PROMPT],
        cwd=_CLONE,
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )

    assert prompt.returncode == 0, prompt.stderr
    assert "array(" in prompt.stdout
    # What it tells an app of another folder to set leads to the same server.
    export = next(line for line in up.said.splitlines() if "export FLEET_BROKER_URL" in line)
    told = subprocess.run(
        ["sh", "-c", f'{export.strip()}; printf %s "$FLEET_BROKER_URL"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == local_broker_url()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(up: Up, tmp_path: Path, signum: signal.Signals) -> None:
    up.process.send_signal(signum)

    assert up.ends() == 0
    assert_nothing_left(up, tmp_path)


def test_ctrl_c_at_the_terminal_ends_everything(up: Up, tmp_path: Path) -> None:
    os.write(up.master, b"\x03")

    assert up.ends() == 0
    assert_nothing_left(up, tmp_path)


def test_jobs_that_end_with_the_server_are_counted(up: Up, tmp_path: Path) -> None:
    send = (
        "import numpy; from producer.tasks import infer\n"
        "x = {'image': numpy.zeros((1, 1, 8, 8), 'float32')}\n"
        "for _ in range(3): infer.apply_async(('digits', x), countdown=600)\n"
    )
    subprocess.run([sys.executable, "-c", send], cwd=_CLONE, env=environ(tmp_path), check=True)

    os.write(up.master, b"\x03")

    assert up.ends() == 0
    assert "3 jobs that wait end with this server" in up.said
    assert_nothing_left(up, tmp_path)


def test_a_terminal_that_goes_away_ends_everything(up: Up, tmp_path: Path) -> None:
    os.close(up.master)

    assert up.process.wait(timeout=30) == 0
    assert_nothing_left(up, tmp_path)


def test_no_process_outlives_a_killed_one(up: Up) -> None:
    up.process.kill()
    up.process.wait()

    assert_nothing_lives(up)
    assert local_broker_url() is None


def test_a_server_that_ends_is_told_and_ends_the_rest(up: Up, tmp_path: Path) -> None:
    for pid in up.started:
        if b"valkey-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)

    assert up.ends(within_s=60) == 2
    assert "embedded server ended" in up.said
    assert_nothing_left(up, tmp_path)
