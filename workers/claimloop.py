"""The claim loop of one instance: claim, begin, run, complete, with one batch decoded ahead.

Reading order: `ClaimLoop.serve`, then the steps of a batch: `_claim`, `_begin`, `_run`, and
`_exchange`, which ends the batch before in the same round trip as the next step. Round trips for
each batch: one when another batch was ready behind it, two when work waited, three when the
instance was idle.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import redis
from kombu.exceptions import OperationalError

from producer.contract.names import model_of
from workers.batches import (
    Batch,
    Begun,
    InHand,
    answers_of,
    read_claim,
    refused,
    run_engine,
    sort_begun,
    terminated,
)
from workers.batching.closing import Closed
from workers.claiming import DOORBELL_S, TICK_S, Claiming
from workers.delivery.ledger import (
    FREE_READS,
    Claimed,
    Entry,
    Ledger,
    Note,
    ensure_groups,
)
from workers.delivery.scripts import Call, send
from workers.endings import Endings
from workers.hooked import forgiven, start_postprocess, start_preprocess
from workers.jobs import Job
from workers.large_arrays import LargeArrays
from workers.loading import Loading
from workers.orders import Orders
from workers.status import State, Status
from workers.telemetry.events import TaskEvents
from workers.telemetry.logs import said

logger = logging.getLogger(__name__)

#: A batch is decoded ahead only behind one that should end within this time, and is given back
#: after it, so that a free instance gets it instead.
_AHEAD_S: Final = 0.5

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
        claiming: Claiming,
        endings: Endings,
        events: TaskEvents,
        status: Status,
        orders: Orders,
        arrays: LargeArrays,
    ) -> None:
        self._client, self._ledger, self._arrays = client, ledger, arrays
        self._loading, self._claiming = loading, claiming
        self._endings, self._events = endings, events
        self._status, self._orders = status, orders
        self._engine = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._ahead: InHand | None = None
        self._ahead_since_s = 0.0
        #: Whether Redis may count entries as ours that this process knows nothing of.
        self._unsure = True

    def serve(self) -> None:
        """Run batches until draining; then end what ran and give back the rest."""
        backoff_s = 0.0
        while not self._orders.draining.is_set():
            self._status.tick()
            try:
                self._cycle()
                backoff_s = 0.0
            except _TROUBLE as error:
                backoff_s = min(_LONGEST_BACKOFF_S, 2 * backoff_s or 0.05)
                self._recover(error, backoff_s)
        self._status.become(State.DRAINING)
        self._hand_back()
        self._engine.shutdown()

    @property
    def _queues(self) -> list[str]:
        """The queues that jobs of ours can be in."""
        return self._orders.serving.held_queues

    # -- the steps of a batch

    def _cycle(self) -> None:
        if self._unsure:
            self._resync()
        self._follow()
        began_s, self._claiming.idle_s = time.monotonic(), 0.0
        hand, self._ahead = self._ahead or self._claim(), None
        if hand is None:
            return
        if self._orders.draining.is_set() or not self._serves(hand):
            # What was claimed meanwhile is given back, when the loop ends or at the next turn.
            self._ahead = hand
            return
        batch = hand.batch
        begun = hand.begun or self._begin(batch)
        self._endings.add_answers(batch.queue, begun.answered)
        if begun.runs:
            self._run(hand, begun)
        self._claiming.turn_ends(batch.model)
        busy_s = time.monotonic() - began_s - self._claiming.idle_s
        self._status.counters[batch.model].busy_s += busy_s

    def _follow(self) -> None:
        """Serve what the parent wants served; engines are loaded and freed between two batches."""
        if self._ahead is not None and self._serves(self._ahead):
            return
        if self._ahead is not None:
            self._give_back_ahead()
        if not self._must_change():
            return
        self._exchange()
        self._events.flush()
        models = self._orders.serving.models
        if self._loading.is_behind(models):
            self._loading.follow(models)
        self._loading.load(self._loading.due())

    def _serves(self, hand: InHand) -> bool:
        return hand.batch.model in self._orders.serving.models

    def _must_change(self) -> bool:
        """Return whether a model is to be loaded or freed as soon as nothing runs."""
        behind = self._loading.is_behind(self._orders.serving.models)
        return behind or bool(self._loading.due())

    def _claim(self) -> InHand | None:
        """Take what waits; with nothing there, wait at the doorbell."""
        wishes = self._claiming.wishes()
        if not wishes:
            self._exchange()
            self._events.flush()
            self._orders.draining.wait(DOORBELL_S)
            return None
        others: Sequence[Entry] = ()
        (claimed,) = self._exchange(self._ledger.claim(wishes))
        if claimed is None:
            self._events.flush()
            rung = self._claiming.at_doorbell()
            if rung is None:
                return None
            claimed, others = rung
        if not others:
            claimed, others = self._claiming.gather(claimed, model_of(claimed.queue))
        if others:
            self._exchange(self._release(self._queues, keep=claimed.entries))
        return InHand(batch=self._read(claimed))

    def _read(self, claimed: Claimed) -> Batch:
        """Decode a claim; bury at once what nobody can read."""
        batch = read_claim(
            claimed,
            self._loading.runners[model_of(claimed.queue)],
            blobs=self._arrays.read(claimed.entries),
            max_reads=FREE_READS + self._ledger.max_attempts,
            tick=self._status.tick,
        )
        if batch.unreadable:
            bad = [self._endings.bury_unreadable(batch.queue, entry) for entry in batch.unreadable]
            self._exchange(*bad)
        return batch

    def _begin(self, batch: Batch, *, beside: Sequence[Job] = ()) -> Begun:
        """Count the starts; give back and bury what must not run here now.

        ``beside``: the jobs that run meanwhile.
        """
        jobs = [(job.entry, job.job_id, job.stamps) for job in batch.jobs]
        (verdicts,) = self._exchange(self._ledger.begin(batch.queue, jobs))
        begun = sort_begun(batch, verdicts, worker=self._endings.worker, now_unix_s=time.time())
        begun = begun.without(self._endings.end_stored(batch.queue, begun.suspects))
        self._arrays.remove([job.entry for job in begun.dropped])
        calls: list[Call[Any]] = [self._endings.bury(batch.queue, *each) for each in begun.buried]
        if begun.later:
            buried = (job for job, _ in begun.buried)
            kept = [job.entry for job in (*begun.started, *buried, *beside)]
            calls.append(self._release([batch.queue], keep=kept))
        if calls:
            self._exchange(*calls)
        for job in begun.started:
            self._events.received(job)
        for job in begun.runs:
            self._events.started(job)
        return begun

    def _run(self, hand: InHand, begun: Begun) -> None:
        """Run the engine; beside it end what needs none, and decode the next batch."""
        batch, runner = hand.batch, self._loading.runners[hand.batch.model]
        began_unix_s = time.time()
        limit_s = begun.limit_s(self._loading.time_limit_s(batch.model))
        self._status.batch_begins([job.entry.place for job in begun.runs], limit_s=limit_s)
        runs = self._preprocess(hand, begun) if runner.hooks else begun.runs
        prepared = [job.prepared for job in runs if job.prepared is not None]
        began_s = time.monotonic()
        running = self._engine.submit(run_engine, runner, prepared)
        self._events.flush_when_due()
        self._beside(lambda: self._claim_ahead(batch, begun, running))
        self._wait([running], batch, begun)
        outcomes = running.result()
        if runner.hooks and runner.hooks.has_postprocess:
            replies = start_postprocess(runner, runs, outcomes)
            self._wait(replies, batch, begun)
            outcomes = [reply.result() for reply in replies]
        self._status.batch_ends()
        if prepared:
            took_s, rows = time.monotonic() - began_s, sum(job.rows for job in prepared)
            done = runner.take_counters()
            self._claiming.learn(batch.model, took_s=took_s, rows=rows, runs=done.batches)
            closed = Closed.ALONE if begun.alone else batch.closed
            self._endings.count_batch(batch.model, closed, done)
        answers = answers_of(
            runs,
            outcomes,
            self._is_terminated,
            model=batch.model,
            runtime=runner.runtime,
            worker=self._endings.worker,
            began_unix_s=began_unix_s,
        )
        self._endings.add_answers(batch.queue, answers)
        self._loading.share_ceilings(batch.model)
        if self._ahead is None or self._ahead.begun is None:
            self._orders.forget()

    def _preprocess(self, hand: InHand, begun: Begun) -> tuple[Job, ...]:
        """Wait for the hooks before the engine; returns the jobs that are fit for it."""
        batch, runner = hand.batch, self._loading.runners[hand.batch.model]
        going = hand.going or start_preprocess(runner, begun.runs)
        if not all(each.done() for each in going):
            # The batch before is answered, and waits for no hook of this one.
            self._beside(self._exchange)
            self._wait(going, batch, begun)
        for each in going:
            each.result()
        worker = self._endings.worker
        faults = [(job, job.fault) for job in begun.runs if job.fault]
        answers = [refused(job, fault, model=batch.model, worker=worker) for job, fault in faults]
        self._endings.add_answers(batch.queue, answers)
        return tuple(job for job in begun.runs if not job.fault)

    def _wait(
        self, futures: Sequence[concurrent.futures.Future[Any]], batch: Batch, begun: Begun
    ) -> None:
        """Wait for the engine or for hooks, and do meanwhile what cannot wait."""
        while concurrent.futures.wait(futures, TICK_S).not_done:
            self._status.tick()
            self._events.flush_when_due()
            waited_s = time.monotonic() - self._ahead_since_s
            if self._ahead is not None and waited_s > _AHEAD_S:
                self._beside(lambda: self._give_back_ahead(beside=begun.started))
            if len(begun.runs) == 1 and self._is_terminated(begun.runs[0]):
                self._end_terminated(batch.queue, begun.runs[0])

    # -- beside a running batch

    def _beside(self, work: Callable[[], object]) -> None:
        """Do ``work`` while the engine runs; what fails then is mended before the next claim."""
        try:
            work()
        except _TROUBLE as error:
            self._unsure = True
            self._drop_ahead()
            _trouble(error)

    def _claim_ahead(
        self, batch: Batch, begun: Begun, running: concurrent.futures.Future[Any]
    ) -> None:
        soon = self._claiming.expects_end_within(batch.model, _AHEAD_S)
        if begun.alone or not soon or self._must_change():
            # What was answered without a run waits for nobody.
            self._exchange()
            return
        if (wait_s := self._claiming.claims_ahead_in_s(batch.model)) > 0:
            self._exchange()
            ended = concurrent.futures.wait([running], wait_s).done
            if ended or self._orders.draining.is_set() or self._must_change():
                return
        began_s = time.monotonic()
        wishes = self._claiming.wishes(running=batch.model)
        (claimed,) = self._exchange(self._ledger.claim(wishes, running=True))
        if claimed is None:
            return
        self._ahead_since_s = time.monotonic()
        ahead = self._ahead = InHand(batch=self._read(claimed))
        self._claiming.learn_read(time.monotonic() - began_s)
        runner = self._loading.runners[ahead.batch.model]
        # A job whose earlier start has no outcome, or whose readers died, waits for its turn.
        if runner.hooks and runner.hooks.has_preprocess and claimed.closed is not Closed.ALONE:
            theirs = self._begin(ahead.batch, beside=begun.started)
            going = [] if theirs.alone else start_preprocess(runner, theirs.runs)
            self._ahead = InHand(batch=ahead.batch, begun=theirs, going=going)

    def _give_back_ahead(self, *, beside: Sequence[Job] = ()) -> None:
        """Give back the batch ahead, uncounted; ``beside``: the jobs that run meanwhile."""
        forgive = forgiven(self._ledger, self._ahead)
        self._drop_ahead()
        held = [job.entry for job in beside]
        self._exchange(*forgive, self._release(self._queues, keep=held))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.drop()
        self._ahead = None

    def _is_terminated(self, job: Job) -> bool:
        return self._orders.terminates(self._ledger.marks(job.job_id, job.stamps))

    def _end_terminated(self, queue: str, job: Job) -> None:
        """End a job that runs alone, and this process with it: nothing else ends an engine's run.

        A job with batch-mates runs to its end, and what it answers is dropped.
        """
        self._status.batch_ends()
        answer = refused(job, terminated(), model=model_of(queue), worker=self._endings.worker)
        self._endings.add_answers(queue, [answer])
        self._hand_back()
        self._status.on_change()
        os._exit(0)

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

    def _release(self, queues: Sequence[str], *, keep: Iterable[Entry] = ()) -> Call[int]:
        """Give back all but ``keep``, and but what is answered and waits to be ended."""
        return self._ledger.release(queues, keep=[*keep, *self._endings.entries])

    def _recover(self, error: Exception, backoff_s: float) -> None:
        _trouble(error)
        self._unsure = True
        if isinstance(error, redis.ConnectionError | redis.TimeoutError):
            # A flush would wait as long again for a server that has fallen silent.
            self._events.reconnect()
        self._orders.draining.wait(backoff_s)

    def _resync(self) -> None:
        """Give back what Redis counts as ours and this process does not know.

        The reply of a claim or of a begin can be lost with the connection. Such a start never
        happened, so it is taken back; what has ended here is ended there first.
        """
        self._exchange(ensure_groups(self._ledger.keys, self._queues))
        self._drop_ahead()
        forgive = [self._ledger.unfinished(queue, Note.FORGIVE) for queue in self._queues]
        self._exchange(*forgive, self._release(self._queues))
        self._unsure = False

    def _hand_back(self) -> None:
        """End what ran, give back the rest; tried until it is done or the parent's patience is
        over.

        With nothing in hand there is nothing to insist on.
        """
        insist = self._ahead is not None or not self._endings.empty
        while True:
            self._status.tick()
            try:
                self._exchange()
                if self._endings.empty:
                    release = self._ledger.release(self._queues, remove=True)
                    self._exchange(*forgiven(self._ledger, self._ahead), release)
                    break
            except _TROUBLE as error:
                _trouble(error)
                if not insist:
                    break
            time.sleep(TICK_S)
        self._events.flush()


def _trouble(error: Exception) -> None:
    logger.warning("redis.trouble", extra={"error": said(error)})
