"""An ONNX file becomes a plan: the parser, the profiles, the settings of TensorRT's builder.

The module is given, for `tensorrt` and `tensorrt_rtx` have the same names here; the latter builds
on a machine without a GPU. Precision is in the file: TensorRT 11 takes it as it is written.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from producer.contract.errors import ConfigError, EngineFailed, FleetError, OutOfMemory
from workers.engines.out_of_memory import says_out_of_memory
from workers.engines.trt_journal import Journal
from workers.models import ModelSpec
from workers.plans.profiles import Profile, profiles

#: Told what is done, from 0 to 1.
Tell = Callable[[float], None]

#: How often a thread that waits for the build looks at signals.
_LOOK_EVERY_S: Final = 0.2

#: How long a build may take to notice that it is no longer wanted.
_STOPS_WITHIN_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A plan, and what was measured on the way to it."""

    plan: bytes
    timing_cache: bytes


def build(
    trt: Any,
    journal: Journal,
    spec: ModelSpec,
    onnx: Path,
    *,
    timing_cache: bytes = b"",
    tell: Tell = lambda _done: None,
) -> Built:
    """Return the plan of ``onnx`` as ``spec`` wants it; what cannot be built is one clear error.

    An exception in the calling thread, such as a signal's, ends the build.
    """
    making = _Making(trt, journal, spec, onnx, timing_cache=timing_cache, tell=tell)
    # TensorRT cannot be interrupted while it has this thread, and no signal's handler would run.
    thread = threading.Thread(target=making.run, name="plan", daemon=True)
    thread.start()
    # Not `join`: a thread whose join was interrupted passes for one that has stopped.
    try:
        while not making.ended.wait(_LOOK_EVERY_S):
            pass
    except BaseException:
        making.unwanted.set()
        making.ended.wait(_STOPS_WITHIN_S)
        raise
    if making.error is not None:
        raise making.error
    assert making.built is not None
    return making.built


class _Making:
    """One build in a thread of its own."""

    def __init__(
        self,
        trt: Any,
        journal: Journal,
        spec: ModelSpec,
        onnx: Path,
        *,
        timing_cache: bytes,
        tell: Tell,
    ) -> None:
        self._trt, self._journal = trt, journal
        self._spec, self._onnx = spec, onnx
        self._timing_cache, self._tell = timing_cache, tell
        self.unwanted, self.ended = threading.Event(), threading.Event()
        self.built: Built | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.built = self._build()
        except FleetError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - a binding may raise anything
            text = f"{type(error).__name__}: {error}"
            self.error = EngineFailed(f"{self._onnx}: TensorRT cannot build it: {text}")
        finally:
            self.ended.set()

    def _build(self) -> Built:
        builder = self._journal.create(self._trt.Builder)
        if builder is None:
            raise self._failed("there is no builder")
        # No error recorder: a parser whose network has one crashes the process when it is freed
        # (tensorrt-rtx 1.7). Without one, errors are in the log.
        network = builder.create_network(0)
        if network is None:
            raise self._failed("there is no network")
        parser = self._trt.OnnxParser(network, self._journal.logger)
        self._parse(parser, network)
        config = self._config(builder)
        for profile in self._profiles(network):
            self._add(builder, config, profile)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise self._failed("there is no plan")
        cache = config.get_timing_cache()
        measured = cache.serialize() if cache is not None else None
        return Built(plan=bytes(plan), timing_cache=bytes(measured) if measured else b"")

    def _parse(self, parser: Any, network: Any) -> None:
        parsed = parser.parse_from_file(str(self._onnx))
        errors = [parser.get_error(place) for place in range(parser.num_errors)]
        if errors or not parsed:
            said = "; ".join(_said(error) for error in errors[:3]) or self._journal.text()
            raise ConfigError(f"{self._onnx}: TensorRT cannot read it: {said}")
        # An empty file, and one that is no ONNX at all, may pass for a network without anything.
        if network.num_outputs == 0:
            raise ConfigError(f"{self._onnx}: holds no model: it has no output.")

    def _config(self, builder: Any) -> Any:
        trt, options = self._trt, self._spec.plans
        config = builder.create_builder_config()
        if options.tf32:
            config.set_flag(trt.BuilderFlag.TF32)
        else:
            # It is on by default: an fp32 engine would not be one.
            config.clear_flag(trt.BuilderFlag.TF32)
        if options.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        config.builder_optimization_level = options.optimization_level
        cache = config.create_timing_cache(self._timing_cache)
        if cache is None or not config.set_timing_cache(cache, False):
            # Measured by another version or device; it is measured again.
            config.set_timing_cache(config.create_timing_cache(b""), False)
        config.progress_monitor = _monitor(trt, self._tell, self.unwanted)
        return config

    def _profiles(self, network: Any) -> Sequence[Profile]:
        inputs = {}
        for place in range(network.num_inputs):
            tensor = network.get_input(place)
            if tensor.is_shape_tensor:
                raise ConfigError(
                    f"{self._onnx}: the values of input {tensor.name!r} decide shapes; TensorRT "
                    'needs a plan for each of them. Serve it with runtime = "onnxruntime".'
                )
            inputs[tensor.name] = tuple(
                None if size == -1 else int(size) for size in tuple(tensor.shape)
            )
        outputs = [network.get_output(place).name for place in range(network.num_outputs)]
        return profiles(self._spec, inputs, outputs)

    def _add(self, builder: Any, config: Any, profile: Profile) -> None:
        made = builder.create_optimization_profile()
        for name, sizes in profile.items():
            made.set_shape(name, sizes.least, sizes.usual, sizes.largest)
        if not made or config.add_optimization_profile(made) < 0:
            raise self._failed(f"a profile is refused: {profile}")

    def _failed(self, what: str) -> FleetError:
        """Return the error of a build that gave nothing; TensorRT's own words say why."""
        if self.unwanted.is_set():
            return EngineFailed(f"{self._onnx}: its build was ended.")
        text = f"{self._onnx}: TensorRT built nothing ({what}): {self._journal.text()}"
        if says_out_of_memory(self._journal.text()):
            return OutOfMemory(text)
        limit = self._spec.plans.workspace_bytes
        if limit is not None and "workspace" in text:
            text += f". workspace_bytes below [plans] is {limit}; raise it or leave it out."
        return ConfigError(text)


def _said(error: Any) -> str:
    """Return a parser's error in words: what, and at which node."""
    node = error.node_name() or (f"node {error.node()}" if error.node() >= 0 else "")
    where = f" at {node} ({error.node_operator()})" if node else ""
    return f"{error.desc()}{where}"


def _monitor(trt: Any, tell: Tell, unwanted: threading.Event) -> Any:
    """Return what TensorRT tells of its progress, and asks whether to go on."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._outermost, self._steps = "", 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if not parent_phase:
                self._outermost, self._steps = phase_name, num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self._outermost:
                tell(min(1.0, (step + 1) / max(1, self._steps)))
            return not unwanted.is_set()

        def phase_finish(self, phase_name: str) -> None:
            """The next phase, or the end, says more."""

    return Monitor()
