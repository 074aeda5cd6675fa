"""A worker that must not start: what it says, in one line, and how soon."""

from __future__ import annotations

import os
import subprocess
import sys
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
    began_s = time.monotonic()
    ran = subprocess.run(
        [*command, *options],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )

    assert time.monotonic() - began_s < within_s
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("fleet: ")
    return line
