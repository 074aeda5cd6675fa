"""An engine that runs out of memory above so many rows, and is broken by it until it is opened
anew; plugged in as ``runtime = "tests.support.tight_engine:Tight"``.

A row is one number of `Row`. Its log has a line for each load, ``load <pid> <precision>``, each run
that was answered, ``run <pid> <precision> <rows>``, and each that ran out of memory, ``oom ...``;
the runs of one and two rows by which a model is probed are not among them.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from producer.contract.errors import EngineFailed, OutOfMemory
from workers.engines.base import Engine
from workers.models import ModelSpec, TensorSpec


class Row(enum.IntEnum):
    """What a row does to its batch; what a probe sends is below 2."""

    OK = 2
    NEVER_FITS = 10
    NAN_IN_FP16 = 11
    INFINITE_IN_FP16 = 12
    NAN = 13


class Tight(Engine):
    """Options: ``log`` (file), ``fits`` (rows by precision), ``opens`` (how often in
    one process), ``no_row_in_fp32`` (rows of jobs never fit in fp32), ``batch_s``.
    """

    runtime = "tight"
    usable_after_out_of_memory = False
    inputs = (TensorSpec(name="x", dtype="float32", shape=(None, 1), batch_axis=0),)
    outputs = (TensorSpec(name="y", dtype="float32", shape=(None, 1), batch_axis=0),)

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        self._precision = precision
        self._options: dict[str, Any] = dict(spec.options)
        self._broken = False
        mine = [load for load in seen(self._log, "load") if load.pid == os.getpid()]
        if len(mine) >= int(self._options.get("opens", 1000)):
            raise EngineFailed("told to")
        self._note("load")

    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        x = feeds["x"]
        if self._broken:
            raise RuntimeError("an earlier lack of memory broke this engine")
        if self._is_too_much(x):
            self._broken = True
            self._note("oom", len(x))
            raise OutOfMemory(f"{len(x)} rows in {self._precision}")
        if (x >= Row.OK).any():
            self._note("run", len(x))
            time.sleep(float(self._options.get("batch_s", 0)))
        y = x * 2
        y[x == Row.NAN] = np.nan
        if self._precision == "fp16":
            y[x == Row.NAN_IN_FP16] = np.nan
            y[x == Row.INFINITE_IN_FP16] = np.inf
        return {"y": y}

    def close(self) -> None:
        """Nothing is held."""

    @property
    def _log(self) -> Path:
        return Path(self._options.get("log", os.devnull))

    def _is_too_much(self, x: npt.NDArray[Any]) -> bool:
        if self._options.get("no_row_in_fp32") and self._precision == "fp32":
            return bool((x >= Row.OK).any())
        return len(x) > self._options["fits"][self._precision] or bool((x == Row.NEVER_FITS).any())

    def _note(self, what: str, *more: int) -> None:
        fd = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        line = " ".join(map(str, (what, os.getpid(), self._precision, *more)))
        os.write(fd, f"{line}\n".encode())
        os.close(fd)


class Seen(NamedTuple):
    """One line of the log."""

    pid: int
    precision: str
    rows: int = 0


def seen(log: Path, what: str) -> list[Seen]:
    """Return the lines of one kind, in order."""
    lines = (line.split() for line in (log.read_text().splitlines() if log.exists() else []))
    return [
        Seen(int(words[1]), words[2], *map(int, words[3:])) for words in lines if words[0] == what
    ]
