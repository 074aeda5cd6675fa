"""The model side of an instance: jobs in, one outcome for each job out.

It knows nothing of Redis or Celery. A fault of one job ends that job alone: a refused batch
is run in halves, then job by job; a batch that ran out of memory goes down the model's ladder.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from producer.contract.errors import OutOfMemory
from workers.answering import Answering, Counters, as_dtypes
from workers.batching.limits import RunLimits
from workers.batching.padding import widened
from workers.batching.pieces import take, whole_jobs
from workers.engines.base import Engine, import_runtime
from workers.engines.resident import ResidentEngines
from workers.error_text import one_line
from workers.hooks import Hooks
from workers.memory.ceilings import Ceilings
from workers.memory.largest_batch import find_ceilings
from workers.memory.memory_kind import memory_kind
from workers.memory.resident_memory import grown_bytes, resident_bytes
from workers.models import ModelSpec, TensorSpec
from workers.prepared import Prepared, check_lengths, prepare, shape_text
from workers.probing.probe import Batching, declared, probe, strictest
from workers.progress import Outcome, Progress, Work, outcome, works

__all__ = ["Counters", "ModelRunner", "Outcome", "Prepared"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """All engines of one model, loaded and probed. ``run`` is called from one thread;
    ``prepare`` may run beside it in another."""

    def __init__(
        self,
        spec: ModelSpec,
        engines: ResidentEngines,
        batching: Batching,
        *,
        load_s: float,
        memory_bytes: int | None = None,
    ) -> None:
        self.spec = spec
        #: The code around the model, where its file names any.
        self.hooks: Hooks | None = None
        self._engines = engines
        self._batching = batching
        self._load_s = load_s
        main = engines[spec.precision]
        self.runtime = main.runtime
        #: What loading it added to this process; a GPU's memory is not counted.
        self._memory_bytes = memory_bytes if main.memory == "cpu" else None
        #: Ceilings are shared by instances that say the same here.
        self.memory_kind = memory_kind(spec, main)
        self.why_runtime = main.why_runtime
        self._inputs = _inputs(spec, main)
        self._outputs = _outputs(spec, main)
        self._axes_in = {tensor.name: tensor.batch_axis for tensor in self._inputs}
        self._axes_out = {tensor.name: tensor.batch_axis for tensor in self._outputs}
        self._answering = Answering(
            spec, engines, batching, inputs=self._inputs, outputs=self._outputs
        )
        self._limits = RunLimits(
            max_rows=batching.max_rows,
            max_bytes=spec.max_batch_bytes,
            max_elements=spec.max_batch_elements,
        )

    @classmethod
    def load(cls, spec: ModelSpec, *, threads: int) -> ModelRunner:
        """Open every engine of ``spec`` and run it.

        ``ConfigError`` or ``EngineFailed`` says why that cannot be. The probe is the warm-up as
        well: nothing larger is run before a job asks for it.
        """
        started = time.perf_counter()
        # A library is all models' of the process.
        import_runtime(spec)
        before = resident_bytes()
        engines = ResidentEngines(spec, threads=threads)
        try:
            found = [
                probe(
                    functools.partial(engines.run, precision),
                    spec,
                    inputs=_inputs(spec, engines[precision]),
                    outputs=_outputs(spec, engines[precision]),
                    precision=precision,
                    # What a GPU reads beyond a table is undefined, and may end the process.
                    checks_numbers=engines[precision].memory == "cpu",
                )
                for precision in engines
            ]
        except BaseException:
            engines.close()
            raise
        return cls(
            spec,
            engines,
            strictest(found),
            load_s=time.perf_counter() - started,
            memory_bytes=grown_bytes(before),
        )

    @property
    def counters(self) -> Counters:
        """Return what was done since it was taken last."""
        return self._answering.counters

    @property
    def ceilings(self) -> Ceilings:
        return self._answering.ceilings

    @property
    def reopened(self) -> int:
        """Return how many engines were opened anew because memory broke them."""
        return self._engines.reopened

    def take_counters(self) -> Counters:
        """Return what was done since this was asked last."""
        done, self._answering.counters = self._answering.counters, Counters()
        done.reopened, self._engines.reopened = self._engines.reopened, 0
        return done

    @property
    def weights_bytes(self) -> dict[str, int]:
        """Return what the weights of each engine take; where nobody measured it, its file."""
        files = self.spec.engines
        return {
            f"{self.spec.name} in {precision}": self._engines[precision].weights_bytes
            or (path.stat().st_size if (path := files[precision]) else 0)
            for precision in self._engines
        }

    def run_one_row(self) -> None:
        """Run the probe's row in each precision; OutOfMemory says that it no longer fits."""
        for precision in self._engines:
            inputs = self._engines[precision].inputs
            self._engines.run(precision, as_dtypes(self._batching.row, inputs))

    def find_ceilings(self) -> None:
        """Find the largest batches by running them, where the model's file asks for it."""
        if not self.spec.find_ceiling or self.max_rows == 1:
            return
        one = self.prepare(as_dtypes(self._batching.row, self._inputs))
        (work,) = self._works([one], [Progress(precision=self.spec.precision)])
        row, limit, sizes = widened(work.jobs[0].arrays, work.fills), work.limit, work.sizes
        try:
            for precision, rows in find_ceilings(self._engines, row, self._axes_in, limit):
                where = {"model": self.spec.name, "precision": precision, "rows": rows}
                logger.info("engine.ceiling", extra=where)
                if rows < limit or precision in self.ceilings.of(sizes):
                    self.ceilings.found(sizes, precision, rows)
        except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
            # Jobs find out what fits; what else is wrong with a large batch is not known to be so.
            said = {"model": self.spec.name, "error": one_line(error)}
            logger.warning("engine.ceiling_unfound", extra=said)

    @property
    def max_rows(self) -> int:
        """Return how many rows one run may hold, after the probe."""
        return self._batching.max_rows

    @property
    def why(self) -> str:
        """Return why that is less than the model's file asks for, or nothing."""
        unpadded = self._batching.why_unpadded
        padding = f"no padding: {unpadded}" if unpadded else ""
        return "; ".join(filter(None, (self._batching.why, padding)))

    def describe(self) -> dict[str, Any]:
        """Return what people want to know about the loaded model, safe for JSON."""
        return {
            "model": self.spec.name,
            "runtime": self.runtime,
            "why_runtime": self.why_runtime,
            "precision": self.spec.precision,
            "engines": {
                precision: path.name if path else None
                for precision, path in self.spec.engines.items()
            },
            "ladder": list(self.spec.ladder),
            "hooks": self.hooks.names if self.hooks else [],
            "max_rows": self.max_rows,
            "max_batch_size": self.spec.max_batch_size,
            "max_batch_elements": self.spec.max_batch_elements,
            "padding": {name: pad.text for name, pad in self._batching.padding.pads.items()},
            "why": self.why,
            "whole_jobs": self._batching.whole,
            "memory_limit_bytes": self.spec.memory_limit_bytes,
            "memory_kind": self.memory_kind,
            "memory_bytes": self._memory_bytes,
            "ceilings": self.ceilings.lowest(),
            "load_s": round(self._load_s, 3),
            "inputs": {t.name: f"{t.dtype} {shape_text(t)}" for t in self._inputs},
            "outputs": {t.name: f"{t.dtype} {shape_text(t)}" for t in self._outputs},
        }

    def close(self) -> None:
        if self.hooks:
            self.hooks.close()
        self._engines.close()

    def prepare(self, inputs: Mapping[str, object]) -> Prepared:
        """Return one job's inputs as checked arrays; ``BadRequest`` says what is wrong."""
        try:
            prepared = prepare(inputs, self._inputs, exact=self._batching.whole)
        except MemoryError as error:
            raise OutOfMemory(f"{self.spec.name}: the inputs do not fit in memory.") from error
        check_lengths(prepared.arrays, self._batching.padding)
        return prepared

    def run(self, jobs: Sequence[Prepared]) -> list[Outcome]:
        """Return the outcome of each job, in order, whatever happens to the others."""
        progress = [Progress(precision=self.spec.precision) for _ in jobs]
        for work in self._works(jobs, progress):
            rest = whole_jobs(work.units)
            while rest:
                batch, rest = take(rest, work.limit)
                self._answering.answer(work, batch)
        return [outcome(self.spec.name, done, self._axes_out) for done in progress]

    def _works(self, jobs: Sequence[Prepared], progress: Sequence[Progress]) -> Iterator[Work]:
        return works(
            jobs,
            progress,
            limits=self._limits,
            padding=self._batching.padding,
            whole=self._batching.whole,
        )


def _inputs(spec: ModelSpec, engine: Engine) -> tuple[TensorSpec, ...]:
    return declared(engine.inputs, spec.batch_axes_in, side="input", model=spec.name)


def _outputs(spec: ModelSpec, engine: Engine) -> tuple[TensorSpec, ...]:
    return declared(engine.outputs, spec.batch_axes_out, side="output", model=spec.name)
