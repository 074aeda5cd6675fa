"""NVIDIA's part of this machine: driver, CUDA, the runtimes that are installed, each GPU and slice.

Nothing here opens a CUDA context or imports a runtime: versions are those of the packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from workers.doctor.precisions import speeds_of
from workers.finding import Finding, State
from workers.instances.discovery import refuse_driver
from workers.instances.driver import DriverRange
from workers.instances.instance import Instance
from workers.instances.nvml import NoGpus, Nvml, Reading, open_nvml

_PACKAGES: Final = (
    *("nvidia-ml-py", "cuda-bindings", "tensorrt", "onnxruntime", "onnxruntime-gpu"),
)
_KERNEL_DRIVER: Final = Path("/proc/driver/nvidia/version")
_GIB: Final = 1 << 30
_FULL_WITHOUT_HOLDER: Final = 0.1
_GPU_EXTRAS: Final = 'pip install -e ".[cli,worker-gpu,tensorrt]"'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU or MIG slice."""

    instance: Instance
    reading: Reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was found; a version is empty where nobody tells it."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    #: GPUs that are there and cannot be used, in the driver's words.
    left_out: tuple[str, ...] = ()
    #: Why there are no GPUs, where it is more than that there is no driver.
    trouble: str = ""
    #: Versions of the packages that are installed.
    packages: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kernel_has_driver: bool = False


def read_machine() -> tuple[Machine, Nvml | None]:
    """Look at this machine; also return what its devices are asked with."""
    packages = dict(_versions())
    kernel = _KERNEL_DRIVER.exists()
    try:
        nvml = open_nvml()
    except NoGpus as why:
        trouble = str(why)
        return Machine(packages=packages, kernel_has_driver=kernel, trouble=trouble), None
    found = nvml.find()
    return Machine(
        driver=nvml.driver_version(),
        cuda=nvml.cuda_version(),
        gpus=tuple(Gpu(instance=each, reading=nvml.read(each)) for each in found.instances),
        left_out=tuple(found.warnings),
        packages=packages,
        kernel_has_driver=kernel,
    ), nvml


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def driver(machine: Machine, allowed: DriverRange) -> Finding:
    """Return whether workers may run on what this driver drives."""
    if machine.trouble:
        do = "See what `nvidia-smi` says, and load the driver anew."
        return Finding("driver", State.ERROR, machine.trouble, do)
    if machine.gpus and (refused := refuse_driver(machine.driver, allowed)):
        return Finding("driver", State.ERROR, refused.problem, refused.do)
    if machine.driver or machine.gpus:
        return Finding("driver", State.OK, f"{machine.driver}, of {allowed.text or 'any'}.")
    if machine.kernel_has_driver and "nvidia-ml-py" not in machine.packages:
        text = "NVIDIA's driver is here, and nothing to ask it with: workers run on CPU cores."
        return Finding("driver", State.WARNING, text, _GPU_EXTRAS)
    return Finding("driver", State.OK, "None of NVIDIA's: workers run on CPU cores.")


def cuda(machine: Machine) -> Finding:
    """Return whether CUDA's package and the driver go together."""
    bindings = machine.packages.get("cuda-bindings", "")
    if not machine.gpus:
        return Finding("cuda", State.OK, "Not needed without a GPU.")
    if not bindings:
        text = f"The driver knows CUDA {machine.cuda or '?'}; cuda-bindings is not installed."
        return Finding("cuda", State.WARNING, text, _GPU_EXTRAS)
    if machine.cuda and _major(machine.cuda) < _major(bindings):
        text = f"cuda-bindings {bindings} needs a newer driver: this one knows CUDA {machine.cuda}."
        do = f'Install a driver for CUDA {_major(bindings)}, or "cuda-bindings<{_major(bindings)}".'
        return Finding("cuda", State.ERROR, text, do)
    text = f"The driver knows CUDA {machine.cuda or '?'}; cuda-bindings {bindings}."
    return Finding("cuda", State.OK, text)


def tensorrt(machine: Machine) -> Finding:
    """Return whether TensorRT is here and one that takes precision from the file."""
    version = machine.packages.get("tensorrt", "")
    if version and _major(version) < 11:
        text = f"TensorRT {version} does not take precision as the model's file says."
        return Finding("tensorrt", State.ERROR, text, f"{_GPU_EXTRAS} installs 11 or newer.")
    if version:
        return Finding("tensorrt", State.OK, f"TensorRT {version}.")
    if not machine.gpus:
        return Finding("tensorrt", State.OK, "Not needed without a GPU.")
    return Finding("tensorrt", State.WARNING, "TensorRT is not installed.", _GPU_EXTRAS)


def onnxruntime(machine: Machine) -> Finding:
    """Return which ONNX Runtime is here; there must be one, and one alone."""
    found = {
        name: version
        for name, version in machine.packages.items()
        if name.startswith("onnxruntime")
    }
    if not found:
        text = "ONNX Runtime is not installed."
        return Finding("onnxruntime", State.ERROR, text, 'pip install -e ".[cli,worker]"')
    if len(found) > 1:
        text = "onnxruntime and onnxruntime-gpu are both installed, and both own the same module."
        do = "Uninstall both, then install the one that you want."
        return Finding("onnxruntime", State.ERROR, text, do)
    ((name, version),) = found.items()
    return Finding("onnxruntime", State.OK, f"{name} {version}.")


def gpus(machine: Machine, holders: Mapping[str, str] | None) -> Iterator[Finding]:
    """Yield a line for each GPU and slice; ``holders`` by instance, None where nobody knows."""
    for text in machine.left_out:
        yield Finding("gpu", State.WARNING, text, "`nvidia-smi` shows its state.")
    for gpu in machine.gpus:
        yield _gpu(gpu, _held(gpu.instance, holders))


def _gpu(gpu: Gpu, held: str) -> Finding:
    instance, reading = gpu.instance, gpu.reading
    name = f"{instance.kind} {instance.uuid}"
    capability = instance.compute_capability
    parts = [
        instance.name or "It does not tell its name",
        f"compute capability {'.'.join(map(str, capability))}" if capability else "",
        _memory(reading),
        held,
    ]
    if speeds := speeds_of(capability):
        parts.append(f"fast in {', '.join(speeds.fast)}")
    text = f"{', '.join(filter(None, parts))}."
    if held == _FREE and _is_full(reading):
        do = "`nvidia-smi` shows whose processes take it; end them, or leave this one out."
        return Finding(name, State.WARNING, f"{text} Others use its memory.", do)
    return Finding(name, State.OK, text)


_FREE: Final = "free"


def _held(instance: Instance, holders: Mapping[str, str] | None) -> str:
    if holders is None:
        return "holder unknown (no Redis)"
    # Each slot is held for itself.
    held = sorted({node for key, node in holders.items() if key.startswith(f"{instance.uuid}/")})
    return f"held by {', '.join(held)}" if held else _FREE


def _memory(reading: Reading) -> str:
    total, used = reading.memory_total_bytes, reading.memory_used_bytes
    if total is None or used is None:
        return "it does not tell its memory"
    return f"{(total - used) / _GIB:,.0f} of {total / _GIB:,.0f} GiB free"


def _is_full(reading: Reading) -> bool:
    total, used = reading.memory_total_bytes, reading.memory_used_bytes
    return bool(total and used and used > _FULL_WITHOUT_HOLDER * total)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
