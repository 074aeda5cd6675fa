"""An error as people read it in a log, a status or a reply."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return class and text of ``error``, short enough for one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
