"""What NVIDIA's management library says of the GPUs of this machine and their MIG slices.

It opens no CUDA context, so the parent may ask it. Whatever a GPU, a driver or a right does not
allow to be read is None; that alone is no reason not to compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from workers.instances.instance import Instance, Kind

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Errors that say themselves that the device is gone, by NVML's names.
_GONE: Final = ("GpuIsLost", "NotFound", "ResetRequired")


class NoGpus(Exception):
    """NVML cannot be asked; the text says why, and is empty where there is simply no driver."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The instances of a machine's GPUs, and what is worth a line to its user."""

    instances: list[Instance]
    #: The place of each GPU in NVML's order, that of the PCI bus, by UUID.
    indices: dict[str, str]
    warnings: list[str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a device says of itself at one moment; of a MIG slice, power is its whole GPU's."""

    memory_total_bytes: int | None
    memory_used_bytes: int | None
    #: Share of the last moments in which anything ran, 0 to 1; a MIG slice cannot say.
    busy: float | None
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None


class Nvml:
    """NVML, initialized. ``raw`` is the module `pynvml`, or what has the functions used here."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        try:
            raw.nvmlInit()
        except (raw.NVMLError_LibraryNotFound, raw.NVMLError_DriverNotLoaded):
            raise NoGpus("") from None
        except raw.NVMLError as error:
            raise NoGpus(f"NVIDIA's driver cannot be asked for GPUs: {error}.") from error

    # -- of the machine

    def driver_version(self) -> str:
        """Return the driver's version, such as ``580.82.07``; empty where it does not tell."""
        return str(self._maybe(self._raw.nvmlSystemGetDriverVersion) or "")

    def cuda_version(self) -> str:
        """Return the newest CUDA that the driver knows, such as ``13.0``; empty as above."""
        number = self._maybe(self._raw.nvmlSystemGetCudaDriverVersion_v2) or 0
        return f"{number // 1000}.{number % 1000 // 10}" if number else ""

    def find(self, *, slots_per_gpu: int = 1) -> Found:
        """Return every GPU, or in place of one that is cut into MIG slices these."""
        found = Found(instances=[], indices={}, warnings=[])
        count = self._maybe(self._raw.nvmlDeviceGetCount)
        if count is None:
            found.warnings.append("NVIDIA's driver does not tell how many GPUs there are.")
        for index in range(count or 0):
            try:
                devices = list(self._devices(index, found))
            except self._raw.NVMLError as error:
                found.warnings.append(f"GPU {index} is left out: {error}.")
                continue
            found.instances.extend(
                dataclasses.replace(device, slot=slot)
                for device in devices
                for slot in range(slots_per_gpu)
            )
        return found

    def _devices(self, index: int, found: Found) -> Iterator[Instance]:
        handle = self._raw.nvmlDeviceGetHandleByIndex(index)
        whole = self._device(handle, kind=Kind.GPU, of=handle)
        found.indices[whole.uuid] = str(index)
        if not self._is_cut(handle):
            yield whole
            return
        slices = [
            self._device(part, kind=Kind.MIG, of=handle, parent_uuid=whole.uuid)
            for part in self._slices(handle)
        ]
        if not slices:
            found.warnings.append(f"GPU {index} is in MIG mode and has no slices: make some.")
        yield from slices

    def _is_cut(self, handle: Any) -> bool:
        mode = self._maybe(lambda: self._raw.nvmlDeviceGetMigMode(handle))
        return mode is not None and mode[0] == self._raw.NVML_DEVICE_MIG_ENABLE

    def _slices(self, handle: Any) -> Iterator[Any]:
        for number in range(self._raw.nvmlDeviceGetMaxMigDeviceCount(handle)):
            # There are as many places as slices of the smallest kind would fill.
            with contextlib.suppress(self._raw.NVMLError_NotFound):
                yield self._raw.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)

    def _device(self, handle: Any, *, kind: Kind, of: Any, parent_uuid: str = "") -> Instance:
        raw = self._raw
        memory = self._maybe(lambda: raw.nvmlDeviceGetMemoryInfo(handle))
        capability = self._maybe(lambda: raw.nvmlDeviceGetCudaComputeCapability(of))
        return Instance(
            kind=kind,
            uuid=raw.nvmlDeviceGetUUID(handle),
            name=self._maybe(lambda: raw.nvmlDeviceGetName(handle)) or "",
            memory_bytes=int(memory.total) if memory is not None else None,
            compute_capability=(capability[0], capability[1]) if capability else None,
            parent_uuid=parent_uuid,
        )

    # -- of one device

    def read(self, instance: Instance) -> Reading:
        """Return what the device of ``instance`` says at this moment."""
        raw = self._raw
        device, whole = self._handle(instance.uuid), self._handle(instance.parent_uuid)
        whole = whole or device
        memory = self._of(device, raw.nvmlDeviceGetMemoryInfo)
        busy = self._of(device, raw.nvmlDeviceGetUtilizationRates)
        return Reading(
            memory_total_bytes=int(memory.total) if memory is not None else None,
            memory_used_bytes=int(memory.used) if memory is not None else None,
            busy=busy.gpu / 100 if busy is not None else None,
            power_w=_thousandth(self._of(whole, raw.nvmlDeviceGetPowerUsage)),
            power_limit_w=_thousandth(self._of(whole, raw.nvmlDeviceGetEnforcedPowerLimit)),
            energy_j=_thousandth(self._of(whole, raw.nvmlDeviceGetTotalEnergyConsumption)),
        )

    def why_lost(self, instance: Instance) -> tuple[str, bool]:
        """Return why the device cannot be reached, or nothing; and whether that is certain."""
        try:
            handle = self._raw.nvmlDeviceGetHandleByUUID(instance.uuid)
            self._raw.nvmlDeviceGetMemoryInfo(handle)
        except (self._raw.NVMLError_NotSupported, self._raw.NVMLError_NoPermission):
            return "", True
        except self._raw.NVMLError as error:
            gone = tuple(getattr(self._raw, f"NVMLError_{name}") for name in _GONE)
            return f"the driver says of {instance.uuid}: {error}", isinstance(error, gone)
        return "", True

    def _handle(self, uuid: str) -> Any:
        return self._maybe(lambda: self._raw.nvmlDeviceGetHandleByUUID(uuid)) if uuid else None

    def _of(self, handle: Any, ask: Callable[[Any], T]) -> T | None:
        return self._maybe(lambda: ask(handle)) if handle is not None else None

    def _maybe(self, ask: Callable[[], T]) -> T | None:
        """Return what NVML answers, or None where it cannot or may not say."""
        try:
            return ask()
        except self._raw.NVMLError as error:
            logger.debug("nvml.silent", extra={"error": str(error)})
            return None


def open_nvml() -> Nvml:
    """Return NVML; NoGpus where its Python package or the driver is not here."""
    try:
        raw = importlib.import_module("pynvml")
    except ImportError:
        raise NoGpus("") from None
    return Nvml(raw)


def _thousandth(value: int | None) -> float | None:
    return value / 1000 if value is not None else None
