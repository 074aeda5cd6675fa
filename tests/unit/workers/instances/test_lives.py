"""Whether it is certain that a process is over: real processes, and what would deceive us."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.lives import being
from tests.support.waiting import wait_until
from workers.instances.lives import is_over, life_of, place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by /proc")

_CLONE = Path(__file__).resolve().parents[4]
_TELL = "import os; from workers.instances.lives import life_of; print(life_of(os.getpid()))"

#: By the name that the machine has for itself.
_SYS_EXIT = {"x86_64": 60, "aarch64": 93}


def test_a_process_lives_until_it_is_gone() -> None:
    with being() as one:
        assert not is_over(one.life)

        one.die()

        assert is_over(one.life)


def test_a_process_that_nobody_has_asked_how_it_ended_is_over() -> None:
    with being() as one:
        one.become_zombie()

        assert is_over(one.life)


def test_a_stopped_process_lives() -> None:
    with being() as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        assert not is_over(one.life)
        os.kill(one.process.pid, signal.SIGCONT)


def test_one_whose_number_another_process_has_is_over_and_that_other_one_is_not() -> None:
    with being() as later:
        where, pid, ticks = later.life.split(":")
        earlier = f"{where}:{pid}:{int(ticks) - 1}"

        assert is_over(earlier)
        assert not is_over(later.life)


@pytest.mark.skipif(platform.machine() not in _SYS_EXIT, reason="no number of exit known here")
def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    program = f"""
        import ctypes, sys, threading
        threading.Thread(target=sys.stdin.read).start()
        ctypes.CDLL(None).syscall({_SYS_EXIT[platform.machine()]}, 0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdin=subprocess.PIPE
    ) as process:
        life = life_of(process.pid)
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: ") Z " in stat.read_text(), what="the end of the first thread")
        try:
            assert not is_over(life)
        finally:
            process.kill()
        wait_until(lambda: is_over(life), what="the end of the other thread")


@pytest.mark.parametrize("life", ["", "-", "x", "0123456789abcdef:1", "::", ":1:1", "f:0:1"])
def test_words_that_say_no_life_are_never_over(life: str) -> None:
    assert not is_over(life)


def test_a_process_of_another_place_is_not_over_whatever_has_its_number_here() -> None:
    with being() as one:
        _, pid, ticks = one.life.split(":")
        one.die()

        assert not is_over(f"{'0' * 16}:{pid}:{ticks}")


def _told_by(*unshare: str) -> str:
    """Return the life of a process in namespaces of its own, as that process tells it."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    told = subprocess.run(
        ["unshare", *unshare, sys.executable, "-c", _TELL],
        env={**os.environ, "PYTHONPATH": str(_CLONE)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare:" in told.stderr:
        pytest.skip(f"no namespaces for us here: {told.stderr.strip()}")
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_a_container_and_its_host_cannot_tell_of_each_other() -> None:
    life = _told_by("--pid", "--fork", "--mount-proc")

    # It is over, and its number in there is one that nobody has here or somebody else has.
    where, pid, _ = life.split(":")
    assert pid == "1"
    assert where != place()
    assert not is_over(life)


def test_a_place_whose_kernel_counts_time_otherwise_is_another_one() -> None:
    where, _, _ = _told_by("--time", "--boottime", "1000", "--fork").split(":")

    assert where != place()


def test_a_place_of_another_host_name_is_another_one() -> None:
    """As of a virtual machine that was resumed from the snapshot that this one was resumed from."""
    rename = ("sh", "-c", 'echo twin > /proc/sys/kernel/hostname && exec "$@"', "sh")
    where, _, _ = _told_by("--uts", *rename).split(":")

    assert where != place()


def test_where_proc_shows_other_processes_than_ours_no_life_is_told() -> None:
    assert _told_by("--pid", "--fork") == ""
