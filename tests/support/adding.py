"""`fleet add` as a person would run it, and what it left in the configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.commands import FLEET, run_command
from tests.support.worker import ROOT


def added(config: Path, file: Path, *words: str) -> dict[str, Any]:
    """Add a model that can be added; return what the command says as JSON."""
    ran = run_command(*FLEET, "add", str(file), *words, "--json", FLEET_CONFIG=str(config))
    assert (ran.returncode, ran.stderr) == (0, "")
    return dict(json.loads(ran.stdout))


def refused(config: Path, file: Path, *words: str) -> str:
    """Add a model that cannot be added; return the one line that says why."""
    ran = run_command(*FLEET, "add", str(file), *words, FLEET_CONFIG=str(config))
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("fleet: ")
    return line


def start_add(config: Path, file: Path, *words: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """Start `fleet add` as its script does, in a folder; returns at once."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "producer.cli", "add", str(file), *words],
        cwd=cwd,
        env={**os.environ, "FLEET_CONFIG": str(config), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left(config: Path) -> list[str]:
    """Return what lies in models/, half-made models and all."""
    return sorted(path.name for path in (config / "models").glob("*"))
