"""Which instances this worker may use: those of the host that its settings choose."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from producer.contract.errors import ConfigError
from workers.instances import cpu
from workers.instances.driver import DriverRange
from workers.instances.instance import Instance, Kind
from workers.instances.nvml import Found, NoGpus, Nvml, open_nvml
from workers.settings import WorkerSettings

#: Packages whose engines compute on a GPU.
_GPU_RUNTIMES: Final = ("tensorrt", "onnxruntime-gpu")

#: How people write a CPU slot.
_CPU_SLOT: Final = re.compile(r"cpu/(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The instances that a worker may use, in their order, and what is worth a line."""

    instances: tuple[Instance, ...]
    warnings: tuple[str, ...] = ()
    #: None without GPUs.
    nvml: Nvml | None = None


def discover(settings: WorkerSettings, environ: Mapping[str, str] | None = None) -> Inventory:
    """Look at this machine; GPUs where there are any, else CPU slots.

    ConfigError for a name in ``instances`` that is not here, and for GPUs whose driver is outside
    the range that the settings allow.
    """
    environ = os.environ if environ is None else environ
    try:
        nvml = open_nvml()
    except NoGpus as why:
        return choose(settings, [], warnings=[f"{why} It runs on CPU cores."] if str(why) else [])
    return inventory_of(nvml, settings, environ, has_runtime=has_gpu_runtime())


def inventory_of(
    nvml: Nvml, settings: WorkerSettings, environ: Mapping[str, str], *, has_runtime: bool
) -> Inventory:
    """Return what a worker may use of a machine with NVIDIA's driver; ``has_runtime``: whether an
    engine of ours could compute on its GPUs.
    """
    found = nvml.find(slots_per_gpu=settings.slots_per_gpu)
    only = environ.get("CUDA_VISIBLE_DEVICES")
    gpus, warnings = visible(found, only), list(found.warnings)
    if found.instances and not gpus:
        warnings.append(f"CUDA_VISIBLE_DEVICES is {only!r}: it runs on none of the GPUs here.")
    if gpus and not has_runtime and not isinstance(settings.instances, tuple):
        warnings.append(
            f"{len(gpus)} GPUs or slices are here, and no runtime that computes on them: it runs "
            'on CPU cores. Install the extra "worker-gpu", or name them in `instances`.'
        )
        return choose(settings, [], warnings=warnings)
    inventory = choose(settings, gpus, warnings=warnings)
    if all(each.kind is Kind.CPU for each in inventory.instances):
        return inventory
    if refused := refuse_driver(nvml.driver_version(), settings.driver):
        raise refused
    return dataclasses.replace(inventory, nvml=nvml)


def refuse_driver(version: str, allowed: DriverRange) -> ConfigError | None:
    """Return why no worker may run on the GPUs of a driver of ``version``, if none may."""
    if allowed.allows(version):
        return None
    said = f"is {version}" if version else "does not tell its version"
    return ConfigError(
        f'NVIDIA\'s driver {said}, and fleet.toml allows driver = "{allowed.text}".',
        "Install one of these, or change that line once you have tried the one that is here; "
        "--instances cpu/0 runs on a CPU core.",
    )


def has_gpu_runtime() -> bool:
    """Return whether a runtime for GPUs is installed; none is imported to find out."""
    for name in _GPU_RUNTIMES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return bool(importlib.metadata.version(name))
    return False


def visible(found: Found, only: str | None) -> list[Instance]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lets us use, by UUID or by place on the bus."""
    if only is None:
        return found.instances
    names = [name.strip() for name in only.split(",") if name.strip()]
    return [
        each
        for each in found.instances
        if any(
            name == found.indices.get(each.parent_uuid or each.uuid)
            or (each.uuid.startswith(name) and not name.isdigit())
            for name in names
        )
    ]


def choose(
    settings: WorkerSettings, gpus: Sequence[Instance], *, warnings: Sequence[str] = ()
) -> Inventory:
    """Return the instances that ``settings.instances`` means: a number, names, or 0 for all."""
    chosen = settings.instances
    if isinstance(chosen, tuple):
        return Inventory(instances=_named(chosen, gpus), warnings=tuple(warnings))
    if not gpus:
        slots = cpu.slots(threads=settings.threads, wanted=chosen)
        return Inventory(instances=tuple(cpu.instances(range(slots))), warnings=tuple(warnings))
    if chosen > len(gpus):
        warnings = [*warnings, f"instances is {chosen}: this host has {len(gpus)} and runs them."]
    return Inventory(instances=tuple(gpus[: chosen or None]), warnings=tuple(warnings))


def _named(names: Sequence[str], gpus: Sequence[Instance]) -> tuple[Instance, ...]:
    found: dict[str, Instance] = {}
    for name in names:
        if slot := _CPU_SLOT.fullmatch(name):
            here = cpu.instances([int(slot[1])])
        else:
            here = [each for each in gpus if name in (each.uuid, each.key)]
        if not here:
            known = ", ".join(each.uuid for each in gpus) or "none but CPU slots (cpu/0)"
            raise ConfigError(f"instances names {name}, which is not here. There are: {known}.")
        found |= {each.key: each for each in here}
    return tuple(found.values())
