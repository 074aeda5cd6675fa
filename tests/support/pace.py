"""How a thread that asks nobody gets on: what it is kept from, the machine takes from all."""

from __future__ import annotations

import threading
import time
from typing import Final

#: How long it rests between two turns.
TURN_S: Final = 0.01


class Pace:
    """Takes a turn again and again for the length of the block."""

    def __init__(self) -> None:
        self.turns = 0
        #: The longest time for which it was kept from its next turn.
        self.longest_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pace", daemon=True)

    def __enter__(self) -> Pace:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._stopping.wait(TURN_S):
            now_s = time.monotonic()
            self.turns += 1
            self.longest_s = max(self.longest_s, now_s - last_s - TURN_S)
            last_s = now_s
