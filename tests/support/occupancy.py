"""Who lived on which instance, seen from the lines that the processes write and from the kernel."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.support.worker import alive

_LOOK_EVERY_S: Final = 0.02


@dataclasses.dataclass(slots=True, kw_only=True)
class Stay:
    """One process on one instance."""

    pid: int
    instance: str
    #: As the process itself wrote it.
    began_unix_s: float
    #: Until when it has been seen to live.
    lived_unix_s: float = 0.0
    ended: bool = False


class Occupancy:
    """Follows the log of `tests.support.engines` for the length of the block.

    A process is on its instance from its own first line until it is gone: whether it lives is
    looked at many times a second, so that also one that is killed has an end. It lived until the
    last look that saw it: where this machine stands still, the look that misses it comes too late.
    """

    def __init__(self, log: Path) -> None:
        self._log, self._read = log, 0
        self.stays: list[Stay] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="occupancy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stopping.set()
        self._thread.join(timeout=10)

    def overlaps(self) -> list[tuple[Stay, Stay]]:
        """Return every process that began on an instance before the one before it had ended."""
        found = []
        for instance in {stay.instance for stay in self.stays}:
            stays = [stay for stay in self.stays if stay.instance == instance]
            stays.sort(key=lambda stay: stay.began_unix_s)
            for i, later in enumerate(stays):
                found += [
                    (earlier, later)
                    for earlier in stays[:i]
                    if earlier.lived_unix_s > later.began_unix_s
                ]
        return found

    def instances(self) -> set[str]:
        """Return the instances that any process was on."""
        return {stay.instance for stay in self.stays}

    def _watch(self) -> None:
        while not self._stopping.wait(_LOOK_EVERY_S):
            known = {stay.pid for stay in self.stays}
            new = [stay for stay in self._new() if stay.pid not in known]
            for stay in (*self.stays, *new):
                at_unix_s = time.time()
                stay.ended = stay.ended or not alive(stay.pid)
                stay.lived_unix_s = stay.lived_unix_s if stay.ended else at_unix_s
            self.stays += new

    def _new(self) -> Iterator[Stay]:
        text = self._log.read_text() if self._log.exists() else ""
        whole = text.rpartition("\n")[0]
        lines, self._read = whole[self._read :].splitlines(), len(whole)
        seen = set[int]()
        for line in lines:
            if line.startswith("load "):
                _, pid, _, instance, at_unix_s = line.split()
                if int(pid) not in seen:
                    seen.add(int(pid))
                    yield Stay(pid=int(pid), instance=instance, began_unix_s=float(at_unix_s))
