"""Where plans lie, and which of them may be loaded: those that we wrote, unchanged.

    FLEET_CACHE/plans/<model>/
        fp16-<key>.json       what it was made of, for which device, and its SHA-256
        fp16-<key>.plan       the plan; loading one is running its code
        timing-<device>.cache what TensorRT measured on this kind of device
        .lock                 held by the process that builds

The JSON file is written last, in one step: what it does not name is never opened. Plans of other
devices and versions lie beside each other; the folder may be deleted at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.contract.errors import ConfigError
from workers.build.store import variants_folder
from workers.plans.recipe import Recipe, what_changed


def plans_folder(model_folder: Path) -> Path:
    """Return where the plans of the model in ``model_folder`` lie."""
    cache = variants_folder(model_folder).parent.parent
    return cache / "plans" / model_folder.name


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """There is no plan to load, and why."""

    why: str


def load_plan(folder: Path, wanted: Recipe) -> bytes | Missing:
    """Return the plan that was made by ``wanted``, exactly as it was written."""
    said = _read_json(folder / f"{wanted.name}.json")
    if said is None or said.get("facts") != wanted.facts:
        return Missing(_why_none(folder, wanted))
    path = folder / f"{wanted.name}.plan"
    try:
        plan = path.read_bytes()
    except OSError as error:
        return Missing(f"{path} cannot be read: {error.strerror}")
    if hashlib.sha256(plan).hexdigest() != said.get("sha256"):
        return Missing(f"{path} is not as it was written")
    return plan


def publish(folder: Path, made: Recipe, plan: bytes, *, build_s: float) -> Path:
    """Put a plan in place, whole or not at all; ConfigError where the disk does not take it."""
    path = folder / f"{made.name}.plan"
    said = {
        "model": made.model,
        "file": path.name,
        "sha256": hashlib.sha256(plan).hexdigest(),
        "bytes": len(plan),
        "build_s": round(build_s, 1),
        "facts": dict(made.facts),
    }
    write_whole(path, plan)
    write_whole(path.with_suffix(".json"), json.dumps(said, indent=2).encode() + b"\n")
    return path


def read_timing_cache(folder: Path, made: Recipe) -> bytes:
    """Return what was measured before on this kind of device; empty where nothing was."""
    try:
        return _timing_cache(folder, made).read_bytes()
    except OSError:
        return b""


def write_timing_cache(folder: Path, made: Recipe, measured: bytes) -> None:
    write_whole(_timing_cache(folder, made), measured)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, also after a loss of power."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".half-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; no plan was changed. Free some space, or set FLEET_CACHE "
            "to a folder elsewhere."
        ) from error


def remove_leftovers(folder: Path) -> None:
    """Remove what killed builds left half-written. Call it under the lock."""
    for path in folder.glob(".half-*"):
        path.unlink(missing_ok=True)


def _timing_cache(folder: Path, made: Recipe) -> Path:
    facts = made.facts
    names = ("tensorrt", "device", "compute_capability", "multiprocessors", "driver")
    device = json.dumps([facts[name] for name in names])
    return folder / f"timing-{hashlib.sha256(device.encode()).hexdigest()[:16]}.cache"


def _why_none(folder: Path, wanted: Recipe) -> str:
    """Return why there is no such plan: how the nearest that is there differs."""
    others = [
        said["facts"]
        for path in folder.glob(f"{wanted.precision}-*.json")
        if (said := _read_json(path)) is not None and isinstance(said.get("facts"), dict)
    ]
    if not others:
        return f"no plan of {wanted.precision} was built for {wanted.facts['device']}"
    changes = [what_changed(facts, wanted.facts) for facts in others]
    return f"the plan of {wanted.precision} that is there does not fit: {min(changes, key=len)}"


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) else None
