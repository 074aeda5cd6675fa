"""A file of a build, opened in the engine that will serve it, and run over many rows."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from workers.batching.stacking import Array
from workers.build.rows import Rows
from workers.engines.base import Engine, open_engine
from workers.models import ModelSpec, TensorSpec
from workers.probing.probe import Batching, declared, probe

#: How long each batch size is timed; the fastest run counts.
_TIMED_S: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One file in an engine, after the load-time probe."""

    engine: Engine
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    batching: Batching

    @property
    def fixed_rows(self) -> int:
        """Return how many rows the file takes and no other number; 1 where it takes any."""
        sizes = [
            tensor.shape[tensor.batch_axis]
            for tensor in self.inputs
            if tensor.batch_axis is not None
        ]
        return max((size for size in sizes if size is not None), default=1)

    @property
    def rows_a_run(self) -> int:
        """Return how many rows run together."""
        return max(self.fixed_rows, self.batching.max_rows)

    def answers(self, rows: Rows, *, at_a_time: int) -> Iterator[dict[str, Array]]:
        """Yield every output for ``at_a_time`` rows at a time, run as the engine allows."""
        for part in rows.batches(at_a_time):
            counts = [
                value.shape[axis]
                for name, value in part.items()
                if (axis := rows.axes[name]) is not None
            ]
            piece = dataclasses.replace(rows, inputs=part, count=counts[0] if counts else 1)
            yield self._joined([self.engine.run(feeds) for feeds in piece.batches(self.rows_a_run)])

    def rows_per_s(self, feeds: Mapping[str, Array], rows: int) -> float:
        """Return how many rows a second are answered when ``rows`` run together."""
        self.engine.run(feeds)
        fastest, deadline = float("inf"), time.perf_counter() + _TIMED_S
        while (began := time.perf_counter()) < deadline:
            self.engine.run(feeds)
            fastest = min(fastest, time.perf_counter() - began)
        return rows / fastest

    def _joined(self, runs: list[dict[str, Array]]) -> dict[str, Array]:
        if len(runs) == 1:
            return runs[0]
        axes = {tensor.name: tensor.batch_axis for tensor in self.outputs}
        return {
            name: np.concatenate([run[name] for run in runs], axis=axes[name] or 0)
            for name in runs[0]
        }


@contextlib.contextmanager
def opened(spec: ModelSpec, path: Path, precision: str, *, threads: int) -> Iterator[Opened]:
    """Open ``path`` as one precision of ``spec`` for the length of the block, and probe it."""
    alone = dataclasses.replace(
        spec,
        engines={precision: path},
        precision=precision,
        ladder=(f"{precision}/2",),
        memory_limit_bytes=None,
    )
    engine = open_engine(alone, precision, threads=threads)
    try:
        inputs = declared(engine.inputs, spec.batch_axes_in, side="input", model=spec.name)
        outputs = declared(engine.outputs, spec.batch_axes_out, side="output", model=spec.name)
        batching = probe(engine.run, alone, inputs=inputs, outputs=outputs, precision=precision)
        yield Opened(engine=engine, inputs=inputs, outputs=outputs, batching=batching)
    finally:
        engine.close()
