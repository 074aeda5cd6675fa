"""An error as people read it in a log, a status or a reply."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

_OURS: Final = Path(__file__).resolve().parent


def one_line(error: BaseException) -> str:
    """Return class and text of ``error``, short enough for one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


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
