"""The first lines of an instance process: tie its life to its parent's, then load everything else.

Run as ``python -m workers.birth`` by `workers.pool`; the parent says the rest on standard input.
Nothing heavy may be imported here before `die_with_parent` has run.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    Where there is no such call (macOS) the end of standard input does the same a little later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # It died between the start of this process and the call above.
        os._exit(1)


def main() -> None:
    """Become an instance."""
    die_with_parent(int(sys.argv[1]))
    # A terminal sends its signals to the whole process group; only the parent may end an instance.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    from workers.hello import Hello
    from workers.instance import run

    run(Hello(**json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
