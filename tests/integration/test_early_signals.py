"""A worker that is told to end before it has begun."""

from __future__ import annotations

import subprocess
import sys

from tests.support.worker import ROOT

_WHILE_A_FINALIZER_RUNS = """
import os, signal, sys
from workers.app import end_at_signals

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        [None for _ in range(100)]

end_at_signals()
Dropped()
sys.exit(9)
"""


def test_a_signal_that_comes_while_a_finalizer_runs_ends_a_worker_that_starts() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WHILE_A_FINALIZER_RUNS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
