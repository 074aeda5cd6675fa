"""Many workers that must not start, each a process of its own, forked from one that has Celery
imported already: what they say is looked at, not what an import costs.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.support.servers import TestServer
from tests.support.worker import ROOT

#: Not the app itself: it reads its settings when it is imported, in each process anew.
_IMPORTED: Final = (
    "celery.bin.celery",
    "celery.apps.worker",
    "workers.loop.answers",
    "workers.pool",
)


def refusals(
    options: Iterable[Sequence[str]], *, server: TestServer, config: Path
) -> dict[tuple[str, ...], str]:
    """Return the one line on standard error of `celery worker` with each of ``options``."""
    asked = [list(each) for each in options]
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        env={
            **os.environ,
            "FLEET_BROKER_URL": server.url,
            "FLEET_CONFIG": str(config),
            "PYTHONPATH": str(ROOT),
        },
        cwd=ROOT,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    found = {}
    for each, (status, out, err, took_s) in zip(asked, json.loads(ran.stdout), strict=True):
        assert (each, status, out) == (each, 2, "")
        assert took_s < 5
        (line,) = err.splitlines()
        assert line.startswith("fleet: ")
        found[tuple(each)] = line
    return found


def _run(options: list[str]) -> tuple[int, str, str, float]:
    """Run the command in a fork; return its exit status, what it wrote, and how long it took."""
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = ["celery", "-A", "workers.app", "worker", *options]
            try:
                runpy.run_module("celery", run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(ended.code if isinstance(ended.code, int) else 1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        took_s = time.monotonic() - began_s
        said = _text(out.fileno()), _text(err.fileno())
        return os.waitstatus_to_exitcode(status), *said, took_s


def _text(fd: int) -> str:
    return os.pread(fd, 1 << 20, 0).decode()


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    print(json.dumps([_run(options) for options in json.load(sys.stdin)]))
