"""What decides what a plan is: everything that goes into it, and the digest of that."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from workers.engines.cuda import Device
from workers.models import ModelSpec

#: Raised when plans are made in another way of the same facts.
_FORMAT: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One plan to be: of which file, how, with what, and for which device."""

    model: str
    precision: str
    onnx: Path
    #: Everything by its name, fit for JSON; two recipes with the same facts make the same plan.
    facts: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Return the digest of the facts."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Return what its files are called."""
        return f"{self.precision}-{self.key[:16]}"


def recipe(spec: ModelSpec, precision: str, onnx: Path, *, tensorrt: str, device: Device) -> Recipe:
    """Return the recipe of one precision of ``spec``, whose file is ``onnx``."""
    from workers.build.graph import digests

    options = spec.plans
    facts = {
        "format": _FORMAT,
        "tensorrt": tensorrt,
        "device": device.name,
        "compute_capability": device.compute_capability,
        "multiprocessors": device.multiprocessors,
        "memory_gib": round(device.memory_bytes / (1 << 30)),
        "driver": device.driver,
        "precision": precision,
        "onnx": digests(onnx),
        "max_batch_size": spec.max_batch_size,
        "rows": list(options.rows),
        "batch_axes": [dict(spec.batch_axes_in), dict(spec.batch_axes_out)],
        "shapes": {
            name: [list(sizes.least), list(sizes.largest)]
            for name, sizes in spec.shape_ranges.items()
        },
        "probe_shapes": {
            name: list(hint.shape) for name, hint in spec.probe_hints.items() if hint.shape
        },
        "tf32": options.tf32,
        "workspace_bytes": options.workspace_bytes,
        "optimization_level": options.optimization_level,
    }
    return Recipe(model=spec.name, precision=precision, onnx=onnx, facts=facts)


def what_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return in words in which facts two recipes differ."""
    return ", ".join(
        f"{name} was {before.get(name)}, is {now[name]}"
        if isinstance(now[name], str | int | float | bool | None)
        else f"{name} changed"
        for name in now
        if before.get(name) != now[name]
    )
