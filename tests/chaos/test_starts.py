"""A worker that is told to end while it starts: at whatever moment, it ends as a healthy one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.servers import TestServer
from tests.support.waiting import wait_until
from tests.support.worker import ROOT, SCRIPTED, config_folder

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

#: Through the first second of the start and beyond; a busy machine starts slowly.
DELAYS_S: Final = (*(n / 10 for n in range(16)), 2.0, 2.5, 3.0)
FLEET: Final = (sys.executable, "-m", "producer.entry", "worker")


@pytest.fixture
def config(log: Path) -> Iterator[Path]:
    options = {"log": str(log), "load_s": 1}
    with config_folder({"scripted": {**SCRIPTED, "options": options}}) as folder:
        yield folder


def runs(pid: int) -> bool:
    """Return whether the process is at the entry point: SIGTERM would not end it at once."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))]
    return any(mask >> (signal.SIGTERM - 1) & 1 for mask in masks)


class Starts:
    """Starts workers and tells each to end after another delay."""

    def __init__(self, broker: TestServer, config: Path) -> None:
        self._environ = {
            **os.environ,
            "FLEET_BROKER_URL": broker.url,
            "FLEET_CONFIG": str(config),
            "FLEET_INSTANCES": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.bare_s: list[float] = []
        self.ended: list[tuple[float, int, str, float]] = []

    def start(self, delay_s: float, how: signal.Signals) -> None:
        """Start one; ``delay_s`` counts from the moment the entry point runs."""
        with subprocess.Popen(
            FLEET, env=self._environ, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as worker:
            began_s = time.monotonic()
            wait_until(lambda: runs(worker.pid), what="the entry point", every_s=0.001)
            self.bare_s.append(time.monotonic() - began_s)
            time.sleep(delay_s)
            worker.send_signal(how)
            began_s = time.monotonic()
            _, errors = worker.communicate(timeout=60)
            took_s = time.monotonic() - began_s
            self.ended.append((delay_s, worker.returncode, errors.decode(), took_s))

    def assert_in_order(self) -> None:
        slowest_s = max(took_s for *_, took_s in self.ended)
        print(f"{len(self.ended)} ends, the slowest took {slowest_s:.2f} s")
        print(f"the interpreter took up to {max(self.bare_s):.3f} s before the entry point ran")
        strange = [end for end in self.ended if end[1] != 0 or "Traceback" in end[2]]
        assert strange == []
        assert slowest_s < 10


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_first_seconds_ends_it_with_exit_0(
    broker: TestServer, config: Path, how: signal.Signals
) -> None:
    starts = Starts(broker, config)

    for delay_s in DELAYS_S:
        starts.start(delay_s, how)

    starts.assert_in_order()


def test_behind_the_images_entry_point_no_moment_is_too_early(
    broker: TestServer, config: Path
) -> None:
    starts = Starts(broker, config)
    # The image's entry point blocks the signal before the interpreter starts; a mask is inherited.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        for delay_s in DELAYS_S[::2]:
            starts.start(delay_s, signal.SIGTERM)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    assert max(starts.bare_s) < 0.1
    starts.assert_in_order()
