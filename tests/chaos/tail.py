"""A file that other processes append to, read line by line while it grows."""

from __future__ import annotations

from pathlib import Path


class Tail:
    """Gives every whole line of a file once; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        self._offset += len(chunk)
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        return [line.decode() for line in whole]
