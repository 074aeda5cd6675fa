"""What a model is: ``configs/models/<name>/model.toml`` read into a ``ModelSpec``.

Opens no engine. A mistake in a file is one line that names the file, the key and the nearest
known key. What only the engine knows (its tensors, whether rows mix) is for ``probe.py``.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from producer.contract.errors import ConfigError
from producer.contract.names import is_model_name
from workers.batching.ladder import Step, parse_step
from workers.batching.padding import Pad
from workers.build.options import BuildOptions, read_build
from workers.engine_files import EngineFiles, served, source
from workers.plans.options import PlanOptions, ShapeRange, read_plan_options
from workers.tables import Table, nearest
from workers.tensor_tables import ProbeHint, read_inputs, read_outputs

MODEL_FILE: Final = "model.toml"
ONNXRUNTIME: Final = "onnxruntime"
ONNXRUNTIME_CUDA: Final = "onnxruntime-cuda"
ONNXRUNTIME_TENSORRT: Final = "onnxruntime-tensorrt"
TENSORRT: Final = "tensorrt"
#: TensorRT where a GPU and TensorRT are there, else ONNX Runtime; `workers.engines.choice` decides.
AUTO: Final = "auto"
#: What runs ONNX files; any other runtime is ``module:Class``, an engine of one's own.
RUNTIMES: Final = (AUTO, TENSORRT, ONNXRUNTIME, ONNXRUNTIME_CUDA, ONNXRUNTIME_TENSORRT)
_MIB: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One input or output of an engine."""

    name: str
    #: numpy's name of it, such as ``float32``.
    dtype: str
    #: ``None`` where the engine takes any size.
    shape: tuple[int | None, ...]
    #: The axis that counts rows; ``None`` when the tensor belongs to the batch as a whole.
    batch_axis: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model as its file describes it."""

    name: str
    folder: Path
    #: One of `RUNTIMES`, or ``module:Class`` for an engine of one's own.
    runtime: str
    #: The file of each precision; ``None`` where the engine needs none.
    engines: Mapping[str, Path | None]
    #: The precision that answers as long as memory suffices.
    precision: str
    #: Rows in one run of the engine, at most.
    max_batch_size: int = 32
    #: Bytes of the inputs of one run, at most (one row always runs).
    max_batch_bytes: int = 64 * _MIB
    #: Elements of the largest input of one run, padding included, at most; ``None``: any number.
    max_batch_elements: int | None = None
    #: How long a free instance waits for more jobs; 0: it runs what waits.
    max_queue_delay_s: float = 0.0
    #: A batch that runs longer is ended with its process; ``None``: the fleet's `batch_timeout_s`.
    time_limit_s: float | None = None
    #: Declared axes only. An input or output that is missing here has axis 0 by assumption.
    batch_axes_in: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    batch_axes_out: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    #: How inputs are padded, so that jobs of different lengths share a run; by input.
    pads: Mapping[str, Pad] = dataclasses.field(default_factory=dict)
    probe_hints: Mapping[str, ProbeHint] = dataclasses.field(default_factory=dict)
    #: The sizes of free axes that TensorRT makes a plan for, by input.
    shape_ranges: Mapping[str, ShapeRange] = dataclasses.field(default_factory=dict)
    #: Weights and activations of all engines of this model in one process; ``None``: no limit.
    memory_limit_bytes: int | None = None
    #: The models of a process that share the limit, where it is the worker's; else it is this
    #: model's alone.
    memory_shared_by: tuple[str, ...] = ()
    #: The first piece the limited arena takes; small models never fill the usual 1 MiB.
    memory_first_chunk_bytes: int = _MIB
    #: What is tried in turn when a batch ran out of memory, such as ``fp16/2``.
    ladder: tuple[str, ...] = ("fp16/2",)
    #: Whether the largest batches are found when the model is loaded, by running them.
    find_ceiling: bool = False
    #: How far answers may differ between batch sizes, relative to the largest of them.
    tolerance: float = 1e-3
    #: Passed to the engine as they are.
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    #: The class around the model, as ``module:Class``; ``None``: inputs and outputs are arrays.
    code: str | None = None
    #: Threads of `preprocess` in one process, and as many of `postprocess`.
    hook_threads: int = 1
    #: How `fleet build` makes what [engines] does not list.
    build: BuildOptions = dataclasses.field(default_factory=BuildOptions)
    #: How TensorRT's plans of it are made.
    plans: PlanOptions = dataclasses.field(default_factory=PlanOptions)

    @property
    def steps(self) -> tuple[Step, ...]:
        """Return the ladder, parsed."""
        return tuple(parse_step(step) for step in self.ladder)


def load_models(config_dir: Path, names: Iterable[str] | None = None) -> dict[str, ModelSpec]:
    """Return the models of ``config_dir``/models by name: all of them, or those named."""
    root = Path(config_dir) / "models"
    return {name: load_model(root / name) for name in model_names(config_dir, names)}


def model_names(config_dir: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the folders in ``config_dir``/models: all of them, or those named."""
    root = Path(config_dir) / "models"
    if not root.is_dir():
        raise ConfigError(f"{root}: there is no such folder; it holds one folder for each model.")
    there = sorted(
        folder.name
        for folder in root.iterdir()
        if folder.is_dir() and not folder.name.startswith((".", "_"))
    )
    wanted = sorted(set(names)) if names is not None else there
    if not wanted:
        raise ConfigError(f"{root}: no model to serve; put one into {root}/<name>/{MODEL_FILE}.")
    for name in wanted:
        if name not in there:
            raise ConfigError(f"{root}: there is no model {name!r}.{nearest(name, there)}")
    return wanted


def config_words(config_dir: Path) -> str:
    """Return how a worker says which folder it reads."""
    return f"{socket.gethostname()}:{os.path.realpath(config_dir)}"


def load_model(folder: Path) -> ModelSpec:
    """Return the model that ``folder`` describes, as it is served; its name is the folder's."""
    return _read_model(folder, served)


def load_source(folder: Path) -> ModelSpec:
    """Return the same model as it is built: its one engine is the file that variants are made of.

    Variants that the file asks for and that nobody has built yet are no mistake here.
    """
    # Variants are looked at where every machine can run them.
    return dataclasses.replace(_read_model(folder, source), runtime=ONNXRUNTIME)


def _read_model(folder: Path, choose: Callable[..., EngineFiles]) -> ModelSpec:
    if not is_model_name(folder.name):
        raise ConfigError(
            f"{folder}: a model's folder is named with letters, digits, - and _, at most 64."
        )
    table = Table.read(folder / MODEL_FILE)
    runtime = _runtime(table)
    build = read_build(table, folder)
    engines = choose(table, folder, build, takes_onnx=runtime in RUNTIMES)
    first_chunk_bytes = table.whole("memory_first_chunk_bytes", _MIB, least=256)
    max_batch_size = table.whole("max_batch_size", 32, least=1)
    inputs = read_inputs(table)
    spec = ModelSpec(
        name=folder.name,
        folder=folder,
        runtime=runtime,
        engines=engines.files,
        precision=engines.precision,
        max_batch_size=max_batch_size,
        max_batch_bytes=table.whole("max_batch_bytes", 64 * _MIB, least=1),
        max_batch_elements=_most_elements(table),
        max_queue_delay_s=table.number("max_queue_delay_s", 0.0),
        time_limit_s=_time_limit(table),
        batch_axes_in=inputs.batch_axes,
        batch_axes_out=read_outputs(table),
        pads=inputs.pads,
        probe_hints=inputs.hints,
        shape_ranges=inputs.ranges,
        memory_limit_bytes=_memory_limit(table, first_chunk_bytes),
        memory_first_chunk_bytes=first_chunk_bytes,
        ladder=engines.ladder,
        find_ceiling=table.switch("find_ceiling", default=False),
        tolerance=table.number("tolerance", 1e-3),
        options=dict(_options(table)),
        code=_code(table),
        hook_threads=table.whole("hook_threads", 1, least=1),
        build=build,
        plans=read_plan_options(table, max_batch_size=max_batch_size),
    )
    table.finish()
    return spec


def _runtime(table: Table) -> str:
    runtime = table.text("runtime", AUTO)
    if runtime not in RUNTIMES and not _names_a_class(runtime):
        raise table.error(
            "runtime",
            f'must be "module:Class" or one of ours, not {runtime!r}.{nearest(runtime, RUNTIMES)}',
        )
    return runtime


def _code(table: Table) -> str | None:
    code = table.text("code", "module:Class") if "code" in table else None
    if code is not None and not _names_a_class(code):
        raise table.error("code", f'must be "module:Class", a class beside the file, not {code!r}.')
    return code


def _names_a_class(text: str) -> bool:
    module, colon, name = text.partition(":")
    return bool(module and colon and name.isidentifier())


def _memory_limit(table: Table, first_chunk_bytes: int) -> int | None:
    if "memory_limit_bytes" not in table:
        table.raw("memory_limit_bytes")
        return None
    limit = table.whole("memory_limit_bytes", 0, least=1)
    if limit <= first_chunk_bytes:
        raise table.error(
            "memory_limit_bytes",
            f"is {limit}, not above memory_first_chunk_bytes ({first_chunk_bytes}); "
            "nothing would ever fit.",
        )
    return limit


def _most_elements(table: Table) -> int | None:
    most = table.whole("max_batch_elements", 1, least=1)
    return most if "max_batch_elements" in table else None


def _time_limit(table: Table) -> float | None:
    limit_s = table.number("time_limit_s", 0.0)
    if "time_limit_s" not in table:
        return None
    if limit_s < 1:
        raise table.error("time_limit_s", f"is {limit_s:g}; at least 1 second is needed.")
    return limit_s


def _options(table: Table) -> Mapping[str, object]:
    options = table.table("options")
    return {name: options.raw(name) for name in options.names()}
