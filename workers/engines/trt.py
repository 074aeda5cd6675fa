"""TensorRT on this process's GPU: one plan, one stream, a context for each profile, no graphs.

A batch takes the tightest profile, padded to it with copies of its last row, and is cut back.
Whatever TensorRT returns is looked at; why it failed is in its journal.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from producer.contract.errors import ConfigError, EngineFailed, FleetError, OutOfMemory
from workers.batching.stacking import Array
from workers.engines.base import Engine, EngineRefused
from workers.engines.cuda import Staging
from workers.engines.nvidia import Nvidia, open_nvidia
from workers.engines.out_of_memory import says_out_of_memory
from workers.engines.trt_profiles import PlanProfile, Shape, tightest
from workers.models import ModelSpec, TensorSpec
from workers.plans.making import plan_of, workshop_of

logger = logging.getLogger(__name__)

#: TensorRT's types that numpy has.
_DTYPES: Final = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}


class TensorRtEngine(Engine):
    """One plan on one device."""

    def __init__(
        self, spec: ModelSpec, precision: str, *, threads: int, nvidia: Nvidia | None = None
    ) -> None:
        del threads  # It computes on the GPU.
        if spec.options:
            raise ConfigError(f"{spec.name}: tensorrt takes no [options]; see [plans].")
        self._gpu = nvidia or open_nvidia()
        self._spec, self._precision = spec, precision
        self._where = f"{spec.name} {precision}"
        self.runtime = f"tensorrt {self._gpu.version}"
        self.memory = self._gpu.device.kind
        self._runtime: Any = None
        self._engine: Any = None
        self._contexts: dict[int, Any] = {}
        self._staging: dict[str, Staging] = {}
        #: Why a profile cannot be used: it did not fit when everything was warmed up.
        self._too_large: dict[int, str] = {}
        try:
            self._open(plan_of(spec, workshop_of(self._gpu), precision))
            self._read_tensors(spec)
            self._warm_up()
            self._keep_within_limit()
        except BaseException:
            self.close()
            raise

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._engine is None:
            raise EngineFailed(f"{self._where}: the engine is closed.")
        shapes = {name: tuple(feeds[name].shape) for name in self._names_in}
        profile = tightest(self._profiles, shapes)
        if profile is None:
            raise EngineRefused(
                f"{self._where}: no profile of its plan takes {_text(shapes)}; it was built for "
                f"{self._profiles[-1].text}.",
                invalid=True,
            )
        if why := self._too_large.get(profile.index):
            raise OutOfMemory(why)
        with self._contexts_are_whole():
            padded = profile.padded(shapes)
            outputs = self._run(profile, feeds, shapes, padded)
        return self._cut_back(outputs, shapes, padded)

    def close(self) -> None:
        """Free everything, in the order that TensorRT asks for: contexts, engine, runtime."""
        if self._contexts:
            with contextlib.suppress(FleetError):
                self._gpu.stream.synchronize()
        self._contexts.clear()
        self._gpu.budget.give_back(self._spec, self._precision)
        self._engine = None
        self._runtime = None
        for staging in self._staging.values():
            staging.close()
        self._staging.clear()

    # -- opening

    def _open(self, plan: bytes) -> None:
        journal = self._gpu.journal
        self._runtime = journal.create(self._gpu.trt.Runtime)
        if self._runtime is None:
            raise self._failed("there is no runtime")
        # Passed on by it to the engine and the contexts.
        self._runtime.error_recorder = journal.recorder
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise self._failed("its plan cannot be loaded")

    def _read_tensors(self, spec: ModelSpec) -> None:
        trt, engine = self._gpu.trt, self._engine
        names = [engine.get_tensor_name(place) for place in range(engine.num_io_tensors)]
        for name in names:
            if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
                raise ConfigError(
                    f"{spec.name}: {name!r} lies on the host and decides shapes; serve this model "
                    'with runtime = "onnxruntime".'
                )
        sides: dict[bool, list[TensorSpec]] = {True: [], False: []}
        for name in names:
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            sides[is_input].append(self._tensor(spec, name))
        self.inputs, self.outputs = tuple(sides[True]), tuple(sides[False])
        self._names_in = [tensor.name for tensor in self.inputs]
        axes = {
            tensor.name: spec.batch_axes_in.get(tensor.name, tensor.batch_axis)
            for tensor in self.inputs
        }
        self._axes_in = axes
        self._axes_out = {
            tensor.name: spec.batch_axes_out.get(tensor.name, tensor.batch_axis)
            for tensor in self.outputs
        }
        self._profiles = [
            self._profile(index, axes) for index in range(engine.num_optimization_profiles)
        ]
        self._staging = {
            tensor.name: Staging(self._gpu.cuda, tensor.dtype)
            for tensor in (*self.inputs, *self.outputs)
        }

    def _tensor(self, spec: ModelSpec, name: str) -> TensorSpec:
        kind = self._engine.get_tensor_dtype(name).name
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise ConfigError(
                f"{spec.name}: {name!r} is {kind}, which numpy cannot hold; export it as float32."
            )
        sizes = _shape(self._engine.get_tensor_shape(name))
        shape = tuple(None if size == -1 else size for size in sizes)
        return TensorSpec(name=name, dtype=dtype, shape=shape, batch_axis=0 if shape else None)

    def _profile(self, index: int, axes: Mapping[str, int | None]) -> PlanProfile:
        ranges = {}
        for tensor in self.inputs:
            least, _usual, largest = self._engine.get_tensor_profile_shape(tensor.name, index)
            ranges[tensor.name] = (_shape(least), _shape(largest))
        scratch = self._engine.get_device_memory_size_for_profile_v2(index)
        return PlanProfile(index=index, ranges=ranges, axes=axes, scratch_bytes=int(scratch))

    def _keep_within_limit(self) -> None:
        stat = self._gpu.trt.EngineStat.TOTAL_WEIGHTS_SIZE
        weights = self.weights_bytes = max(0, int(self._engine.get_engine_stat(stat)))
        self._gpu.budget.take(
            self._spec,
            self._precision,
            weights + sum(staging.nbytes for staging in self._staging.values()),
            scratch_bytes=self._gpu.scratch.nbytes,
        )

    def _warm_up(self) -> None:
        """Run every profile at its largest: kernels are loaded and memory is taken now, so that a
        batch later takes none.

        Larger profiles that do not fit are left out; the ladder goes on with what is smaller.
        """
        fits = False
        for profile in sorted(self._profiles, key=lambda each: each.rows):
            shapes = profile.largest
            feeds = {
                tensor.name: np.zeros(shapes[tensor.name], tensor.dtype) for tensor in self.inputs
            }
            try:
                with self._contexts_are_whole():
                    self._run(profile, feeds, shapes, shapes)
            except OutOfMemory as error:
                if not fits:
                    raise
                self._too_large[profile.index] = str(error)
                said = {"engine": self._where, "rows": profile.rows, "error": str(error)}
                logger.warning("engine.profile_left_out", extra=said)
            else:
                fits = True

    # -- running

    def _run(
        self,
        profile: PlanProfile,
        feeds: Mapping[str, Array],
        shapes: Mapping[str, Shape],
        padded: Mapping[str, Shape],
    ) -> dict[str, Array]:
        """Return the outputs for ``padded`` shapes, as copies."""
        gpu = self._gpu
        gpu.journal.clear()
        context = self._context(profile)
        for name, shape in padded.items():
            if not context.set_input_shape(name, shape):
                raise self._failed(f"input {name!r} may not have shape {list(shape)}")
        if missing := context.infer_shapes():
            raise self._failed(f"shapes of {missing} are not known")
        outputs = {name: self._output_shape(context, name) for name in self._axes_out}
        for name, shape in {**padded, **outputs}.items():
            self._staging[name].reserve(shape)
            if not context.set_tensor_address(name, self._staging[name].address):
                raise self._failed(f"{name!r} cannot be placed")
        context.set_device_memory(gpu.scratch.block(profile.scratch_bytes), gpu.scratch.nbytes)
        for name, array in feeds.items():
            if name in padded:
                _fill(self._staging[name].view(padded[name]), array, shapes[name])
                self._staging[name].to_device(padded[name], gpu.stream)
        if not context.execute_async_v3(int(gpu.stream)):
            raise self._failed("the run was refused")
        for name, shape in outputs.items():
            self._staging[name].to_host(shape, gpu.stream)
        gpu.stream.synchronize()
        return {name: self._staging[name].view(shape).copy() for name, shape in outputs.items()}

    def _context(self, profile: PlanProfile) -> Any:
        """Return the context of a profile, made when it is first needed."""
        if profile.index in self._contexts:
            return self._contexts[profile.index]
        gpu = self._gpu
        strategy = gpu.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            # Nothing but memory can be missing: the plan was loaded.
            raise OutOfMemory(f"{self._where}: no room for a context: {gpu.journal.text()}")
        if not context.set_optimization_profile_async(profile.index, int(gpu.stream)):
            raise self._failed(f"profile {profile.index} cannot be chosen")
        gpu.stream.synchronize()
        self._contexts[profile.index] = context
        return context

    def _output_shape(self, context: Any, name: str) -> Shape:
        shape = _shape(context.get_tensor_shape(name))
        if any(size < 0 for size in shape):
            raise ConfigError(
                f"{self._where}: the values of the inputs decide how large output {name!r} is; "
                'serve this model with runtime = "onnxruntime".'
            )
        return shape

    @contextlib.contextmanager
    def _contexts_are_whole(self) -> Iterator[None]:
        """After an error, end the process if CUDA is lost, else make the contexts anew."""
        try:
            yield
        except Exception:
            # First: work of the failed run may still be under way.
            self._gpu.cuda.check_alive()
            self._contexts.clear()
            raise

    def _cut_back(
        self,
        outputs: dict[str, Array],
        shapes: Mapping[str, Shape],
        padded: Mapping[str, Shape],
    ) -> dict[str, Array]:
        """Return the outputs without the rows that the padding answered."""
        counts = [
            (shapes[name][axis], padded[name][axis])
            for name, axis in self._axes_in.items()
            if axis is not None and shapes[name] != padded[name]
        ]
        if not counts:
            return outputs
        rows, all_rows = counts[0]
        cut = {}
        for name, array in outputs.items():
            axis = self._axes_out[name]
            if axis is None or axis >= array.ndim or array.shape[axis] != all_rows:
                raise EngineRefused(
                    f"{self._where}: output {name!r} of shape {list(array.shape)} has not one part "
                    f"for each of {all_rows} rows.",
                    invalid=False,
                )
            cut[name] = array[(slice(None),) * axis + (slice(rows),)]
        return cut

    def _failed(self, what: str) -> FleetError:
        """Return the error of a call that failed; the journal says why."""
        said = self._gpu.journal.text()
        text = f"{self._where}: {what}: {said}"
        if says_out_of_memory(said):
            return OutOfMemory(text)
        return EngineFailed(text) if not self._contexts else EngineRefused(text, invalid=False)


def _fill(target: Array, array: Array, shape: Shape) -> None:
    """Copy ``array`` to the front of ``target`` and its last row into what is left of it."""
    target[tuple(slice(size) for size in shape)] = array
    for axis, (size, wanted) in enumerate(zip(shape, target.shape, strict=True)):
        if size < wanted:
            last = target.take(range(size - 1, size), axis)
            rest = [slice(None)] * target.ndim
            rest[axis] = slice(size, wanted)
            target[tuple(rest)] = last


def _shape(dims: Any) -> Shape:
    return tuple(int(size) for size in tuple(dims))


def _text(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
