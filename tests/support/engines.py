"""An engine that does what its inputs say, plugged in as ``runtime =
"tests.support.engines:Scripted"``.

A row is ``[what, argument, job number]``. Every start of a numbered row is a line of the log that
``options.log`` names: ``start <job> <pid> <precision> <rows of the batch> <unix seconds>``. The
log, not the results, says how often a job ran. It also has a line when an engine is loaded and when
it is closed: ``load <pid> <precision> <instance> <unix seconds>``, and ``close`` with the same.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from producer.contract.errors import EngineFailed, OutOfMemory
from workers import runner
from workers.engines.base import Engine, EngineRefused
from workers.models import ModelSpec, TensorSpec


class Do(enum.IntEnum):
    """What a row makes the engine do; anything below 10, a probe's values too, is answered."""

    OK = 0
    #: Sleep so many seconds.
    SLEEP = 10
    KILL = 11
    ABORT = 12
    MEMORY_ERROR = 13
    ARRAY_MEMORY_ERROR = 14
    RAISE = 15
    REFUSE = 16
    EXIT = 18
    #: Leave a child behind that holds every pipe open for so many seconds.
    FORK = 19
    #: Answer with so many megabytes; alone in its batch.
    LARGE = 20
    KILL_PARENT = 17
    #: Compute in native code for about so many seconds, deaf to every signal that can be caught.
    SPIN = 21


def row(do: Do = Do.OK, argument: float = 0.0, job: int = 0) -> npt.NDArray[np.float32]:
    """Return the input of a job with one row."""
    return np.array([[do, argument, job]], dtype=np.float32)


class Scripted(Engine):
    """Options: ``log`` (file), ``load_s``, ``batch_s``, ``out_of_memory_above`` (rows by
    precision), ``load_fails_while`` (a file: its text is the error, ``abort`` kills the process),
    ``harmless_while`` (a file: every row is answered, whatever it says), ``held_while`` (a file:
    no batch ends while it is there), ``width``.
    """

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        self._precision = precision
        self._options: dict[str, Any] = dict(spec.options)
        shape = (None, int(self._options.get("width", 3)))
        self.inputs = (TensorSpec(name="x", dtype="float32", shape=shape, batch_axis=0),)
        self.outputs = (TensorSpec(name="y", dtype="float32", shape=shape, batch_axis=0),)
        self.runtime = "scripted"
        self._append(self._here("load"))
        time.sleep(float(self._options.get("load_s", 0)))
        self._fail_while_told()

    def run(self, feeds: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        rows = feeds["x"]
        limits = self._options.get("out_of_memory_above", {})
        if len(rows) > limits.get(self._precision, len(rows)):
            raise OutOfMemory(f"{len(rows)} rows in {self._precision}")
        batch = f"{os.getpid()} {self._precision} {len(rows)} {time.time():.6f}"
        for job in rows[:, 2]:
            if job >= 1:
                self._append(f"start {int(job)} {batch}")
        if (rows[:, 2] >= 1).any():
            time.sleep(float(self._options.get("batch_s", 0)))
            self._hold_while_told()
        if not Path(self._options.get("harmless_while", "/nonexistent")).exists():
            for do, argument in rows[:, :2]:
                _act(int(do), float(argument))
        if rows[0, 0] == Do.LARGE:
            return {"y": np.zeros((1, int(rows[0, 1] * 262_144)), dtype=np.float32)}
        return {"y": rows * 2}

    def close(self) -> None:
        self._append(self._here("close"))

    def _here(self, what: str) -> str:
        where = os.environ.get("FLEET_INSTANCE_KEY", "-")
        return f"{what} {os.getpid()} {self._precision} {where} {time.time():.6f}"

    def _fail_while_told(self) -> None:
        told = Path(self._options.get("load_fails_while", "/nonexistent"))
        if told.exists():
            text = told.read_text()
            if text == "abort":
                os.abort()
            raise EngineFailed(text)

    def _hold_while_told(self) -> None:
        told = Path(self._options.get("held_while", "/nonexistent"))
        while told.exists():
            time.sleep(0.02)

    def _append(self, line: str) -> None:
        if "log" in self._options:
            fd = os.open(self._options["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, f"{line}\n".encode())
            os.close(fd)


class KillsReaders(Scripted):
    """Kills its process while the inputs of a job are read whose row says so, before any run."""

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        super().__init__(spec, precision, threads=threads)
        prepare = vars(runner)["prepare"]

        def prepare_or_die(inputs: Any, *tensors: Any, **options: Any) -> Any:
            if int(np.asarray(inputs["x"])[0, 0]) == Do.KILL:
                self._append(f"read {int(np.asarray(inputs['x'])[0, 2])} {os.getpid()}")
                os.kill(os.getpid(), signal.SIGKILL)
            return prepare(inputs, *tensors, **options)

        vars(runner)["prepare"] = prepare_or_die


def _act(do: int, argument: float) -> None:
    match do:
        case Do.SLEEP:
            time.sleep(argument)
        case Do.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Do.ABORT:
            os.abort()
        case Do.KILL_PARENT:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(5)
        case Do.SPIN:
            hashlib.pbkdf2_hmac("sha256", b"", b"", int(argument * 2_000_000))
        case Do.MEMORY_ERROR:
            raise MemoryError
        case Do.ARRAY_MEMORY_ERROR:
            np.zeros(1 << 60, dtype=np.int8)
        case Do.EXIT:
            raise SystemExit(1)
        case Do.FORK:
            if os.fork() == 0:
                time.sleep(argument)
                os._exit(0)
        case Do.RAISE:
            raise RuntimeError("told to")
        case Do.REFUSE:
            raise EngineRefused("told to refuse", invalid=True)


class Start(NamedTuple):
    """One start of a numbered row."""

    job: int
    pid: int
    #: Rows of the batch it was in.
    rows: int
    at_unix_s: float


def started(log: Path) -> list[Start]:
    """Return every start in the order of the log."""
    lines = (line.split() for line in (log.read_text().splitlines() if log.exists() else []))
    return [
        Start(job=int(words[1]), pid=int(words[2]), rows=int(words[4]), at_unix_s=float(words[5]))
        for words in lines
        if words[0] == "start"
    ]


def starts(log: Path) -> dict[int, int]:
    """Return how often each job was started, from the log."""
    return dict(collections.Counter(start.job for start in started(log)))


def left_unfinished_by(log: Path) -> set[int]:
    """Return the processes that started a job which was started again later."""
    last: dict[int, int] = {}
    found = set()
    for start in started(log):
        if start.job in last:
            found.add(last[start.job])
        last[start.job] = start.pid
    return found


def loads(log: Path) -> list[int]:
    """Return the process of each load, from the log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.startswith("load ")]


def batches(log: Path) -> list[int]:
    """Return the rows of each batch in the order they were started, from the log."""
    seen = {(start.pid, start.at_unix_s): start.rows for start in started(log)}
    return list(seen.values())
