"""The process in which a model is tried: opened, probed, timed. A model that kills it harms nobody.

    python -m workers.adding.trial MODEL.onnx NAME THREADS HINTS RESULT.json

HINTS are those of `workers.adding.hints`, as JSON; the result is {"found": ...}, or
{"refused": why}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from producer.contract.errors import ConfigError, EngineFailed, FleetError
from workers.adding.axes import Axes, grown_axes, guesses
from workers.adding.found import Found, Port
from workers.adding.graph import Graph, Size, read_graph
from workers.adding.hints import Hints, from_json, widened
from workers.adding.progress import Tell
from workers.adding.speed import Timing, time_batches
from workers.batching.pieces import Piece
from workers.batching.stacking import Array, stack
from workers.engines.base import Engine, open_engine
from workers.engines.choice import choice
from workers.error_text import one_line
from workers.models import AUTO, ONNXRUNTIME, ModelSpec, TensorSpec
from workers.probing.difference import tolerance_of
from workers.probing.probe import Batching, declared, probe
from workers.tensor_tables import ProbeHint

#: What the probe is told, and model.toml too, of a file in integers: below single precision it is
#: ten times as lenient, and rows that influence each other by one step of 127 would pass.
INT8_TOLERANCE: Final = 1e-4

#: Where the number of rows moves answers to rows of 0 and 1 further, they share no run.
_MOST_MOVED: Final = 0.05

#: What onnxruntime says of files that are older or newer than it.
_OPSET: Final = re.compile(r"model IR|ValidateOpset|Could not find an implementation")

#: Integers that hold a byte's values.
_INTEGERS: Final = ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """One way to count rows, and what the probe says of it."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batching: Batching

    @property
    def axes_in(self) -> Axes:
        return {tensor.name: tensor.batch_axis for tensor in self.inputs}


def try_model(
    graph: Graph, name: str, hints: Hints, *, threads: int, tell: Tell = lambda _: None
) -> Found:
    """Return how the model runs; FleetError says why it cannot be served.

    ``tell`` is told what is tried.
    """
    spec = _spec(graph, name, hints)
    tell("opening it")
    engine = _open(spec, graph, threads=threads)
    try:
        tell("running it with one row and with two")
        guess, wider, moved = _guessed(engine, spec, graph)
        timings, untimed = _timed(engine, spec, guess, tell=tell)
        instead = choice(dataclasses.replace(spec, runtime=AUTO)).runtime
        return Found(
            inputs=_ports(guess.inputs, graph.inputs, guess.batching.row),
            outputs=_ports(guess.outputs, graph.outputs, {}),
            precision=graph.precision,
            batches=guess.batching.max_rows > 1,
            why=guess.batching.why,
            whole=guess.batching.whole,
            timings=timings,
            untimed=untimed,
            runtime=engine.runtime,
            threads=threads,
            other_runtime="" if instead == ONNXRUNTIME else instead,
            wider=wider,
            tolerance=_tolerance(spec, moved) if wider else spec.tolerance,
        )
    finally:
        engine.close()


def _spec(graph: Graph, name: str, hints: Hints) -> ModelSpec:
    """Return the model as it is tried: in the runtime that is there on any machine."""
    spec = ModelSpec(
        name=name,
        folder=graph.path.parent,
        runtime=ONNXRUNTIME,
        engines={graph.precision: graph.path},
        precision=graph.precision,
        ladder=("same/2",),
        probe_hints=hints,
    )
    return dataclasses.replace(spec, tolerance=INT8_TOLERANCE) if spec.precision == "int8" else spec


def _guessed(
    engine: Engine, spec: ModelSpec, graph: Graph
) -> tuple[_Guess, tuple[str, ...], float]:
    """Return how rows are counted, the inputs that were tried with larger integers for it, and how
    far the number of rows had moved answers before.
    """
    guess = _first_that_batches(engine, spec, graph)
    moved = guess.batching.moved_by
    if not 0 < moved <= _MOST_MOVED:
        return guess, (), moved
    return (*_with_wider_integers(engine, spec, graph, guess), moved)


def _timed(
    engine: Engine, spec: ModelSpec, guess: _Guess, *, tell: Tell
) -> tuple[tuple[Timing, ...], str]:
    """Return what runs of each size take, and why there are no larger ones."""
    row, most_rows = guess.batching.row, guess.batching.max_rows
    if row_bytes := sum(array.nbytes for array in row.values()):
        most_rows = max(1, min(most_rows, spec.max_batch_bytes // row_bytes))

    def run(rows: int) -> None:
        tell(f"timing runs of {rows} row{'s' if rows > 1 else ''}")
        engine.run(_repeated(row, guess.axes_in, rows))

    return time_batches(run, most_rows=most_rows)


def _open(spec: ModelSpec, graph: Graph, *, threads: int) -> Engine:
    try:
        return open_engine(spec, spec.precision, threads=threads)
    except ConfigError as error:
        if not graph.foreign and _OPSET.search(str(error)):
            raise ConfigError(
                f"{graph.path}: this onnxruntime does not take its opset or IR version. Export it "
                f"with another, such as opset 17, or upgrade onnxruntime. {error}"
            ) from error
        if not graph.foreign:
            raise
        raise ConfigError(
            f"{graph.path}: onnxruntime does not know all of its operators; ONNX does not define "
            f"{', '.join(graph.foreign)}. Export the model with standard operators. {error}"
        ) from error


def _first_that_batches(engine: Engine, spec: ModelSpec, graph: Graph) -> _Guess:
    """Return the first guess whose rows may share a run; else what holds without a declaration.

    A guess whose rows may not is never declared: a job would be cut along an axis that may count
    something else.
    """
    undeclared, refused = None, None
    try:
        undeclared = _probed(engine, spec, engine.inputs, engine.outputs)
    except EngineFailed as error:
        refused = error
    if undeclared is not None and undeclared.batching.max_rows > 1:
        return undeclared
    for axes_in in guesses(graph.inputs):
        try:
            inputs = declared(engine.inputs, axes_in, side="input", model=spec.name)
            found = _probed(engine, spec, inputs, engine.outputs)
            if found.batching.max_rows == 1:
                found = _with_grown_outputs(engine, spec, found)
        except Exception:  # noqa: BLE001, S112 - a guess that does not even run was a wrong one
            continue
        if found.batching.max_rows > 1:
            return found
    if undeclared is None:
        raise ConfigError(_how_to_hint(graph, refused)) from refused
    return undeclared


def _with_wider_integers(
    engine: Engine, spec: ModelSpec, graph: Graph, guess: _Guess
) -> tuple[_Guess, tuple[str, ...]]:
    """Return a guess that batches with integers up to a byte's largest, and the inputs that had
    them; or ``guess``, where there is none.

    Rows of zeros and ones are unlike what a model was trained on: where it has nothing to tell them
    apart by, the last bits of a sum decide. Asked only where no row changes another's answer.
    """
    names = tuple(
        tensor.name
        for tensor in engine.inputs
        if tensor.dtype in _INTEGERS
        and tensor.batch_axis is not None
        and (hint := spec.probe_hints.get(tensor.name, ProbeHint())).largest == 1
        and hint.least is None
    )
    try:
        spec = dataclasses.replace(spec, probe_hints=widened(spec.probe_hints, names))
        found = _first_that_batches(engine, spec, graph)
    except FleetError:
        return guess, ()
    return (found, names) if found.batching.max_rows > 1 else (guess, ())


def _tolerance(spec: ModelSpec, moved: float) -> float:
    """Return a tolerance that allows what was seen, rounded up to one digit."""
    seen = moved * spec.tolerance / tolerance_of(spec, spec.precision)
    digit = 10.0 ** math.floor(math.log10(seen))
    return max(spec.tolerance, round(math.ceil(seen / digit) * digit, 12))


def _how_to_hint(graph: Graph, refused: EngineFailed | None) -> str:
    """Return what to do about a model that took no row of those made up for it."""
    name, sizes = next(iter(graph.inputs.items()))
    shape = ",".join(str(size if isinstance(size, int) else 1) for size in sizes)
    why = one_line(refused.__cause__) if refused is not None and refused.__cause__ else ""
    return (
        "the model takes no row of made-up values. Say what a row looks like: "
        f"--probe-shape {name}={shape or 1} is its whole shape, --probe-max {name}=1 the largest "
        f"value, --probe-min {name}=0 the least, for each input that needs it. {why}"
    )


def _with_grown_outputs(engine: Engine, spec: ModelSpec, found: _Guess) -> _Guess:
    """Return the guess with the batch axes that outputs show when one row more is run."""
    row = found.batching.row
    one, two = (engine.run(_repeated(row, found.axes_in, rows)) for rows in (1, 2))
    outputs = declared(engine.outputs, grown_axes(one, two), side="output", model=spec.name)
    return _probed(engine, spec, found.inputs, outputs)


def _probed(
    engine: Engine,
    spec: ModelSpec,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
) -> _Guess:
    batching = probe(engine.run, spec, inputs=inputs, outputs=outputs, precision=spec.precision)
    return _Guess(inputs=inputs, outputs=outputs, batching=batching)


def _repeated(row: Mapping[str, Array], axes: Axes, rows: int) -> dict[str, Array]:
    pieces = [Piece(job=0, start=0, stop=1)] * rows
    return stack([row], pieces, axes) if rows > 1 else dict(row)


def _ports(
    tensors: tuple[TensorSpec, ...],
    sizes: Mapping[str, tuple[Size, ...]],
    row: Mapping[str, Array],
) -> tuple[Port, ...]:
    return tuple(
        Port(
            name=tensor.name,
            dtype=tensor.dtype,
            sizes=sizes[tensor.name],
            batch_axis=tensor.batch_axis,
            tried=np.shape(row[tensor.name]) if tensor.name in row else (),
        )
        for tensor in tensors
    )


def main(path: str, name: str, threads: str, hints: str, result: str) -> None:
    """Try the model and write what came of it."""
    said: dict[str, object]
    try:
        graph, told = read_graph(Path(path)), from_json(hints)
        tell = _teller(stage_of(Path(result)))
        said = {"found": try_model(graph, name, told, threads=int(threads), tell=tell).as_json()}
    except FleetError as error:
        said = {"refused": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever a model does, the command says it
        said = {"refused": one_line(error)}
    Path(result).write_text(json.dumps(said), encoding="utf-8")


def stage_of(result: Path) -> Path:
    """Return the file that says what is tried at the moment."""
    return result.with_name("stage.txt")


def _teller(file: Path) -> Tell:
    last = ""

    def tell(text: str) -> None:
        nonlocal last
        # Runs are timed: a file is not written in each.
        if text != last:
            last = text
            file.write_text(text, encoding="utf-8")

    return tell


if __name__ == "__main__":
    main(*sys.argv[1:])
