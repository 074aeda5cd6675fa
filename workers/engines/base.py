"""What every engine is, and the one place that opens one. No runtime is imported here."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, Final

from producer.contract.errors import BadRequest, ConfigError, EngineFailed, FleetError
from workers.batching.stacking import Array
from workers.beside import named_class
from workers.error_text import one_line
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
    #: What its weights take, measured; None where the runtime does not say.
    weights_bytes: int | None = None
    #: The kind of memory it lives in. What fits in one fits in others that are called the same.
    memory: str = "cpu"

    @abc.abstractmethod
    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return every output by name for one batch."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free what the engine holds; it is not used afterwards."""


def import_runtime(spec: ModelSpec) -> None:
    """Import the runtime that would run ``spec``, where it is one of ours, and open nothing."""
    from workers.engines.choice import choice

    spec = dataclasses.replace(spec, runtime=choice(spec).runtime)
    if spec.runtime in _ENGINES:
        engine_class(spec)


def open_engine(spec: ModelSpec, precision: str, *, threads: int) -> Engine:
    """Open one precision of ``spec``, importing its runtime now and not before."""
    from workers.engines.choice import choice

    chosen = choice(spec)
    spec = dataclasses.replace(spec, runtime=chosen.runtime)
    kind = engine_class(spec)
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


def engine_class(spec: ModelSpec) -> Any:
    """Import the runtime that the model names, and return its engine."""
    ours = _ENGINES.get(spec.runtime)
    if ours is None:
        return named_class(spec, spec.runtime, key="runtime")
    module_name, _, class_name = ours.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(
            f"{spec.name}: runtime {spec.runtime!r} cannot be imported: {one_line(error)}"
        ) from error
