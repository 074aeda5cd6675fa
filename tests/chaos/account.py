"""What happened to each job: who was promised an answer, what was started where, what was read.

Put together from files that clients and engines wrote, not from what the fleet says of itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from tests.chaos.tail import Tail

#: From the start of a job until Redis has its outcome, also while Redis is away.
_LONGEST_RUN_S: Final = 30.0
#: A start is written a little after it was begun.
_CLOCK_S: Final = 1.0

_KINDS: Final = ("accepted", "outcomes", "troubles")


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start of a job in an engine."""

    pid: int
    at_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Doom:
    """An instance that a fault ends, or silences until it is held for dead."""

    pid: int
    at_unix_s: float
    #: It may start jobs until then, as one does that was silenced and begins where it stopped.
    until_unix_s: float = 0.0

    def covers(self, start: Start) -> bool:
        """Whether ``start`` may have no outcome because of this."""
        began_unix_s = self.at_unix_s - _LONGEST_RUN_S
        ended_unix_s = max(self.at_unix_s, self.until_unix_s) + _CLOCK_S
        return start.pid == self.pid and began_unix_s <= start.at_unix_s <= ended_unix_s


@dataclasses.dataclass(slots=True)
class _Pages:
    """The files of one client."""

    tails: dict[str, Tail]
    #: Accepted, and no outcome noted yet.
    open: set[str] = dataclasses.field(default_factory=set)


class Account:
    """One storm's books; `update` takes in what was written since."""

    def __init__(self, folder: Path) -> None:
        #: Job id -> number, once the call that sent it has returned.
        self.accepted: dict[str, int] = {}
        #: Job id -> every answer that was read.
        self.outcomes: dict[str, list[str]] = {}
        #: Number -> its starts in order.
        self.starts: dict[int, list[Start]] = {}
        #: Pid -> its last start.
        self.last_start_unix_s: dict[int, float] = {}
        #: What calls of clients raised: text -> times.
        self.troubles: dict[str, int] = {}
        self._starts = Tail(folder / "starts.log")
        self._clients: dict[str, _Pages] = {}
        self._dead: list[_Pages] = []

    def follow(self, folder: Path, client: str) -> None:
        """Read the files of a client from now on."""
        tails = {kind: Tail(folder / f"{client}.{kind}") for kind in _KINDS}
        self._clients[client] = _Pages(tails)

    def abandoned(self, client: str) -> None:
        """A client is dead: others must look for what it did not read."""
        pages = self._clients.pop(client)
        self._read(pages)
        self._dead.append(pages)

    def orphans(self) -> set[str]:
        """Return the accepted jobs of dead clients whose outcome nobody knows."""
        return {job_id for pages in self._dead for job_id in pages.open}

    def accept(self, job_id: str, number: int) -> None:
        """Note a job of the storm's own."""
        self.accepted[job_id] = number

    def answered(self, job_id: str, text: str) -> None:
        """Note the outcome of a job of the storm's own, or of an orphan."""
        self.outcomes.setdefault(job_id, []).append(text)
        for pages in self._dead:
            pages.open.discard(job_id)

    def update(self) -> None:
        """Take in what was written since."""
        for pages in self._clients.values():
            self._read(pages)
        self.update_starts()

    def update_starts(self) -> None:
        for line in self._starts.lines():
            words = line.split()
            if words[0] == "start":
                start = Start(pid=int(words[2]), at_unix_s=float(words[5]))
                self.starts.setdefault(int(words[1]), []).append(start)
                self.last_start_unix_s[start.pid] = start.at_unix_s

    def missing(self) -> list[str]:
        """Return the accepted jobs without an outcome."""
        return [job_id for job_id in self.accepted if job_id not in self.outcomes]

    def _read(self, pages: _Pages) -> None:
        for line in pages.tails["accepted"].lines():
            number, job_id = line.split()
            self.accepted[job_id] = int(number)
            if job_id not in self.outcomes:
                pages.open.add(job_id)
        for line in pages.tails["outcomes"].lines():
            job_id, text = line.split()
            self.outcomes.setdefault(job_id, []).append(text)
            pages.open.discard(job_id)
        for line in pages.tails["troubles"].lines():
            self.troubles[line] = self.troubles.get(line, 0) + 1
