"""`fleet up`: usable from a plain prompt, and nothing is left of it however it ends."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from producer.contract.local_broker import local_broker_url
from workers.up.address import Address

pytestmark = [
    pytest.mark.redis,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="finds its processes in /proc"),
]

_ROOT = Path(__file__).resolve().parents[2]

#: What a clone needs to run.
_PARTS = ("producer", "workers", "configs")

_PROMPT = (
    "import numpy; from producer.tasks import infer\n"
    "x = numpy.zeros((1, 1, 8, 8), 'float32')\n"
    "print(infer.delay('digits', {'image': x}).get(timeout=10))\n"
)
_LATER = (
    "import numpy; from producer.tasks import infer\n"
    "x = {'image': numpy.zeros((1, 1, 8, 8), 'float32')}\n"
    "for _ in range(3): infer.apply_async(('digits', x), countdown=600)\n"
)
_HOW_MANY_LATER = (
    "import redis; from producer.contract.local_broker import local_broker_url\n"
    "client = redis.Redis.from_url(local_broker_url())\n"
    "print(client.zcard('fleet:delayed:fleet.digits'))\n"
)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone in which nobody else runs anything."""
    folder = tmp_path_factory.mktemp("clone")
    for part in _PARTS:
        ignored = shutil.ignore_patterns("__pycache__", ".cache")
        shutil.copytree(_ROOT / part, folder / part, ignore=ignored)
    return folder


@pytest.fixture
def clone(parts: Path) -> Path:
    """Return it as it is before the first `fleet up`."""
    shutil.rmtree(parts / ".fleet", ignore_errors=True)
    return parts


def wait_until(holds: Callable[[], bool], *, what: str, within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.05)


def environ(clone: Path, folder: Path) -> dict[str, str]:
    own = {name: text for name, text in os.environ.items() if not name.startswith("FLEET_")}
    return {**own, "TMPDIR": str(folder), "FLEET_INSTANCES": "1", "PYTHONPATH": str(clone)}


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


def is_server(pid: int) -> bool:
    return b"valkey-server" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_instance(pid: int) -> bool:
    return b"workers.birth" in Path(f"/proc/{pid}/cmdline").read_bytes()


def has_pending(pid: int, signum: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending, 16) >> (signum - 1) & 1)


class Up:
    """One `fleet up` on a terminal of its own."""

    def __init__(self, clone: Path, folder: Path, **more: str) -> None:
        self.clone, self.note = clone, clone / ".fleet" / "broker-url"
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "producer.cli", "up"],
            cwd=clone,
            env={**environ(clone, folder), **more},
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


@contextlib.contextmanager
def running(clone: Path, folder: Path, **more: str) -> Iterator[Up]:
    started = Up(clone, folder, **more)
    try:
        started.wait_ready()
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@pytest.fixture
def up(clone: Path, tmp_path: Path) -> Iterator[Up]:
    with running(clone, tmp_path) as started:
        yield started


def run(up: Up, folder: Path, program: str) -> str:
    """Return what a Python prompt in the clone prints."""
    prompt = subprocess.run(
        [sys.executable, "-c", program],
        cwd=up.clone,
        env=environ(up.clone, folder),
        capture_output=True,
        text=True,
        check=False,
    )
    assert prompt.returncode == 0, prompt.stderr
    return prompt.stdout


def assert_nothing_lives(up: Up) -> None:
    wait_until(lambda: not any(map(lives, up.started)), what="the end of every process", within_s=5)


def assert_nothing_left(up: Up, folder: Path) -> None:
    assert_nothing_lives(up)
    assert not list(folder.iterdir())
    assert local_broker_url(up.note) is None
    # Where the server will be again, and what it knows, which nobody else may.
    assert sorted(each.name for each in up.note.parent.iterdir()) == ["broker-url", "server"]
    assert stat.S_IMODE(up.note.parent.stat().st_mode) == 0o700


def test_a_plain_prompt_in_the_folder_finds_the_broker(up: Up, tmp_path: Path) -> None:
    assert "array(" in run(up, tmp_path, _PROMPT)

    # What it tells an app of another folder to set leads to the same server.
    export = next(line for line in up.said.splitlines() if "export FLEET_BROKER_URL" in line)
    told = subprocess.run(
        ["sh", "-c", f'{export.strip()}; printf %s "$FLEET_BROKER_URL"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == local_broker_url(up.note)
    assert str(urlsplit(told.stdout).password) not in up.said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything(up: Up, tmp_path: Path, signum: signal.Signals) -> None:
    up.process.send_signal(signum)

    assert up.ends() == 0
    assert_nothing_left(up, tmp_path)


def test_ctrl_c_at_the_terminal_ends_everything(up: Up, tmp_path: Path) -> None:
    os.write(up.master, b"\x03")

    assert up.ends() == 0
    assert_nothing_left(up, tmp_path)


def test_the_next_start_has_the_address_and_the_jobs_of_the_last(up: Up, tmp_path: Path) -> None:
    url = str(local_broker_url(up.note))
    run(up, tmp_path, _LATER)
    os.write(up.master, b"\x03")
    assert up.ends() == 0
    assert "3 jobs wait, and are kept for the next start" in up.said
    assert_nothing_left(up, tmp_path)
    assert up.note.read_text() == url

    # From the shell of an app that was given the address.
    with running(up.clone, tmp_path, FLEET_BROKER_URL=url) as again:
        assert local_broker_url(up.note) == url
        assert run(again, tmp_path, _HOW_MANY_LATER).strip() == "3"
        assert "array(" in run(again, tmp_path, _PROMPT)


def test_a_killed_one_that_is_started_again_answers_at_the_same_address(
    up: Up, tmp_path: Path
) -> None:
    url = local_broker_url(up.note)
    run(up, tmp_path, _LATER)
    up.process.kill()
    up.process.wait()

    with running(up.clone, tmp_path) as again:
        assert local_broker_url(up.note) == url
        assert "array(" in run(again, tmp_path, _PROMPT)
        servers = [pid for pid in {*up.started, *again.started} if lives(pid) and is_server(pid)]
        assert len(servers) == 1
        assert run(again, tmp_path, _HOW_MANY_LATER).strip() == "3"
        os.write(again.master, b"\x03")
        assert again.ends() == 0
        assert_nothing_left(again, tmp_path)


def test_a_port_that_another_program_took_is_told(clone: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = int(other.getsockname()[1])
        kept = clone / ".fleet" / "server"
        kept.mkdir(parents=True)
        Address(port=port, password="word").keep_in(kept)

        with running(clone, tmp_path) as up:
            assert urlsplit(str(local_broker_url(up.note))).port not in (port, None)
            assert f"new port: another program has {port}" in up.said


def test_a_second_one_in_the_folder_says_so_and_harms_nothing(up: Up, tmp_path: Path) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "producer.cli", "up"],
        cwd=up.clone,
        env=environ(up.clone, tmp_path),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert second.returncode == 2
    assert (second.stdout, len(second.stderr.splitlines())) == ("", 1)
    assert "already runs" in second.stderr
    assert "array(" in run(up, tmp_path, _PROMPT)


def test_a_terminal_that_goes_away_ends_everything(up: Up, tmp_path: Path) -> None:
    os.close(up.master)

    assert up.process.wait(timeout=30) == 0
    assert_nothing_left(up, tmp_path)


def test_nothing_outlives_a_killed_one(up: Up, tmp_path: Path) -> None:
    up.process.kill()
    up.process.wait()

    assert_nothing_lives(up)
    assert local_broker_url(up.note) is None
    assert not list(tmp_path.iterdir())


def test_a_server_that_ends_is_told_and_ends_the_rest_though_a_batch_still_runs(
    up: Up, tmp_path: Path
) -> None:
    (server,) = filter(is_server, up.started)
    instances = [pid for pid in up.started if is_instance(pid)]
    (worker,) = (pid for pid in up.started if set(instances) & set(below(pid)))
    for pid in (worker, *instances):
        os.kill(pid, signal.SIGSTOP)

    os.kill(server, signal.SIGKILL)
    # All signals that it is sent are there by now: it sees them at once, as a busy one does.
    wait_until(lambda: has_pending(worker, signal.SIGTERM), what="the end of the worker")
    os.kill(worker, signal.SIGCONT)

    # A drain would give the instance 20 s, for answers that nobody can take.
    assert up.ends(within_s=10) == 2
    assert "embedded server ended" in up.said
    assert_nothing_left(up, tmp_path)
