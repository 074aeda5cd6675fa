"""One way to log for the parent and its instances: an event name, then its fields as key=value."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

#: What every record has by itself; the rest came as ``extra``.
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
    "data",
}

#: What redis-py puts before an answer to one of several commands: the command's first arguments.
_COMMAND: Final = re.compile(r"Command # \d+ \(.*\) of pipeline caused error: ", re.DOTALL)
_LONGEST_ERROR: Final = 200


class Fields(logging.Formatter):
    """Appends a record's extra fields to its message."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        fields = " ".join(f"{k}={_shown(v)}" for k, v in vars(record).items() if k not in _OWN)
        head, newline, rest = text.partition("\n")
        return f"{head} {fields}{newline}{rest}" if fields else text


def said(error: Exception) -> str:
    """Return what Redis said, fit for a log: without the command, which may hold a payload."""
    text = f"{type(error).__name__}: {error}"
    return _COMMAND.sub("", text)[:_LONGEST_ERROR]


def configure(level: int | str, *, who: str) -> None:
    """Send the process's records of ``level`` and above to standard error, named ``who``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Fields(f"[%(asctime)s: %(levelname)s/{who}] %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if " " in text else text
