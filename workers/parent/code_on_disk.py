"""The code that a new instance would run, which is not its parent's once a clone was updated."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: The clone or image that this package lies in; an instance finds `workers` there.
ROOT: Final = Path(__file__).resolve().parents[2]

#: What a parent and its instance say to each other, and how the one is started by the other. All
#: else that they share lies in Redis, where workers of two versions agree.
SPOKEN: Final = tuple(
    Path("workers", *parts)
    for parts in (
        ("birth.py",),
        ("hello.py",),
        ("orders.py",),
        ("status.py",),
        ("parent", "process.py"),
    )
)


class CodeOnDisk:
    """What lies there, beside what lay there when this was made."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._spoken, self._all = self._digest(SPOKEN), self._digest(self._files())

    @property
    def speaks_otherwise(self) -> bool:
        """Whether a parent of the code before and an instance of the code now may misunderstand
        each other.
        """
        return self._digest(SPOKEN) != self._spoken

    @property
    def has_changed(self) -> bool:
        """Whether anything of it is not what it was."""
        return self._digest(self._files()) != self._all

    def _files(self) -> Iterable[Path]:
        for package in ("workers", "producer"):
            for kind in ("py", "lua"):
                for path in _below(self._root / package, f"*.{kind}"):
                    yield path.relative_to(self._root)

    def _digest(self, paths: Iterable[Path]) -> bytes:
        """Return what tells these files and their contents from others."""
        digest = hashlib.sha256()
        for path in paths:
            digest.update(f"\n{path}\n".encode())
            try:
                digest.update((self._root / path).read_bytes())
            except OSError:
                # Gone, or moved: that is a change, too.
                continue
        return digest.digest()


def _below(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder in order."""
    try:
        return sorted(folder.rglob(pattern))
    except OSError:
        # A part of it went while it was looked through: that is a change, too.
        return []
