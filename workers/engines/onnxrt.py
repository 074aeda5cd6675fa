"""ONNX Runtime on the CPU, or through its CUDA and TensorRT providers: the only file that imports
onnxruntime.

A memory limit is enforced by the runtime's own arena. A model's limit is an arena of its own,
shared by its precisions; a worker's is one arena for all models of the process. An arena is
registered for the whole process: sessions keep the one that was registered when they were opened,
and a later one replaces it for later sessions alone (onnxruntime 1.32).

Without a limit each session has an arena that keeps what it ever took. Where the system refuses
more, that would starve the other precisions: the session that failed is opened anew, and from then
on every session of the process gives back after a run what it took for it.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np

# Read by the library when it is imported: nothing of a fleet leaves its machine.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

from producer.contract.errors import ConfigError, EngineFailed, OutOfMemory
from workers.batching.stacking import Array
from workers.engines.base import Engine, EngineLost, EngineRefused
from workers.engines.cuda import says_lost
from workers.engines.nvidia import device_kind
from workers.engines.out_of_memory import is_out_of_memory
from workers.engines.weights import largest_first
from workers.error_text import one_line
from workers.models import (
    ONNXRUNTIME,
    ONNXRUNTIME_CUDA,
    ONNXRUNTIME_TENSORRT,
    ModelSpec,
    TensorSpec,
)

_AVAILABLE: Final = re.compile(r"Available memory of ([0-9]+)")

#: The tensors we can stack and send; text, maps and sequences are not among them.
_DTYPES: Final = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
    **{
        f"tensor({kind}{bits})": f"{kind}{bits}"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}

#: Optimisations that change answers. A Relu before a quantisation to FP8 is removed, as if zero
#: were the least value of FP8: of 534 right answers of the digits 428 remain (onnxruntime 1.32).
_WRONG_IN: Final = {"fp8": ["ReluQuantRewrite"]}

#: The provider that a runtime of a model's file asks for, and gets, or the model is not served.
_PROVIDERS: Final = {
    ONNXRUNTIME: "CPUExecutionProvider",
    ONNXRUNTIME_CUDA: "CUDAExecutionProvider",
    ONNXRUNTIME_TENSORRT: "TensorrtExecutionProvider",
}

#: Larger than any limit: an arena in which weights are measured, not limited.
_NO_LIMIT_BYTES: Final = 1 << 44

#: More than a process can address.
_TOO_MUCH_BYTES: Final = 1 << 62

#: Errors reach the caller as exceptions; the runtime's own lines on stderr would repeat them.
_ONLY_FATAL: Final = 4


class OnnxRuntimeEngine(Engine):
    """One ONNX file in one session."""

    #: Whether the system, not a limit of ours, has refused this process memory.
    _system_is_short: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, precision: str, *, threads: int) -> None:
        if spec.options:
            raise ConfigError(f"{spec.name}: onnxruntime takes no [options].")
        self.runtime = f"{spec.runtime} {ort.__version__}"
        self._where = f"{spec.name} {precision}"
        self._on_cpu = spec.runtime == ONNXRUNTIME
        # A provider on a GPU has a limit of its own.
        limited = spec.memory_limit_bytes is not None and self._on_cpu
        if limited:
            _arenas.use(spec)
        try:
            self._session = _open_session(spec, precision, threads=threads)
        except OutOfMemory as error:
            if not limited:
                raise
            raise _limit_too_low(spec, threads=threads) from error
        self._precision, self._spec = precision, spec if limited else None
        self.usable_after_out_of_memory = limited
        try:
            if limited:
                _check_limit(spec, precision, self._session, threads=threads)
                self.weights_bytes = _arenas.weights(spec)[_called(spec, precision)]
            if not self._on_cpu:
                self.memory = device_kind()
            self.inputs = _tensors(spec, "input", self._session.get_inputs())
            self.outputs = _tensors(spec, "output", self._session.get_outputs())
        except BaseException:
            self.close()
            raise
        self._names = [output.name for output in self.outputs]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        session = self._session
        if session is None:
            raise EngineFailed(f"{self._where}: the engine is closed.")
        # Outputs lie in the arena until they are freed. Copied out, they neither count against
        # the limit nor hold the piece they lie in while a job waits for its answer.
        spare = self._on_cpu and (self._spec is not None or self._system_is_short)
        try:
            values = session.run(self._names, dict(feeds), _SPARING if spare else _PLAIN)
            copied = [np.array(value) if spare else np.asarray(value) for value in values]
        except Exception as error:
            if is_out_of_memory(error):
                if self._spec is None and self._on_cpu:
                    OnnxRuntimeEngine._system_is_short = True
                raise OutOfMemory(f"{self._where}: {one_line(error)}") from error
            if not self._on_cpu and says_lost(str(error)):
                raise EngineLost(f"{self._where}: {one_line(error)}") from error
            raise EngineRefused(
                f"{self._where}: {one_line(error)}", invalid=isinstance(error, InvalidArgument)
            ) from error
        return dict(zip(self._names, copied, strict=True))

    def close(self) -> None:
        if self._session is not None and self._spec is not None:
            _arenas.closed(self._spec, self._precision)
        self._session = None


def _run_options(*, sparing: bool) -> Any:
    options = ort.RunOptions()
    options.log_severity_level = _ONLY_FATAL
    if sparing:
        # Without it the pieces of earlier, smaller batches stay in the arena and a batch
        # that would fit alone no longer does.
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


_PLAIN: Final = _run_options(sparing=False)
_SPARING: Final = _run_options(sparing=True)


class _Arenas:
    """Which arena is registered in this process, and what the weights in each arena take."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._weights: dict[tuple[Any, ...], dict[str, int]] = {}

    def use(self, spec: ModelSpec) -> None:
        """Make the next session use the arena of ``spec``: the one its other precisions use."""
        key = _arena_key(spec)
        # A model that is opened anew gets a new arena: the old one may hold leftovers.
        if self._key == key and self._weights.get(key):
            return
        assert spec.memory_limit_bytes is not None
        register_arena(spec.memory_limit_bytes, first_chunk_bytes=spec.memory_first_chunk_bytes)
        self._key = key

    def opened(self, spec: ModelSpec, precision: str, *, left_bytes: int) -> None:
        """Note that one more engine lies in the arena, and what that has left."""
        assert spec.memory_limit_bytes is not None
        weights = self._weights.setdefault(_arena_key(spec), {})
        taken = spec.memory_limit_bytes - sum(weights.values()) - left_bytes
        weights[_called(spec, precision)] = max(0, taken)

    def closed(self, spec: ModelSpec, precision: str) -> None:
        self._weights.get(_arena_key(spec), {}).pop(_called(spec, precision), None)

    def weights(self, spec: ModelSpec) -> dict[str, int]:
        """Return what each engine in the arena of ``spec`` takes, as a copy."""
        return dict(self._weights.get(_arena_key(spec), {}))

    def forget(self) -> None:
        """Note that another arena was registered."""
        self._key = None


_arenas = _Arenas()


def register_arena(limit_bytes: int, *, first_chunk_bytes: int) -> None:
    """Make sessions that are opened from now on share a new arena of ``limit_bytes``."""
    info = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    config = ort.OrtArenaCfg(
        {
            "max_mem": limit_bytes,
            "arena_extend_strategy": 1,  # as much as is asked for, not the next power of two
            "initial_chunk_size_bytes": first_chunk_bytes,
            "max_dead_bytes_per_chunk": first_chunk_bytes,
        }
    )
    ort.create_and_register_allocator(info, config)


def weights_bytes(spec: ModelSpec, *, threads: int = 1) -> dict[str, int]:
    """Return what each engine of ``spec`` takes in an arena before it has run anything."""
    spec = dataclasses.replace(spec, runtime=ONNXRUNTIME)
    _arenas.forget()
    register_arena(_NO_LIMIT_BYTES, first_chunk_bytes=spec.memory_first_chunk_bytes)
    sessions = []
    left, taken = _NO_LIMIT_BYTES, {}
    for precision in spec.engines:
        sessions.append(_open_session(spec, precision, threads=threads))
        available = _available_bytes(sessions[0])
        assert available is not None
        taken[_called(spec, precision)], left = left - available, available
    return taken


def _arena_key(spec: ModelSpec) -> tuple[Any, ...]:
    # The models of a worker may change; their arena stays one.
    whose = None if spec.memory_shared_by else spec.folder
    return (whose, spec.memory_limit_bytes, spec.memory_first_chunk_bytes)


def _called(spec: ModelSpec, precision: str) -> str:
    return f"{spec.name} in {precision}"


def _open_session(spec: ModelSpec, precision: str, *, threads: int) -> Any:
    path = spec.engines[precision]
    if path is None:
        raise ConfigError(f"{spec.name}: onnxruntime needs a file for {precision}.")
    providers = _providers(spec)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _ONLY_FATAL
    # Instances share a host's cores; a pool that spins takes them from each other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if spec.memory_limit_bytes is not None and spec.runtime == ONNXRUNTIME:
        options.add_session_config_entry("session.use_env_allocators", "1")
        # A pattern asks for the peak in one piece from the second run on: what fitted once
        # would not fit again.
        options.enable_mem_pattern = False
    try:
        session = ort.InferenceSession(
            str(path),
            options,
            providers=providers,
            disabled_optimizers=_WRONG_IN.get(precision),
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{spec.name}: the weights of {precision} do not fit in memory: {one_line(error)}"
            ) from error
        raise ConfigError(f"{path}: onnxruntime cannot load it: {one_line(error)}") from error
    # A provider that cannot start is left out without an exception, and the CPU would answer.
    if (runs := session.get_providers()[0]) != _PROVIDERS[spec.runtime]:
        raise ConfigError(
            f"{spec.name}: runtime is {spec.runtime!r}, but onnxruntime runs it with {runs}. Look "
            "at the driver, CUDA and cuDNN of this machine."
        )
    return session


def why_no_provider(runtime: str) -> str:
    """Return why onnxruntime cannot run as ``runtime`` at all, or nothing."""
    wanted, there = _PROVIDERS[runtime], ort.get_available_providers()
    if wanted in there:
        return ""
    return f"this onnxruntime has no {wanted}, only {', '.join(there)}"


def _providers(spec: ModelSpec) -> list[Any]:
    """Return what a session may run with: the provider that was asked for, and beside one on a GPU
    the CPU for the few nodes that it has no kernels for.
    """
    if why := why_no_provider(spec.runtime):
        raise ConfigError(
            f'{spec.name}: runtime is {spec.runtime!r}, but {why}. Install the extra "worker-gpu" '
            'in place of "worker".'
        )
    if spec.runtime == ONNXRUNTIME:
        return [_PROVIDERS[ONNXRUNTIME]]
    given = {"arena_extend_strategy": "kSameAsRequested"}
    if spec.memory_limit_bytes is not None:
        given["gpu_mem_limit"] = str(spec.memory_limit_bytes)
    cuda = (_PROVIDERS[ONNXRUNTIME_CUDA], given)
    first = [_PROVIDERS[ONNXRUNTIME_TENSORRT]] if spec.runtime == ONNXRUNTIME_TENSORRT else []
    return [*first, cuda, _PROVIDERS[ONNXRUNTIME]]


def _check_limit(spec: ModelSpec, precision: str, session: Any, *, threads: int) -> None:
    """Refuse a limit below the weights.

    Weights are reserved in the arena without a look at its limit; once they exceed it, what
    is left wraps around and the limit is silently off (onnxruntime 1.32).
    """
    assert spec.memory_limit_bytes is not None
    left_bytes = _available_bytes(session)
    if not left_bytes:
        raise _limit_too_low(spec, threads=threads)
    _arenas.opened(spec, precision, left_bytes=left_bytes)


def _limit_too_low(spec: ModelSpec, *, threads: int) -> ConfigError:
    """Return the error that says what is needed, and by what most of it."""
    if spec.memory_shared_by:
        # Not measured: another arena would take the place of the one that the others share.
        files = {_called(spec, name): path for name, path in spec.engines.items()}
        taken = _arenas.weights(spec)
        taken |= {name: path.stat().st_size for name, path in files.items() if path}
        whose = f"all models of this worker ({', '.join(spec.memory_shared_by)})"
    else:
        taken, whose = weights_bytes(spec, threads=threads), "all its engines"
    return ConfigError(
        f"{spec.name}: memory_limit_bytes is {spec.memory_limit_bytes}, but the weights of {whose} "
        f"take {sum(taken.values())}, {largest_first(taken)}; set it to that and what a batch "
        "needs, or leave an engine or a model out."
    )


def _available_bytes(session: Any) -> int | None:
    """Return what the session's arena has left, ``None`` when its limit is not in force.

    The runtime says so only when it refuses; so it is asked for more than any machine has. What it
    grants would stay in the arena.
    """
    try:
        session.create_ortvalue_from_shape_and_type([_TOO_MUCH_BYTES], np.uint8, "cpu")
    except RuntimeError as error:
        if found := _AVAILABLE.search(str(error)):
            return int(found[1])
        if not is_out_of_memory(error):
            raise
    return None


def _tensors(spec: ModelSpec, side: str, nodes: Any) -> tuple[TensorSpec, ...]:
    return tuple(_tensor(spec, side, node) for node in nodes)


def _tensor(spec: ModelSpec, side: str, node: Any) -> TensorSpec:
    dtype = _DTYPES.get(node.type)
    if dtype is None:
        raise ConfigError(f"{spec.name}: {side} {node.name!r} {_why_not(node.type)}")
    shape = tuple(size if isinstance(size, int) else None for size in node.shape)
    return TensorSpec(name=node.name, dtype=dtype, shape=shape, batch_axis=0 if shape else None)


def _why_not(kind: str) -> str:
    if kind == "tensor(string)":
        return "is text; jobs carry numbers. Move the text step out of the model."
    if not kind.startswith("tensor("):
        return (
            f"is a {kind}, not a tensor, and cannot be split between jobs. Export the model "
            "without it (scikit-learn: zipmap=False)."
        )
    return f"is a {kind}, which numpy cannot hold; export it as float32."
