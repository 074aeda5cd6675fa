"""How batches of one model are answered: down its ladder where memory runs out, in halves where the
engine refuses them, and row by row where a lower precision answers with what is no number.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from producer.contract.errors import EngineFailed, FleetError, NonFinite, OutOfMemory
from workers.batching.ceiling import Ceiling
from workers.batching.finite import is_finite
from workers.batching.ladder import Rung, after_out_of_memory, first_rung, within
from workers.batching.pieces import Batch, Piece, halves, jobs_in, rows_of, take
from workers.batching.stacking import Array, split, stack
from workers.engines.base import EngineRefused
from workers.engines.resident import ResidentEngines
from workers.error_text import one_line
from workers.memory.ceilings import Ceilings
from workers.models import ModelSpec, TensorSpec
from workers.prepared import Prepared
from workers.probing.probe import Batching
from workers.progress import Attempt, Work

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


class Answering:
    """Runs batches of one model until every piece of them is answered, or its job has failed."""

    def __init__(
        self,
        spec: ModelSpec,
        engines: ResidentEngines,
        batching: Batching,
        *,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self.spec = spec
        self.counters = Counters()
        self.ceilings = Ceilings()
        self._engines, self._batching, self._outputs = engines, batching, outputs
        self._axes_in = {tensor.name: tensor.batch_axis for tensor in inputs}
        self._axes_out = {tensor.name: tensor.batch_axis for tensor in outputs}
        self._steps = spec.steps

    def answer(self, work: Work, batch: Batch) -> None:
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
                feeds = as_dtypes(feeds, self._engines[precision].inputs)
        rows = sum(work.jobs[job].rows for job in jobs_in(run)) if uncut else rows_of(run)
        started = time.perf_counter()
        outputs = as_dtypes(self._engines.run(precision, feeds), self._outputs)
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


def _is_one_whole_job(run: Sequence[Piece], jobs: Sequence[Prepared]) -> bool:
    return len(run) == 1 and run[0].rows == jobs[run[0].job].rows


def as_dtypes(arrays: Mapping[str, Array], tensors: Sequence[TensorSpec]) -> dict[str, Array]:
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
