"""What make does in a clone that was copied or moved."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.worker import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def environment_of(clone: Path, *, made_in: Path) -> Path:
    """Make what there is of an environment once everything is installed; return its folder."""
    commands = clone / ".venv" / "bin"
    commands.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, clone / name)
    (commands / "python").touch()
    (commands / "fleet").write_text(f"#!{made_in}/.venv/bin/python\n")
    (commands.parent / "run.stamp").touch()
    return commands.parent


def plan(clone: Path) -> str:
    """Return what `make up` would run."""
    ran = subprocess.run(
        ["make", "--dry-run", "up"], cwd=clone, capture_output=True, text=True, check=True
    )
    return ran.stdout


def test_an_environment_that_was_made_here_is_used(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, made_in=tmp_path)

    assert plan(tmp_path) == ".venv/bin/fleet up\n"
    assert environment.is_dir()


def test_an_environment_that_was_made_elsewhere_is_made_anew(tmp_path: Path) -> None:
    """Its `fleet` would run the code of the folder that it was copied from."""
    environment = environment_of(tmp_path, made_in=tmp_path / "elsewhere")

    said = plan(tmp_path)

    assert ".venv was made in another folder" in said
    steps = [said.index(step) for step in ("rm -rf .venv", "-m venv .venv", "pip install")]
    assert steps == sorted(steps)
    # It was only asked what would be done.
    assert environment.is_dir()


def test_what_needs_no_environment_leaves_one_that_was_made_elsewhere(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, made_in=tmp_path / "elsewhere")

    subprocess.run(["make", "help"], cwd=tmp_path, capture_output=True, check=True)

    assert environment.is_dir()
