"""How a process that asks nobody gets on: what it is kept from, the machine takes from all."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.support.waiting import wait_until

_ROOT: Final = Path(__file__).resolve().parents[2]

#: How long it rests between two turns.
TURN_S: Final = 0.01

#: Turns, and the longest time in seconds for which it was kept from its next one.
_KEPT: Final = struct.Struct("qd")


class Pace:
    """Takes a turn again and again for the length of the block, in a process of its own: a thread
    would be kept from its turns by whoever holds this interpreter.
    """

    def __enter__(self) -> Pace:
        self._file = tempfile.NamedTemporaryFile()
        self._file.truncate(_KEPT.size)
        self._memory = mmap.mmap(self._file.fileno(), _KEPT.size)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.pace", self._file.name], cwd=_ROOT
        )
        wait_until(lambda: self.turns, what="the first turn")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        # What it counted is still asked for.
        self._file.close()

    @property
    def turns(self) -> int:
        return int(_KEPT.unpack_from(self._memory)[0])

    @property
    def longest_s(self) -> float:
        return float(_KEPT.unpack_from(self._memory)[1])


def _run(name: str) -> None:
    with open(name, "r+b") as file, mmap.mmap(file.fileno(), _KEPT.size) as memory:
        turns, longest_s, last_s, parent = 0, 0.0, time.monotonic(), os.getppid()
        while os.getppid() == parent:
            time.sleep(TURN_S)
            now_s = time.monotonic()
            turns, longest_s = turns + 1, max(longest_s, now_s - last_s - TURN_S)
            last_s = now_s
            _KEPT.pack_into(memory, 0, turns, longest_s)


if __name__ == "__main__":
    _run(sys.argv[1])
