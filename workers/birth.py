"""The first lines of an instance process: tie its life to its parent's, then load everything else.

Run as ``python -m workers.birth`` by `workers.pool`; the parent says the rest on standard input.
Nothing heavy may be imported here before `die_with_parent` has run.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

#: Thousandths of the memory there is, by which an instance counts as larger than it is.
_SOONER = 300


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Where there is no such call (macOS) the end of standard input does the same a little later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # It died between the start of this process and the call above.
        os._exit(1)


def be_ended_before_parent() -> None:
    """Have the kernel, where it runs out of memory, end this process rather than its parent.

    The parent gives back the jobs of an instance that died; nobody so near does that for it.
    """
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            score = min(1000, int(file.read()) + _SOONER)
            file.seek(0)
            file.write(str(score))
    except OSError:
        # Not Linux, or nobody may say so here: the kernel chooses by size alone.
        pass


def main() -> None:
    """Become an instance."""
    die_with_parent(int(sys.argv[1]))
    be_ended_before_parent()
    # A terminal sends its signals to the whole process group; only the parent may end an instance.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    from workers.hello import Hello
    from workers.instances import clock

    hello = Hello.read(sys.stdin.readline())
    if clock.now_s() > hello.lease.until_s:
        # The parent stood still since it looked: its instance may be another's by now.
        os._exit(os.EX_TEMPFAIL)

    from workers.instance import run

    run(hello)


if __name__ == "__main__":
    main()
