"""What every engine is, and the one place that opens one. No runtime is imported here."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from producer.contract.errors import BadRequest, ConfigError, EngineFailed, FleetError
from workers.batching.stacking import Array
from workers.models import (
    ONNXRUNTIME,
    ONNXRUNTIME_CUDA,
    ONNXRUNTIME_TENSORRT,
    TENSORRT,
    ModelSpec,
    TensorSpec,
)

_ENGINES: Final = {
    **dict.fromkeys(
        (ONNXRUNTIME, ONNXRUNTIME_CUDA, ONNXRUNTIME_TENSORRT),
        "workers.engines.onnxrt:OnnxRuntimeEngine",
    ),
    TENSORRT: "workers.engines.trt:TensorRtEngine",
}


class EngineRefused(FleetError):
    """The engine refused a value in the batch; the batch is tried again in parts.

    It never leaves the worker: ``as_error`` is what a job that was refused alone ends with.
    """

    def __init__(self, text: str, *, invalid: bool) -> None:
        super().__init__(text)
        #: Whether the runtime called the input itself invalid.
        self.invalid = invalid

    def as_error(self) -> FleetError:
        """Return the error of a job that the engine refused when it ran alone."""
        return BadRequest(str(self)) if self.invalid else EngineFailed(str(self))


class EngineLost(BaseException):
    """No engine can be used in this process any more, so the process ends; its jobs run again.

    Not an Exception: nothing that deals with the error of a job may take it for one.
    """


class Engine(abc.ABC):
    """A model loaded in a runtime, in one precision, ready to run.

    ``run`` raises ``OutOfMemory`` when memory ran out (``workers.engines.out_of_memory`` knows the
    texts), ``EngineRefused`` when a value of the batch is to blame, ``EngineFailed`` for anything
    else. It is called from one thread.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    #: Name and version of the runtime, for people.
    runtime: str
    #: Why it is that one, for people.
    why_runtime: str = ""
    #: False: after ``OutOfMemory`` it is closed at once, and opened anew before its next run.
    usable_after_out_of_memory: bool = True
    #: The kind of memory it lives in. What fits in one fits in others that are called the same.
    memory: str = "cpu"

    @abc.abstractmethod
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output by name for one batch."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the engine holds; it is not used afterwards."""


def open_engine(spec: ModelSpec, precision: str, *, threads: int) -> Engine:
    """Open one precision of ``spec``, importing its runtime now and not before."""
    from workers.engines.choice import choice

    chosen = choice(spec)
    spec = dataclasses.replace(spec, runtime=chosen.runtime)
    kind = _engine_class(spec)
    try:
        engine = kind(spec, precision, threads=threads)
    except FleetError:
        raise
    except Exception as error:
        raise EngineFailed(
            f"{spec.name}: {spec.runtime} cannot load {precision}: {one_line(error)}"
        ) from error
    if not isinstance(engine, Engine):
        raise ConfigError(f"{spec.name}: {spec.runtime} is not a workers.engines.base.Engine.")
    engine.why_runtime = chosen.why
    return engine


def one_line(error: BaseException) -> str:
    """Return class and text of ``error``, short enough for one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def _engine_class(spec: ModelSpec) -> Any:
    module_name, _, class_name = _ENGINES.get(spec.runtime, spec.runtime).partition(":")
    try:
        module = _module_beside(spec, module_name) or importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{spec.name}: runtime {spec.runtime!r} cannot be imported: {one_line(error)}"
        ) from error
    kind = getattr(module, class_name, None)
    if kind is None:
        raise ConfigError(f"{spec.name}: {module_name} holds no {class_name!r}.")
    return kind


def _module_beside(spec: ModelSpec, module_name: str) -> ModuleType | None:
    """Return the module that lies in the model's folder; it comes before an installed one."""
    path = Path(spec.folder, f"{module_name}.py")
    if spec.runtime in _ENGINES or not path.is_file():
        return None
    # Two models may bring files of one name, so the folder's name is a part of it.
    name = f"fleet_model_{spec.name}_{module_name}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        return None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module
