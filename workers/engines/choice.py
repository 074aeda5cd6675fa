"""Which runtime runs a model: what its file says, or with `runtime = "auto"` what is here.

It is decided in the process that will compute, and told with its reason; never a silent change.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Final

from workers.engines import nvidia
from workers.models import AUTO, ONNXRUNTIME, ONNXRUNTIME_CUDA, TENSORRT, ModelSpec

#: Set by a worker for each of its processes: ``GPU-<uuid>/<slot>``, ``MIG-...``, or CPU cores.
_INSTANCE_KEY: Final = "FLEET_INSTANCE_KEY"
_ON_A_GPU: Final = ("GPU-", "MIG-")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A runtime, and why it is that one."""

    runtime: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What this process could compute with; each text says why not, and is empty where it can."""

    #: The instance is CPU cores, whatever else its host has.
    is_cpu_instance: bool = False
    why_no_gpu: str = ""
    why_no_tensorrt: str = ""
    why_no_onnxruntime_cuda: str = ""


def chosen(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with the runtime that this process runs it with."""
    return dataclasses.replace(spec, runtime=choice(spec).runtime)


def choice(spec: ModelSpec) -> Choice:
    """Return the runtime that this process runs ``spec`` with, and why."""
    if spec.runtime != AUTO:
        return Choice(runtime=spec.runtime, why="its model.toml says so")
    return choose(look_around())


def choose(here: Surroundings) -> Choice:
    """Return what ``auto`` means in these surroundings."""
    if here.is_cpu_instance:
        return Choice(runtime=ONNXRUNTIME, why="auto: this instance is CPU cores")
    if here.why_no_gpu:
        return Choice(runtime=ONNXRUNTIME, why=f"auto: {here.why_no_gpu}")
    if not here.why_no_tensorrt:
        return Choice(runtime=TENSORRT, why="auto: a GPU and TensorRT are here")
    if not here.why_no_onnxruntime_cuda:
        return Choice(runtime=ONNXRUNTIME_CUDA, why=f"auto: {here.why_no_tensorrt}")
    return Choice(
        runtime=ONNXRUNTIME,
        why=f"auto: a GPU is here, but {here.why_no_tensorrt} and {here.why_no_onnxruntime_cuda}",
    )


@functools.cache
def look_around() -> Surroundings:
    """Return what this process could compute with; the same for all its models."""
    instance = os.environ.get(_INSTANCE_KEY, "")
    if instance and not instance.startswith(_ON_A_GPU):
        return Surroundings(is_cpu_instance=True)
    if why := nvidia.why_no_gpu():
        return Surroundings(why_no_gpu=why)
    no_tensorrt = nvidia.why_no_tensorrt()
    if not no_tensorrt:
        return Surroundings()
    from workers.engines import onnxrt

    return Surroundings(
        why_no_tensorrt=no_tensorrt,
        why_no_onnxruntime_cuda=onnxrt.why_no_provider(ONNXRUNTIME_CUDA),
    )
