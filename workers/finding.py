"""What a look at one thing found: a line, how bad it is, and what to do about it."""

from __future__ import annotations

import dataclasses
import enum


class State(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    #: It works, and something may be lost or slow.
    WARNING = "warning"
    #: No worker can do its job.
    ERROR = "error"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line; `fleet doctor --json` prints these four."""

    #: What was looked at, such as ``driver`` or ``model digits``.
    check: str
    state: State
    text: str
    #: Empty where nothing is to be done.
    do: str = ""

    @property
    def line(self) -> str:
        """Return it as one line that ends with what to do."""
        return f"{self.text} {self.do}".strip()
