"""Where built variants lie, and how they get there: whole or not at all, one build at a time.

    FLEET_CACHE/variants/<model>/
        int8.json             the manifest: which file it is, made of what, how good
        int8-<key>.onnx       the variant; the key is a digest of everything that went into it
        int8-<key>.txt        the manifest's report, to be read
        .lock                 held by the build that runs

A manifest is replaced last, in one step. Until then the variant before it stays in force; what no
manifest points at is removed by the next build. Imports no runtime: workers look here too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

from producer.contract.errors import ConfigError

#: Raised when a manifest of before is no longer one, or the same recipe makes another file.
FORMAT: Final = 1

_CHUNK_BYTES: Final = 1 << 20
_SCRATCH: Final = ".building-"


def cache_folder(config_dir: Path) -> Path:
    """Return where everything lies that is built.

    FLEET_CACHE names it; without it, it is .cache beside models/, so that whoever has the
    configuration has the variants too.
    """
    cache = os.environ.get("FLEET_CACHE", "").strip()
    # Not `Path.resolve`: links that lead in a circle are for whoever writes there to tell.
    return Path(os.path.realpath(cache or config_dir / ".cache"))


def variants_folder(model_folder: Path) -> Path:
    """Return where the variants of the model in ``model_folder`` lie."""
    return cache_folder(model_folder.parent.parent) / "variants" / model_folder.name


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            found.update(chunk)
    return found.hexdigest()


def read_manifest(folder: Path, precision: str) -> dict[str, Any] | None:
    """Return what was written with a variant, ``None`` where there is none that can be read."""
    try:
        manifest = json.loads((folder / f"{precision}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if _is_manifest(manifest) else None


def _is_manifest(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return whether ``value`` holds all that is read of a manifest."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        return False
    source = value.get("source")
    return (
        all(isinstance(value.get(key), str) for key in ("key", "file", "text"))
        and isinstance(value.get("files"), dict)
        and isinstance(source, dict)
        and isinstance(source.get("files"), dict)
    )


def find_variant(model_folder: Path, precision: str, source: Path) -> Path | None:
    """Return the built file of one precision, ``None`` where it was never built.

    ConfigError when it was built from other files than those that are there now, or changed since.
    """
    folder = variants_folder(model_folder)
    manifest = read_manifest(folder, precision)
    if manifest is None:
        return None
    again = f"Build it again: fleet build {model_folder.name} --precision {precision}"
    if not _unchanged(source.parent, manifest["source"]["files"], first=source.name):
        raise ConfigError(
            f"{folder / manifest['file']} was not built from {source} as it is now.", again
        )
    if not _unchanged(folder, manifest["files"], first=manifest["file"]):
        raise ConfigError(f"{folder / manifest['file']} is not as it was built.", again)
    return folder / str(manifest["file"])


def _unchanged(folder: Path, sums: Mapping[str, str], *, first: str) -> bool:
    return first in sums and all(
        (folder / name).is_file() and digest(folder / name) == expected
        for name, expected in sums.items()
    )


@contextlib.contextmanager
def locked(folder: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the only build of this model for the length of the block; ``waiting`` is told once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        # The kernel gives the lock back with the file, also when this process is killed.
        yield


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield a folder for half-made files, on the same disk; it is gone after the block.

    Call it under the lock: what a killed build left behind is removed first.
    """
    _remove_leftovers(folder)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as name:
        yield Path(name)


def publish(
    folder: Path, made: Sequence[Path], *, precision: str, manifest: Mapping[str, Any]
) -> None:
    """Put the files of a variant in place, its manifest last."""
    pointer = made[0].parent / f"{precision}.json"
    pointer.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    try:
        for path in (*made, pointer):
            _to_disk(path)
            path.replace(folder / path.name)
        _to_disk(folder)
    finally:
        _remove_leftovers(folder, but=pointer.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path, *, but: Path | None = None) -> None:
    """Remove what no manifest points at: killed builds, and variants that were replaced."""
    manifests = list(folder.glob("*.json"))
    kept = {".lock"} | {name for path in manifests for name in _belongs(path)}
    for path in folder.iterdir():
        if path.name in kept or path == but:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _belongs(manifest_path: Path) -> set[str]:
    precision = manifest_path.stem
    manifest = read_manifest(manifest_path.parent, precision)
    files = {*manifest["files"], manifest["text"]} if manifest else set()
    return {manifest_path.name} | files
