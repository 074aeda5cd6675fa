"""The note that a running `fleet up` leaves in its clone, so that a prompt there finds the broker.

The file is locked by the command that wrote it: one that was killed leaves a note that nobody
holds, and such a note counts for nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

from producer.contract.errors import ConfigError

#: In the clone; where the wheel is installed there never is one.
NOTE: Final = Path(__file__).resolve().parents[2] / ".fleet" / "broker-url"

#: A reader holds the lock for an instant; a writer that meets one tries again.
_TRIES: Final = 10


def local_broker_url(note: Path = NOTE) -> str | None:
    """Return the URL of the broker that `fleet up` uses at the moment, if it runs."""
    try:
        with note.open(encoding="utf-8") as file:
            return None if _lock(file, shared=True) else file.read().strip() or None
    except OSError:
        # None there, or another user's: not ours to use either way.
        return None


@contextlib.contextmanager
def noting(note: Path = NOTE) -> Iterator[Callable[..., None]]:
    """Hold the note for the length of the block, and yield what writes the URL into it; ConfigError
    when another `fleet up` holds it.

    A URL that is written as ``lasting`` is the same the next time: its text stays, so that an app
    can be given it at any time, and comes back after a start that fails or uses another.
    """
    with _held(note) as file:
        stays = file.read()

        def write(url: str, *, lasting: bool = False) -> None:
            nonlocal stays
            stays = url if lasting else stays
            _rewrite(file, url)

        try:
            _rewrite(file, "")
            yield write
        finally:
            if stays:
                _rewrite(file, stays)
            else:
                note.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        # Somebody may keep something of his own in there.
        note.parent.rmdir()


def _rewrite(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


def _held(note: Path) -> IO[str]:
    """Return the note, open and locked."""
    file = _opened(note)
    for _ in range(_TRIES):
        if not _lock(file, shared=False):
            time.sleep(0.01)
        elif _is_at(note, file):
            return file
        else:
            # The one before removed it after it was opened here. The next command would find
            # another there, and hold that beside us.
            file.close()
            file = _opened(note)
    file.close()
    raise ConfigError(f"`fleet up` already runs in {note.parent.parent}; end it, or use it.")


def _opened(note: Path) -> IO[str]:
    note.parent.mkdir(mode=0o700, exist_ok=True)
    return os.fdopen(os.open(note, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")


def _is_at(note: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(note.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _lock(file: IO[str], *, shared: bool) -> bool:
    """Return whether the lock was free; it is ours then, until the file is closed."""
    try:
        import fcntl
    except ImportError:
        # An app on Windows: `fleet up` does not run there, so no note is held.
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
