"""`fleet build` on models of a test: in this process, or as a person would run it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.onnx_models import DIGITS
from tests.support.worker import ROOT
from workers.build.variants import Built, build
from workers.models import load_source

Arrays = Mapping[str, npt.NDArray[Any]]


def model_folder(
    config: Path,
    write: Callable[[Path], None],
    *,
    name: str = "my",
    toml: str = "",
    files: Mapping[str, Arrays] | None = None,
) -> Path:
    """Make a model of what ``write`` writes, with .npz ``files`` beside it; return its folder."""
    folder = config / "models" / name
    folder.mkdir(parents=True)
    write(folder / "model.onnx")
    (folder / "model.toml").write_text(f'[engines]\nfp32 = "model.onnx"\n{toml}')
    for file, arrays in (files or {}).items():
        np.savez(folder / file, allow_pickle=True, **arrays)
    return folder


def digits_folder(config: Path) -> Path:
    """Copy the digits into a configuration of a test, without the committed fp16 twin."""
    folder = config / "models" / "digits"
    folder.mkdir(parents=True)
    for name in ("digits.onnx", "calibration.npz", "test.npz"):
        shutil.copy(DIGITS / name, folder)
    lines = (DIGITS / "model.toml").read_text().splitlines(keepends=True)
    (folder / "model.toml").write_text("".join(line for line in lines if "_fp16" not in line))
    return folder


def built(folder: Path, *precisions: str, **options: Any) -> list[Built]:
    """Build in this process; ``options`` replace those of the model's file."""
    spec = load_source(folder)
    spec = dataclasses.replace(spec, build=dataclasses.replace(spec.build, **options))
    return list(build(spec, precisions, threads=1, progress=lambda what, done, total: None))


def start_build(config: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    """Start `fleet build` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "producer.cli", "build", *words],
        cwd=ROOT,
        env={**os.environ, "FLEET_CONFIG": str(config), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a build; return its exit code, standard output and standard error."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def reports(out: str) -> dict[str, dict[str, Any]]:
    """Return what `fleet build --json` printed, by precision."""
    return {entry["precision"]: entry for entry in json.loads(out)}
