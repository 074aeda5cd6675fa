"""The claim loop of one instance: claim, begin, run, complete, with one batch decoded ahead.

Reading order: `ClaimLoop.serve`, then the steps of a batch: `_claim`, `_begin`, `_run`, and
`_exchange`, which ends the batch before in the same round trip as the next step. Round trips for
each batch: one when another batch was ready behind it, two when work waited, three when the
instance was idle.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import redis
from kombu.exceptions import OperationalError

from producer.contract.names import model_of, queue_of
from workers.batches import Batch, Begun, answer_of, lost, read_claim, run_engine, sort_begun
from workers.batching.closing import Closed, Limits, why_closed
from workers.delivery.ledger import Claimed, Entry, Ledger, Letter, Wish, ensure_groups
from workers.delivery.scripts import Call, send
from workers.endings import Endings
from workers.loading import Loading
from workers.status import State, Status
from workers.telemetry.events import TaskEvents

logger = logging.getLogger(__name__)

#: Given-back entries ring no doorbell: this bounds how long one lies unseen by an idle instance.
_DOORBELL_S: Final = 0.5

#: A batch is decoded ahead only behind one that should end within this time, and is given back
#: after it, so that a free instance gets it instead.
_AHEAD_S: Final = 0.5

#: A model that runs row by row claims as many rows at once as it answers in this time: a claim for
#: each would cost more than the run, and more would be kept from other instances.
_ROW_BY_ROW_S: Final = 0.1

#: How long the loop waits for the engine before it shows that it lives.
_TICK_S: Final = 0.25

#: What Redis, or Celery's way to it, raises when it cannot do what it is asked.
_TROUBLE: Final = (redis.RedisError, OperationalError)

#: The longest gap between two tries after Redis failed.
_LONGEST_BACKOFF_S: Final = 1.0


class ClaimLoop:
    """Runs batches of the loaded models until it is told to drain."""

    def __init__(
        self,
        *,
        client: redis.Redis,
        ledger: Ledger,
        loading: Loading,
        endings: Endings,
        events: TaskEvents,
        status: Status,
        draining: threading.Event,
        models: Sequence[str],
    ) -> None:
        self._client, self._ledger = client, ledger
        self._loading, self._endings, self._events = loading, endings, events
        self._status, self._draining = status, draining
        self._engine = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._ahead: Batch | None = None
        #: Whether Redis may count entries as ours that this process knows nothing of.
        self._unsure = True
        #: Seconds that a batch, and a row, of each model take, smoothed.
        self._expected_s: dict[str, float] = {}
        self._row_s: dict[str, float] = {}
        self._queues = [queue_of(model) for model in models]
        self._turn = 0
        #: How much of the present cycle was spent waiting for work.
        self._idle_s = 0.0

    def serve(self) -> None:
        """Run batches until draining; then end what ran and give back the rest."""
        backoff_s = 0.0
        while not self._draining.is_set():
            self._status.tick()
            try:
                self._cycle()
                backoff_s = 0.0
            except _TROUBLE as error:
                backoff_s = min(_LONGEST_BACKOFF_S, 2 * backoff_s or 0.05)
                self._recover(error, backoff_s)
        self._finish()

    # -- the steps of a batch

    def _cycle(self) -> None:
        if self._unsure:
            self._resync()
        if self._ahead is None:
            due = self._loading.due()
            if due:
                self._exchange()
                self._loading.load(due)
        began_s, self._idle_s = time.monotonic(), 0.0
        batch, self._ahead = self._ahead or self._claim(), None
        if batch is None or self._draining.is_set():
            # What was claimed meanwhile is given back when the loop ends.
            return
        begun = self._begin(batch)
        if begun.runs:
            self._run(batch, begun)
        self._endings.add_answers(batch.queue, begun.answered)
        busy_s = time.monotonic() - began_s - self._idle_s
        self._status.counters[batch.model].busy_s += busy_s

    def _claim(self) -> Batch | None:
        """Take what waits; with nothing there, wait at the doorbell."""
        wishes = self._wishes()
        if not wishes:
            self._exchange()
            self._draining.wait(_DOORBELL_S)
            return None
        (claimed,) = self._exchange(self._ledger.claim(wishes))
        if claimed is None:
            self._events.flush()
            claimed = self._doorbell()
        return self._read(self._gather(claimed)) if claimed else None

    def _doorbell(self) -> Claimed | None:
        queues = [queue_of(model) for model in self._loading.runners]
        entries = self._wait_for_entries(queues, _DOORBELL_S)
        if not entries:
            return None
        queue = next(q for q in queues if entries[0].stream in self._ledger.keys.streams(q))
        streams = self._ledger.keys.streams(queue)
        mine = tuple(entry for entry in entries if entry.stream in streams)
        if len(mine) < len(entries):
            # One server answers with an entry of each stream; those of other models wait for their
            # turn.
            self._exchange(self._ledger.release(queues, keep=mine))
        return Claimed(queue=queue, closed=Closed.EMPTY, entries=mine)

    def _read(self, claimed: Claimed) -> Batch:
        """Decode a claim; bury at once what nobody can read."""
        runner = self._loading.runners[model_of(claimed.queue)]
        batch = read_claim(claimed, runner, tick=self._status.tick)
        if batch.unreadable:
            bad = [self._endings.bury_unreadable(batch.queue, entry) for entry in batch.unreadable]
            self._exchange(*bad)
        return batch

    def _gather(self, claimed: Claimed) -> Claimed:
        """Wait for more jobs, as long as the model asks for; by default not at all."""
        if claimed.closed is not Closed.EMPTY:
            return claimed
        runner = self._loading.runners[model_of(claimed.queue)]
        spec, began_s = runner.spec, time.monotonic()
        limits = Limits(
            max_rows=runner.max_rows,
            max_bytes=spec.max_batch_bytes,
            max_queue_delay_s=spec.max_queue_delay_s,
        )
        entries = list(claimed.entries)
        while True:
            rows = sum(entry.rows for entry in entries)
            nbytes = sum(entry.nbytes for entry in entries)
            age_s = time.monotonic() - began_s
            closed = why_closed(
                limits, rows=rows, nbytes=nbytes, waiting=0, oldest_age_s=age_s, alone=False
            )
            if closed is not None:
                return Claimed(queue=claimed.queue, closed=closed, entries=tuple(entries))
            if self._draining.is_set():
                return Claimed(queue=claimed.queue, closed=Closed.DELAY, entries=tuple(entries))
            self._status.tick()
            rest_s = min(spec.max_queue_delay_s - age_s, _TICK_S)
            entries += self._wait_for_entries([claimed.queue], rest_s)

    def _wait_for_entries(self, queues: Sequence[str], wait_s: float) -> list[Entry]:
        began_s = time.monotonic()
        try:
            return self._ledger.doorbell(self._client, queues, wait_s)
        finally:
            self._idle_s += time.monotonic() - began_s

    def _begin(self, batch: Batch) -> Begun:
        """Count the starts; give back and bury what must not run here now."""
        jobs = [(job.entry, job.job_id) for job in batch.jobs]
        (verdicts,) = self._exchange(self._ledger.begin(batch.queue, jobs))
        begun = sort_begun(batch, verdicts, worker=self._endings.worker, now_unix_s=time.time())
        calls: list[Call[Any]] = []
        for job in begun.exhausted:
            letter = Letter(
                code="WORKER_LOST",
                reason=str(lost(job)),
                attempts=job.starts,
                worker=self._endings.worker,
            )
            calls.append(self._endings.bury(batch.queue, job, lost(job), letter))
        if begun.later:
            kept = [job.entry for job in (*begun.started, *begun.exhausted)]
            calls.append(self._ledger.release([batch.queue], keep=kept))
        if calls:
            self._exchange(*calls)
        for job in begun.started:
            self._events.received(job)
        for job in begun.runs:
            self._events.started(job)
        return begun

    def _run(self, batch: Batch, begun: Begun) -> None:
        """Run the engine; beside it send events and decode the next batch."""
        runner = self._loading.runners[batch.model]
        began_unix_s, began_s = time.time(), time.monotonic()
        self._status.batch_began_s, self._status.running = began_s, len(begun.runs)
        prepared = [job.prepared for job in begun.runs if job.prepared is not None]
        running = self._engine.submit(run_engine, runner, prepared)
        self._events.flush()
        held = [job.entry for job in begun.started]
        if not begun.alone and self._expected_s.get(batch.model, _AHEAD_S) < _AHEAD_S:
            self._claim_ahead()
        ahead_since_s = time.monotonic()
        while not concurrent.futures.wait([running], _TICK_S).done:
            self._status.tick()
            if self._ahead is not None and time.monotonic() - ahead_since_s > _AHEAD_S:
                self._give_back_ahead(held)
        outcomes = running.result()
        self._status.batch_began_s, self._status.running = None, 0
        took_s = time.monotonic() - began_s
        rows = sum(job.rows for job in prepared)
        self._expected_s[batch.model] = _smooth(self._expected_s.get(batch.model), took_s)
        self._row_s[batch.model] = _smooth(self._row_s.get(batch.model), took_s / rows)
        closed = Closed.ALONE if begun.alone else batch.closed
        self._endings.count_batch(batch.model, closed, prepared, outcomes)
        self._endings.add_answers(
            batch.queue,
            [
                answer_of(
                    job,
                    outcome,
                    model=batch.model,
                    worker=self._endings.worker,
                    began_unix_s=began_unix_s,
                )
                for job, outcome in zip(begun.runs, outcomes, strict=True)
            ],
        )

    # -- the batch ahead

    def _claim_ahead(self) -> None:
        try:
            (claimed,) = self._exchange(self._ledger.claim(self._wishes()))
            self._ahead = self._read(claimed) if claimed else None
        except _TROUBLE as error:
            # The running batch goes on; what was claimed unseen is given back before the next
            # claim.
            self._unsure, self._ahead = True, None
            _trouble(error)

    def _give_back_ahead(self, held: Iterable[Entry]) -> None:
        self._ahead = None
        try:
            self._exchange(self._ledger.release(self._queues, keep=held))
        except _TROUBLE as error:
            self._unsure = True
            _trouble(error)

    # -- Redis

    def _exchange(self, *calls: Call[Any]) -> list[Any]:
        """End what waits to be ended and make ``calls``, in one round trip; returns the calls'
        answers.
        """
        ends = self._endings.calls()
        if not ends and not calls:
            return []
        answers = send(self._client, *ends, *calls)
        self._endings.settle(answers[: len(ends)])
        return answers[len(ends) :]

    def _recover(self, error: Exception, backoff_s: float) -> None:
        _trouble(error)
        self._unsure = True
        self._draining.wait(backoff_s)

    def _resync(self) -> None:
        """Give back what Redis counts as ours and this process does not know.

        The reply of a claim or of a begin can be lost with the connection. Such a start never
        happened, so it is taken back; what has ended here is ended there first.
        """
        ensure_groups(self._client, self._ledger.keys, self._queues)
        self._exchange()
        self._ahead = None
        forgive = [self._ledger.forgive(queue) for queue in self._queues]
        self._exchange(*forgive, self._ledger.release(self._queues))
        self._unsure = False

    def _finish(self) -> None:
        """End what ran, give back the rest; tried until it is done or the parent's patience is
        over.
        """
        self._status.become(State.DRAINING)
        while True:
            self._status.tick()
            try:
                self._exchange()
                self._exchange(self._ledger.release(self._queues, remove=True))
                break
            except _TROUBLE as error:
                _trouble(error)
                time.sleep(_TICK_S)
        self._events.flush()
        self._engine.shutdown()

    def _wishes(self) -> list[Wish]:
        """Return what a claim may take, each time beginning with another model."""
        models = list(self._loading.runners)
        self._turn += 1
        first = self._turn % len(models) if models else 0
        return [self._wish(model) for model in models[first:] + models[:first]]

    def _wish(self, model: str) -> Wish:
        runner = self._loading.runners[model]
        rows = runner.max_rows
        if rows == 1 and model in self._row_s:
            in_time = int(_ROW_BY_ROW_S / self._row_s[model])
            rows = max(1, min(runner.spec.max_batch_size, in_time))
        return Wish(
            queue=queue_of(model),
            max_rows=rows,
            max_bytes=runner.spec.max_batch_bytes,
            max_entries=rows,
        )


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else 0.7 * before + 0.3 * now


def _trouble(error: Exception) -> None:
    """Log what Redis said; its texts hold no payload, and no password."""
    logger.warning("redis.trouble", extra={"error": f"{type(error).__name__}: {error}"[:200]})
