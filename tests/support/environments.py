"""Virtual environments with packages of their own, and the wheel of this project, for tests of what
somebody installs. They skip where pip reaches no packages.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.worker import ROOT

#: What pip says where there is no network, or not this package.
_OUT_OF_REACH: Final = (
    "No matching distribution found",
    "Could not find a version",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Read timed out",
    "Temporary failure in name resolution",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def install(self, *packages: str) -> None:
        """Install from an index; skips the test where pip reaches none."""
        pip(self.python, "install", *packages)

    def run(self, code: str) -> None:
        """Run Python code in it."""
        _run([str(self.python), "-c", code])

    def install_wheel(self, wheel: Path) -> None:
        """Install ``wheel``, whose requirements must be there."""
        _run([str(self.python), "-m", "pip", "install", "--no-index", str(wheel)])


def make_environment(folder: Path) -> Environment:
    """Return a new environment that has pip and nothing else."""
    _run([sys.executable, "-m", "venv", str(folder)])
    return Environment(folder)


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this clone into ``folder`` and return it."""
    pip(Path(sys.executable), "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> Iterator[str]:
    """Yield the top-level names of what a wheel installs, beside what it says of itself."""
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.partition("/")[0] for name in packed.namelist()}
    yield from sorted(top for top in tops if not top.endswith(".dist-info"))


def pip(python: Path, command: str, *arguments: str) -> None:
    """Run pip; skips the test where it reaches no packages."""
    done = _call([str(python), "-m", "pip", command, "--quiet", *arguments])
    if done.returncode and any(each in done.stderr for each in _OUT_OF_REACH):
        pytest.skip(f"pip reaches no {' '.join(arguments)[:80]}")
    assert done.returncode == 0, done.stderr[-3000:]


def _run(command: list[str]) -> None:
    done = _call(command)
    assert done.returncode == 0, done.stderr[-3000:]


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
