"""Real files: those of the Python that runs the tests, its library and the library's own tests."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

import numpy as np

#: What magika calls the files of a suffix. Suffixes that are no fair truth (txt, md, xml, h) are
#: left out.
LABELS: Final = {
    ".py": "python",
    ".pyc": "pythonbytecode",
    ".json": "json",
    ".css": "css",
    ".js": "javascript",
    ".html": "html",
    ".c": "c",
    ".csv": "csv",
    ".gz": "gzip",
    ".zip": "zip",
    ".png": "png",
    ".jpg": "jpeg",
    ".gif": "gif",
    ".wav": "wav",
    ".npy": "npy",
    ".pdf": "pdf",
}

#: Files that are smaller say too little.
_SMALLEST_BYTES: Final = 16


def python_files(count: int, *, seed: int) -> list[Path]:
    """Return ``count`` files: as many of each suffix as there are, up to an equal share; then
    more of the frequent ones.
    """
    rng = np.random.default_rng(seed)
    there = _by_suffix()
    waiting = [rng.permutation(len(paths)).tolist() for paths in there]
    picked: list[Path] = []
    while len(picked) < count and any(waiting):
        for paths, numbers in zip(there, waiting, strict=True):
            if numbers and len(picked) < count:
                picked.append(paths[numbers.pop()])
    return picked


def _by_suffix() -> list[list[Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    there = (path for path in sorted(root.rglob("*")) if "site-packages" not in path.parts)
    large = [path for path in there if path.is_file() and path.stat().st_size > _SMALLEST_BYTES]
    return [[path for path in large if path.suffix == suffix] for suffix in LABELS]
