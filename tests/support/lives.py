"""Processes that a test lets live and die, where it needs nothing of them but their lives."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Final

from tests.support.waiting import wait_until
from workers.instances.lives import life_of

_FOR_LONG: Final = ("sleep", "600")


class Being:
    """A process that only lives."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(_FOR_LONG)
        self.life = life_of(self.process.pid)

    def die(self) -> None:
        """Be killed, and gone."""
        self.process.kill()
        self.process.wait(10)

    def become_zombie(self) -> None:
        """Be killed, and wait for a parent to ask."""
        self.process.kill()
        wait_until(self._is_zombie, what="a zombie")

    def _is_zombie(self) -> bool:
        with open(f"/proc/{self.process.pid}/stat") as stat:
            return stat.read().rpartition(") ")[2].startswith("Z")


@contextlib.contextmanager
def being() -> Iterator[Being]:
    """Let a process live, at most for the length of the block."""
    made = Being()
    try:
        yield made
    finally:
        made.die()
