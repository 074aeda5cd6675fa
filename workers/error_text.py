"""An error as people read it in a log, a status or a reply."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path
from typing import Final

_OURS: Final = Path(__file__).resolve().parent


def one_line(error: BaseException) -> str:
    """Return class and text of ``error``, short enough for one line, and without what a terminal
    would take for an order or could not show: the text may be of anybody's code.
    """
    shown = "".join(letter if letter.isprintable() else " " for letter in str(error))
    return f"{type(error).__name__}: {' '.join(shown.split())[:400]}"


def signal_name(number: int) -> str:
    """Return what people call a signal; those of the real time have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def with_place(error: BaseException, folder: Path) -> str:
    """Return the same with file and line: the last in ``folder``, else where it was raised."""
    told = one_line(error)
    if isinstance(error, SyntaxError):
        # It says so itself.
        return told
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(_OURS)
    ]
    beside = [each for each in frames if Path(each.filename).is_relative_to(folder.absolute())]
    if not frames:
        return told
    last = (beside or frames)[-1]
    return f"{told} ({Path(last.filename).name}, line {last.lineno})"
