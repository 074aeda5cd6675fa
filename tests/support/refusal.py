"""A worker that must not start: what it says, in one line, and how soon."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.servers import TestServer
from tests.support.worker import ROOT

CELERY: Final = (sys.executable, "-m", "celery", "-A", "workers.app", "worker")
FLEET: Final = (sys.executable, "-m", "producer.cli", "worker")


def refusal(
    command: tuple[str, ...],
    *options: str,
    server: TestServer,
    config: Path,
    url: str = "",
    environ: Mapping[str, str] | None = None,
    within_s: float = 5,
) -> str:
    """Start a worker that must not start; return its one line on standard error."""
    variables = {
        **os.environ,
        "FLEET_BROKER_URL": url or server.url,
        "FLEET_CONFIG": str(config),
        "PYTHONPATH": str(ROOT),
        **(environ or {}),
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*command, *options], env=variables, cwd=ROOT, stdout=out, stderr=err
        )
        try:
            took_s = _end_of(process.pid) - began_s
        finally:
            process.kill()
            status = process.wait()
        output, errors = (os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err))

    assert took_s < within_s
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("fleet: ")
    return line


def _end_of(pid: int) -> float:
    """Wait for the end of a process; returns when that would have been, in monotonic time, had it
    not waited for processors that others used.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended_s = time.monotonic()
    try:
        _, queued_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        # Not Linux: the time counts as it is.
        return ended_s
    return ended_s - int(queued_ns) / 1e9
