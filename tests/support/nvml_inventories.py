"""Machines with GPUs, written by hand from NVML's documentation: none of them was measured.

Each stands in for the module `pynvml`, with its functions, its errors and its units, so that the
real discovery runs on it. UUIDs and sizes are made up; the profiles and their names are those of
NVIDIA's MIG guide for the B300.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pynvml

GIB: Final = 1 << 30

#: Holds a module `pynvml` that is one of these machines.
_STAND_IN: Final = Path(__file__).parent / "machine"


def environ_of(machine: str, *, driver: str = "") -> dict[str, str]:
    """Return the variables with which a command finds itself on a machine of this module."""
    path = os.pathsep.join([str(_STAND_IN), str(_STAND_IN.parents[2])])
    return {
        "PYTHONPATH": path,
        "TEST_MACHINE": machine,
        **({"TEST_DRIVER": driver} if driver else {}),
    }


@dataclasses.dataclass(slots=True, kw_only=True)
class Device:
    """A GPU or a MIG slice; a field that is an error's class is raised where it is asked for."""

    uuid: Any
    name: str = "NVIDIA B300 SXM6 AC"
    memory: Any = 269 * GIB
    capability: tuple[int, int] = (10, 3)
    #: Raised at every question about the device.
    error: type[Exception] | None = None
    #: (current, pending), or an error: GPUs without MIG do not support the question.
    mig_mode: Any = (0, 0)
    #: One for each place; None where no slice is.
    slices: list[Device | None] = dataclasses.field(default_factory=list)
    parent: Device | None = None

    def answer(self, value: Any) -> Any:
        for problem in (self.error, value):
            if isinstance(problem, type) and issubclass(problem, Exception):
                raise problem
        return value


class Inventory:
    """What discovery calls of `pynvml`, answered by a list of devices."""

    NVML_DEVICE_MIG_ENABLE = pynvml.NVML_DEVICE_MIG_ENABLE

    def __init__(self, *devices: Device, init: type[Exception] | None = None) -> None:
        self.devices, self._init = list(devices), init
        #: A version, or an error.
        self.driver: Any = "580.105.08"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("NVMLError"):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self._init is not None:
            raise self._init

    def nvmlSystemGetDriverVersion(self) -> str:
        if not isinstance(self.driver, str):
            raise self.driver
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13_000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        device = self.devices[index]
        device.answer(None)
        return device

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:
        for device in [*self.devices, *(each for gpu in self.devices for each in gpu.slices)]:
            if device is not None and device.uuid == uuid:
                return device
        raise pynvml.NVMLError_NotFound

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return str(device.answer(device.uuid))

    def nvmlDeviceGetName(self, device: Device) -> str:
        return str(device.answer(device.name))

    def nvmlDeviceGetMigMode(self, device: Device) -> Any:
        return device.answer(device.mig_mode)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return len(device.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        if (part := device.slices[index]) is None:
            raise pynvml.NVMLError_NotFound
        return part

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:
        device.answer(None)
        return device.capability

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:
        total = device.answer(device.memory)
        return types.SimpleNamespace(total=total, used=2 * GIB, free=total - 2 * GIB)

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        # "On MIG-enabled GPUs ... not currently supported."
        if device.parent is not None or device.slices:
            raise pynvml.NVMLError_NotSupported
        device.answer(None)
        return types.SimpleNamespace(gpu=50, memory=10)

    def nvmlDeviceGetPowerUsage(self, device: Device) -> int:
        return self._of_a_whole(device, 612_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Device) -> int:
        return self._of_a_whole(device, 1_100_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Device) -> int:
        return self._of_a_whole(device, 5_000_000)

    def _of_a_whole(self, device: Device, value: int) -> int:
        if device.parent is not None:
            raise pynvml.NVMLError_NotSupported
        device.answer(None)
        return value


def gpu(number: int, **fields: Any) -> Device:
    return Device(uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000", **fields)


def cut(number: int, *profiles: str | None, memory_gib: int = 34) -> Device:
    """Return a GPU in MIG mode with a slice in each place that names a profile."""
    whole = gpu(number, mig_mode=(1, 1))
    whole.slices = [
        Device(
            uuid=f"MIG-{number:08x}-0000-0000-0000-{place:012x}",
            name=f"NVIDIA B300 SXM6 AC MIG {profile}",
            memory=memory_gib * GIB,
            parent=whole,
        )
        if profile is not None
        else None
        for place, profile in enumerate(profiles)
    ]
    return whole


def no_driver() -> Inventory:
    """A machine without NVIDIA's driver, wherever the tests run."""
    return Inventory(init=pynvml.NVMLError_LibraryNotFound)


def eight_b300() -> Inventory:
    return Inventory(*(gpu(number) for number in range(8)))


def seven_slices() -> Inventory:
    return Inventory(cut(0, *["1g.34gb"] * 7))


def mixed() -> Inventory:
    """An old card without MIG, a whole GPU, one with two slices and places for more, one in MIG
    mode without any.
    """
    old = gpu(0, name="Tesla T4", memory=15 * GIB, capability=(7, 5))
    old.mig_mode = pynvml.NVMLError_NotSupported
    empty = cut(3, *[None] * 7)
    return Inventory(old, gpu(1), cut(2, "3g.135gb", None, "3g.135gb", *[None] * 4), empty)


def fallen() -> Inventory:
    """Two GPUs, of which the first has fallen off the bus."""
    return Inventory(gpu(0, error=pynvml.NVMLError_GpuIsLost), gpu(1))


def no_permission() -> Inventory:
    """Two GPUs that this user may not open."""
    return Inventory(*(gpu(number, error=pynvml.NVMLError_NoPermission) for number in range(2)))


def silent() -> Inventory:
    """A GPU that tells its UUID and nothing else."""
    device = gpu(0, memory=pynvml.NVMLError_NoPermission)
    inventory = Inventory(device)

    def not_supported(_: Device) -> Any:
        raise pynvml.NVMLError_NotSupported

    for name in (
        *("Name", "MigMode", "CudaComputeCapability", "UtilizationRates"),
        *("PowerUsage", "EnforcedPowerLimit", "TotalEnergyConsumption"),
    ):
        ask: Callable[[Device], Any] = not_supported
        setattr(inventory, f"nvmlDeviceGet{name}", ask)
    return inventory
