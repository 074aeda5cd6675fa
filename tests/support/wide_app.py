"""An app with arrays of 1 MiB, in a process of its own: `python -m tests.support.wide_app WHAT`
prints what came of it as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from kombu.exceptions import OperationalError

from producer.client import Client
from producer.contract.errors import FleetError
from producer.contract.settings import Settings
from producer.tasks import infer
from tests.support.worker import ROOT

MODEL: Final = "wide"
#: 1 MiB of float32.
WIDTH: Final = 262_144
_PATIENCE_S: Final = 60


def _inputs(job: int) -> dict[str, Any]:
    wide = np.full((1, WIDTH), job, dtype=np.float32)
    wide[0, :3] = (0, 0, job)
    return {"x": wide}


def _right(outputs: Mapping[str, Any], job: int) -> bool:
    return bool(outputs["y"].shape == (1, WIDTH) and outputs["y"][0, -1] == 2 * job)


def rounds(count: str) -> dict[str, Any]:
    """Send so many jobs at once and count right answers."""
    began_s = time.monotonic()
    with Client(Settings.from_env()) as fleet:
        jobs = fleet.submit_many(MODEL, map(_inputs, range(1, int(count) + 1)))
        right = [
            _right(job.reply(_PATIENCE_S).outputs, number) for number, job in enumerate(jobs, 1)
        ]
        took_s = time.monotonic() - began_s
    return {"right": sum(right), "took_s": took_s}


def stubborn(count: str) -> dict[str, Any]:
    """Send so many jobs, each until it is taken; nothing but an OperationalError may come."""
    refusals, slowest_s = 0, 0.0
    with Client(Settings.from_env()) as fleet:
        taken = []
        for number in range(1, int(count) + 1):
            while True:
                began_s = time.monotonic()
                try:
                    taken.append(fleet.submit(MODEL, _inputs(number)))
                    break
                except OperationalError:
                    refusals += 1
                finally:
                    slowest_s = max(slowest_s, time.monotonic() - began_s)
            time.sleep(0.1)
        right = [_right(job.reply(_PATIENCE_S).outputs, i) for i, job in enumerate(taken, 1)]
    return {"right": sum(right), "refusals": refusals, "slowest_s": slowest_s}


def sent(count: str) -> dict[str, Any]:
    """Send so many jobs and wait for none."""
    return {"ids": [infer.delay(MODEL, _inputs(i)).id for i in range(1, int(count) + 1)]}


def got(*ids: str) -> dict[str, Any]:
    """Wait for jobs that were sent before."""

    def outcome(number: int, job_id: str) -> object:
        try:
            return _right(infer.AsyncResult(job_id).get(timeout=_PATIENCE_S), number)
        except FleetError as error:
            return error.code

    return {"outcomes": [outcome(i, job_id) for i, job_id in enumerate(ids, 1)]}


def refused() -> dict[str, Any]:
    """Send a job that cannot be sent."""
    try:
        infer.delay(MODEL, _inputs(1))
    except OperationalError as error:
        return {"error": str(error)}
    return {"error": None}


def forked() -> dict[str, Any]:
    """Use the store, fork twice as a prefork worker does, and use it in all three."""

    def asked(job: int) -> bool:
        return _right(infer.delay(MODEL, _inputs(job)).get(timeout=_PATIENCE_S), job)

    before, pids = asked(1), []
    for job in (2, 3):
        pid = os.fork()
        if not pid:
            os._exit(0 if asked(job) else 1)
        pids.append(pid)
    ends = [os.waitpid(pid, 0)[1] for pid in pids]
    return {"right": [before, *(end == 0 for end in ends), asked(4)]}


def start_asking(what: str, *arguments: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start the app with ``environ`` beside its own; `answer_of` reads what it says."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.wide_app", what, *arguments],
        env={**os.environ, **environ},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer_of(asked: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Return what the app said, and all it wrote."""
    try:
        told, wrote = asked.communicate(timeout=150)
    finally:
        asked.kill()
    assert asked.returncode == 0, wrote[-3000:]
    return dict(json.loads(told)), told + wrote


if __name__ == "__main__":
    ask: Callable[..., dict[str, Any]] = globals()[sys.argv[1]]
    print(json.dumps(ask(*sys.argv[2:])))
