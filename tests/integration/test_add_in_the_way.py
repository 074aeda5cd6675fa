"""`fleet add` when somebody interrupts its last moment, and when names are taken twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import onnx
import pytest

from tests import onnx_models
from tests.support.adding import left, refused
from tests.support.worker import ROOT

DIGITS: Final = onnx_models.DIGITS / "digits.onnx"

#: `fleet`, where a real signal comes as soon as a folder was renamed.
INTERRUPTED: Final = """
import pathlib, signal, sys
real, signum = pathlib.Path.rename, int(sys.argv.pop())

def rename(self, target):
    real(self, target)
    signal.raise_signal(signum)
    pathlib.Path.rename = real

pathlib.Path.rename = rename
from producer.cli import main
main()
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("replace", [False, True], ids=["new", "replace"])
def test_an_interrupt_that_comes_too_late_is_told_what_was_added(
    config: Path, replace: bool
) -> None:
    options = ["--replace"] if replace else []
    if replace:
        (config / "models" / "mine").mkdir(parents=True)
    words = ["add", str(DIGITS), "--name", "mine", *options, str(int(signal.SIGINT))]

    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *words],
        env={**os.environ, "FLEET_CONFIG": str(config)},
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"mine: added as {config / 'models' / 'mine'}\n")
    assert "nothing was added" not in ran.stderr
    assert left(config) == ([".mine.before", "mine"] if replace else ["mine"])


def test_weights_that_have_the_name_of_our_file_are_refused(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.onnx"
    onnx_models.linear(file)
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, location="model.toml", size_threshold=0
    )

    said = refused(config, file)

    assert f"{tmp_path / 'model.toml'}: this is the name of the file" in said
    assert "location='weights.bin'" in said
    assert not left(config)


def test_a_model_that_has_the_name_of_our_file_is_refused(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    onnx_models.linear(file)

    assert "location='weights.bin'" in refused(config, file, "--name", "mine")
