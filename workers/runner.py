"""The model side of an instance: jobs in, one outcome for each job out.

It knows nothing of Redis or Celery. A fault of one job ends that job alone: a refused batch
is run in halves, then job by job; a batch that ran out of memory goes down the model's ladder.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from producer.contract.errors import EngineFailed, FleetError, NonFinite, OutOfMemory
from workers.batching.ceiling import Ceiling
from workers.batching.finite import is_finite
from workers.batching.ladder import Rung, after_out_of_memory, first_rung, within
from workers.batching.limits import RunLimits
from workers.batching.padding import widened
from workers.batching.pieces import (
    Batch,
    Piece,
    halves,
    jobs_in,
    rows_of,
    take,
    whole_jobs,
)
from workers.batching.stacking import Array, split, stack
from workers.ceilings import Ceilings
from workers.engines.base import Engine, EngineRefused, import_runtime
from workers.engines.resident import ResidentEngines
from workers.error_text import one_line
from workers.hooks import Hooks
from workers.largest_batch import find_ceilings
from workers.memory_kind import memory_kind
from workers.models import ModelSpec, TensorSpec
from workers.prepared import Prepared, check_lengths, prepare, shape_text
from workers.probe import Batching, declared, probe, strictest
from workers.progress import Attempt, Outcome, Progress, Work, outcome, works
from workers.resident_memory import grown_bytes, resident_bytes

__all__ = ["Counters", "ModelRunner", "Outcome", "Prepared"]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """What a runner has done since it was loaded, or was asked last."""

    batches: int = 0
    rows: int = 0
    out_of_memory: int = 0
    #: Runs in a lower precision with answers that were not finite.
    non_finite: int = 0
    #: Engines that were opened anew because memory broke them.
    reopened: int = 0
    largest_batch: int = 0


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
        self.counters = Counters()
        self.ceilings = Ceilings()
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
        self._steps = spec.steps
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
    def reopened(self) -> int:
        """Return how many engines were opened anew because memory broke them."""
        return self._engines.reopened

    def take_counters(self) -> Counters:
        """Return what was done since this was asked last."""
        done, self.counters = self.counters, Counters()
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
            self._engines.run(precision, _as_dtypes(self._batching.row, inputs))

    def find_ceilings(self) -> None:
        """Find the largest batches by running them, where the model's file asks for it."""
        if not self.spec.find_ceiling or self.max_rows == 1:
            return
        one = self.prepare(_as_dtypes(self._batching.row, self._inputs))
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
                self._answer(work, batch)
        return [outcome(self.spec.name, done, self._axes_out) for done in progress]

    def _works(self, jobs: Sequence[Prepared], progress: Sequence[Progress]) -> Iterator[Work]:
        return works(
            jobs,
            progress,
            limits=self._limits,
            padding=self._batching.padding,
            whole=self._batching.whole,
        )

    def _answer(self, work: Work, batch: Batch) -> None:
        """Answer every piece of ``batch``, or note why its job failed."""
        before = self.ceilings.copy_of(work.sizes)
        # The last entry is next, so that the rows of a cut job are answered in their order.
        todo: list[tuple[Batch, Rung]] = [(batch, self._first_rung(work, batch))]
        while todo:
            pieces, rung = todo.pop()
            run, rest = take(work.unfailed(pieces), rung.rows)
            if not run:
                continue
            try:
                strange = self._run(work, run, rung.precision)
            except Exception as error:  # noqa: BLE001 - an engine of one's own may raise anything
                attempt = Attempt(
                    run=run,
                    rest=rest,
                    rung=dataclasses.replace(rung, rows=rows_of(run)),
                    error=error,
                )
                if isinstance(error, OutOfMemory | MemoryError):
                    todo += self._after_out_of_memory(work, attempt, before)
                else:
                    todo += self._after_refusal(work, attempt)
            else:
                todo.append((rest, rung))
                if strange:
                    todo += self._after_strange_numbers(work, strange)

    def _first_rung(self, work: Work, batch: Batch) -> Rung:
        return first_rung(
            self._steps,
            precision=self.spec.precision,
            rows=rows_of(batch),
            ceilings=self.ceilings.of(work.sizes),
        )

    def _after_out_of_memory(
        self, work: Work, failed: Attempt, before: Mapping[str, Ceiling]
    ) -> list[tuple[Batch, Rung]]:
        """Return how to go on with the rows that are not answered yet.

        ``before`` holds the ceilings that were known before this batch.
        """
        rung = failed.rung
        self.counters.out_of_memory += 1
        logger.warning(
            "engine.out_of_memory",
            extra={"model": self.spec.name, "precision": rung.precision, "rows": rung.rows},
        )
        for job in jobs_in(failed.run):
            work.progress[job].out_of_memory += 1
        self.ceilings.lower(work.sizes, rung.precision, failed_rows=rung.rows)
        if rung.again:
            self._fail_non_finite(work, failed.run)
            return [(failed.rest, rung)]
        lower = after_out_of_memory(self._steps, rung)
        if lower is not None:
            return [(failed.run + failed.rest, within(lower, self.ceilings.of(work.sizes)))]
        # This job is too much for any rung, so what it did to larger batches says nothing
        # about the size that fits the others.
        self.ceilings.restore(work.sizes, before)
        done = work.progress[failed.run[0].job]
        done.precision = rung.precision
        done.error = OutOfMemory(
            f"{self.spec.name}: one row does not fit in memory in any precision, last tried "
            f"{rung.precision}. {one_line(failed.error)}"
        )
        rest = work.unfailed(failed.rest)
        if not rest:
            return []
        # More jobs that are too much may follow. The first says nothing about them; after a second
        # each of the others costs one run, not a way down the ladder.
        too_much = sum(isinstance(job.error, OutOfMemory) for job in work.progress)
        return [(rest, rung if too_much > 1 else self._first_rung(work, rest))]

    def _after_refusal(self, work: Work, failed: Attempt) -> list[tuple[Batch, Rung]]:
        """Return the two halves of a refused run; a job that was refused alone fails."""
        rest = (failed.rest, failed.rung)
        if len(jobs_in(failed.run)) > 1:
            first, second = halves(failed.run)
            return [rest, (second, failed.rung), (first, failed.rung)]
        work.progress[failed.run[0].job].error = _error_of(failed.error)
        return [rest]

    def _after_strange_numbers(self, work: Work, strange: Batch) -> list[tuple[Batch, Rung]]:
        """Return how to go on with rows whose answers in a lower precision are not finite: row by
        row in the main precision, whose word is final.
        """
        self.counters.non_finite += 1
        for job in jobs_in(strange):
            work.progress[job].non_finite += 1
        if self.ceilings.of(work.sizes).get(self.spec.precision) == 0:
            self._fail_non_finite(work, strange)
            return []
        return [(strange, Rung(precision=self.spec.precision, rows=1, again=True))]

    def _fail_non_finite(self, work: Work, pieces: Batch) -> None:
        for job in jobs_in(pieces):
            work.progress[job].error = NonFinite(
                f"{self.spec.name}: the answer holds NaN or infinity in the precision that fits in "
                f"memory, and one row does not fit in {self.spec.precision}."
            )

    def _run(self, work: Work, run: Batch, precision: str) -> Batch:
        """Run one batch once and note the answers; returns the pieces that have to be answered in
        the main precision.
        """
        main, padding = precision == self.spec.precision, self._batching.padding
        arrays = [job.arrays for job in work.jobs]
        uncut = self._batching.whole or _is_one_whole_job(run, work.jobs)
        if self._batching.whole:
            feeds = dict(arrays[run[0].job])
        else:
            feeds = stack(arrays, run, self._axes_in, work.fills)
        if not main:
            # A number beyond the range of half precision becomes infinity: its answer is looked at.
            with np.errstate(over="ignore"):
                feeds = _as_dtypes(feeds, self._engines[precision].inputs)
        rows = sum(work.jobs[job].rows for job in jobs_in(run)) if uncut else rows_of(run)
        started = time.perf_counter()
        outputs = _as_dtypes(self._engines.run(precision, feeds), self._outputs)
        compute_s = time.perf_counter() - started
        answers = [outputs] if uncut else split(outputs, run, self._axes_out)
        self.counters.batches += 1
        self.counters.rows += rows
        self.counters.largest_batch = max(self.counters.largest_batch, rows)
        self.ceilings.fitted(work.sizes, precision, rows_of(run))
        strange: list[Piece] = []
        for piece, padded in zip(run, answers, strict=True):
            done = work.progress[piece.job]
            answer = padding.cut(padded, padding.lengths(arrays[piece.job]))
            if not main and not is_finite(answer):
                strange.append(piece)
                continue
            done.parts[piece.start] = answer
            done.batch_size = max(done.batch_size, rows)
            if not main:
                done.precision = precision
        for job in jobs_in(run):
            work.progress[job].compute_s += compute_s
        return tuple(strange)


def _inputs(spec: ModelSpec, engine: Engine) -> tuple[TensorSpec, ...]:
    return declared(engine.inputs, spec.batch_axes_in, side="input", model=spec.name)


def _outputs(spec: ModelSpec, engine: Engine) -> tuple[TensorSpec, ...]:
    return declared(engine.outputs, spec.batch_axes_out, side="output", model=spec.name)


def _is_one_whole_job(run: Sequence[Piece], jobs: Sequence[Prepared]) -> bool:
    return len(run) == 1 and run[0].rows == jobs[run[0].job].rows


def _as_dtypes(arrays: Mapping[str, Array], tensors: Sequence[TensorSpec]) -> dict[str, Array]:
    """Return the arrays named by ``tensors`` in their dtypes; a twin may differ in them."""
    missing = [tensor.name for tensor in tensors if tensor.name not in arrays]
    if missing:
        raise EngineFailed(f"the engine gave no {missing[0]!r}.")
    return {
        tensor.name: np.asarray(arrays[tensor.name]).astype(tensor.dtype, copy=False)
        for tensor in tensors
    }


def _error_of(error: Exception) -> FleetError:
    """Return the error of a job whose run failed when it was alone."""
    if isinstance(error, EngineRefused):
        return error.as_error()
    return error if isinstance(error, FleetError) else EngineFailed(one_line(error))
