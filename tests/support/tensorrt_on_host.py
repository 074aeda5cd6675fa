"""TensorRT's runtime over the memory of this machine: the rules that its calls have, held to.

A plan is JSON: tensors, profiles, scratch memory. A context takes what a real one takes and refuses
what that would refuse: a shape outside its profile, an address of no memory, too little scratch.
What it computes is ``twice``: each output is the input of its place times two. Faults are put in by
the name of the call; with ``words`` the log says why.
"""

from __future__ import annotations

import ctypes
import enum
import json
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from tests.support.cuda_on_host import CudaOnHost

#: A refusal that stands for None or False.
Faults = dict[str, str]

#: Of every plan.
WEIGHTS_BYTES: Final = 300

_NUMPY: Final = {"FLOAT": "float32", "HALF": "float16", "INT64": "int64"}


class Severity(enum.IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3


class DataType(enum.IntEnum):
    FLOAT = 0
    HALF = 1
    BF16 = 7
    INT64 = 8


class TensorRtOnHost:
    """Stands for the module `tensorrt`."""

    __version__ = "11.4.0.106"
    TensorIOMode = enum.IntEnum("TensorIOMode", {"NONE": 0, "INPUT": 1, "OUTPUT": 2})
    TensorLocation = enum.IntEnum("TensorLocation", {"DEVICE": 0, "HOST": 1})
    ErrorCodeTRT = enum.IntEnum("ErrorCodeTRT", {"SUCCESS": 0, "UNSPECIFIED_ERROR": 1})
    ExecutionContextAllocationStrategy = enum.IntEnum(
        "ExecutionContextAllocationStrategy", {"STATIC": 0, "USER_MANAGED": 2}
    )
    EngineStat = enum.IntEnum("EngineStat", {"TOTAL_WEIGHTS_SIZE": 0})
    BuilderFlag = SimpleNamespace(TF32=6)
    MemoryPoolType = SimpleNamespace(WORKSPACE=0)

    class ILogger:
        Severity = Severity

        def log(self, severity: Any, msg: str) -> None:
            raise NotImplementedError

    class IErrorRecorder:
        def report_error(self, code: Any, description: str) -> bool:
            raise NotImplementedError

    class IProgressMonitor:
        pass

    def __init__(self, cuda: CudaOnHost) -> None:
        self.cuda = cuda
        #: The words of a call that fails, by its name.
        self.faults: Faults = {}
        #: Contexts, engines and runtimes that were freed, in order.
        self.freed: list[str] = []
        self.executed: list[dict[str, tuple[int, ...]]] = []
        self.contexts_made = 0

    def Runtime(self, logger: Any) -> Runtime:
        if self.fails("Runtime", logger):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return Runtime(self, logger)

    def Builder(self, logger: Any) -> Builder:
        if self.fails("Builder", logger):
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return Builder(self, logger)

    def OnnxParser(self, _network: Any, _logger: Any) -> Any:
        return SimpleNamespace(parse_from_file=lambda _path: True, num_errors=0)

    def fails(self, name: str, logger: Any, recorder: Any = None) -> bool:
        """Return whether a call is to fail, after saying why where TensorRT would."""
        words = self.faults.get(name)
        if words is None:
            return False
        if recorder is not None:
            recorder.report_error(self.ErrorCodeTRT.UNSPECIFIED_ERROR, words)
        elif words:
            logger.log(Severity.ERROR, words)
        return True


class Builder:
    """Only what fails: plans of this module are written by `plan`."""

    def __init__(self, trt: TensorRtOnHost, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def create_network(self, _flags: int) -> Any:
        tensor = SimpleNamespace(name="x", shape=(-1, 4), is_shape_tensor=False)
        return SimpleNamespace(
            num_inputs=1,
            num_outputs=1,
            get_input=lambda _place: tensor,
            get_output=lambda _place: SimpleNamespace(name="y"),
        )

    def create_builder_config(self) -> Any:
        return SimpleNamespace(
            clear_flag=lambda _flag: None,
            create_timing_cache=lambda _blob: object(),
            set_timing_cache=lambda _cache, _ignore: True,
            add_optimization_profile=lambda _profile: (
                -1 if self._trt.fails("add_optimization_profile", self._logger) else 0
            ),
        )

    def create_optimization_profile(self) -> Any:
        return SimpleNamespace(set_shape=lambda *_shapes: None)

    def build_serialized_network(self, _network: Any, _config: Any) -> None:
        assert self._trt.fails("build_serialized_network", self._logger)


class Runtime:
    def __init__(self, trt: TensorRtOnHost, logger: Any) -> None:
        self._trt, self._logger = trt, logger
        self.error_recorder: Any = None

    def deserialize_cuda_engine(self, plan: bytes) -> CudaEngine | None:
        if self._trt.fails("deserialize_cuda_engine", self._logger, self.error_recorder):
            return None
        return CudaEngine(self._trt, self._logger, self.error_recorder, json.loads(plan))

    def __del__(self) -> None:
        self._trt.freed.append("runtime")


class CudaEngine:
    """One plan: ``tensors`` by name with kind, mode and shape; ``profiles`` with ranges."""

    def __init__(self, trt: TensorRtOnHost, logger: Any, recorder: Any, said: Any) -> None:
        self.trt, self.logger, self.error_recorder, self.said = trt, logger, recorder, said
        self._names = list(said["tensors"])
        self.num_io_tensors = len(self._names)
        self.num_optimization_profiles = len(said["profiles"])

    def get_tensor_name(self, index: int) -> str:
        return str(self._names[index])

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.TensorLocation[self.said["tensors"][name].get("location", "DEVICE")]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode[self.said["tensors"][name]["mode"]]

    def get_tensor_dtype(self, name: str) -> Any:
        return DataType[self.said["tensors"][name]["kind"]]

    def get_tensor_shape(self, name: str) -> list[int]:
        shape: list[int] = self.said["tensors"][name]["shape"]
        return shape

    def get_tensor_profile_shape(self, name: str, index: int) -> list[list[int]]:
        assert self.get_tensor_mode(name) == self.trt.TensorIOMode.INPUT
        shapes: list[list[int]] = self.said["profiles"][index][name]
        return shapes

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return int(self.said["scratch"][index])

    def get_engine_stat(self, stat: Any) -> int:
        assert stat == self.trt.EngineStat.TOTAL_WEIGHTS_SIZE
        return WEIGHTS_BYTES

    def create_execution_context(self, strategy: Any) -> ExecutionContext | None:
        assert strategy == self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.trt.fails("create_execution_context", self.logger):
            return None
        self.trt.contexts_made += 1
        return ExecutionContext(self)

    def __del__(self) -> None:
        self.trt.freed.append("engine")


class ExecutionContext:
    def __init__(self, engine: CudaEngine) -> None:
        self._engine, self._trt = engine, engine.trt
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)

    def _inputs(self) -> list[str]:
        return list(self._engine.said["profiles"][0])

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream in self._trt.cuda.streams
        self._profile = index
        return not self._fails("set_optimization_profile_async")

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile >= 0, "no profile was chosen"
        least, _usual, largest = self._engine.said["profiles"][self._profile][name]
        self._shapes[name] = shape
        return len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, largest, strict=True)
        )

    def infer_shapes(self) -> list[str]:
        return [name for name in self._inputs() if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        given = self._engine.said["tensors"][name]
        if given.get("depends_on_data"):
            return (-1, *given["shape"][1:])
        first = self._shapes[self._inputs()[0]]
        return tuple(
            first[axis] if size == -1 else size for axis, size in enumerate(given["shape"])
        )

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        self._trt.cuda.require(address, nbytes, device=True)
        self._scratch = (address, nbytes)

    def execute_async_v3(self, stream: int) -> bool:
        assert stream in self._trt.cuda.streams
        needed = self._engine.get_device_memory_size_for_profile_v2(self._profile)
        assert self._scratch[1] >= needed, "the scratch memory is too small"
        self._trt.cuda.require(self._scratch[0], needed, device=True)
        if self._fails("execute_async_v3"):
            return False
        self._trt.executed.append(dict(self._shapes))
        outputs = [
            name
            for name in self._engine.said["tensors"]
            if self._engine.get_tensor_mode(name) == self._trt.TensorIOMode.OUTPUT
        ]
        for source, target in zip(self._inputs(), outputs, strict=False):
            self._array(target)[...] = (self._array(source) * 2).reshape(
                self.get_tensor_shape(target)
            )
        return True

    def _array(self, name: str) -> Any:
        kind = np.dtype(_NUMPY[self._engine.said["tensors"][name]["kind"]])
        shape = self.get_tensor_shape(name)
        nbytes = int(np.prod(shape)) * kind.itemsize
        self._trt.cuda.require(self._addresses[name], nbytes, device=True)
        raw = (ctypes.c_ubyte * nbytes).from_address(self._addresses[name])
        return np.ctypeslib.as_array(raw).view(kind).reshape(shape)

    def _fails(self, name: str) -> bool:
        return self._trt.fails(name, self._engine.logger, self._engine.error_recorder)

    def __del__(self) -> None:
        self._trt.freed.append("context")


def plan(
    *profiles: tuple[int, int],
    kind: str = "FLOAT",
    scratch: tuple[int, ...] = (),
    output: dict[str, Any] | None = None,
    source: dict[str, Any] | None = None,
) -> bytes:
    """Return a plan of ``y = 2 x`` over rows of four, with profiles of least and most rows."""
    said = {
        "tensors": {
            "x": {"mode": "INPUT", "kind": kind, "shape": [-1, 4], **(source or {})},
            "y": {"mode": "OUTPUT", "kind": kind, "shape": [-1, 4], **(output or {})},
        },
        "profiles": [{"x": [[least, 4], [most, 4], [most, 4]]} for least, most in profiles],
        "scratch": scratch or [most * 100 for _least, most in profiles],
    }
    return json.dumps(said).encode()
