"""Commands of the fleet, and Celery's, run as a person would."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.worker import ROOT

#: `fleet`, and `celery` of the worker side, as modules.
FLEET = ("producer.cli",)
CELERY = ("celery", "-A", "workers.app")


def run_command(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments; ``environ`` is added to what the tests have."""
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
