"""The batches that were begun in this process and are not answered yet: one on its way to the
engine or in it, and behind it those whose replies `postprocess` makes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from typing import Final

from workers.batching.closing import Closed
from workers.delivery.ledger import Entry, Ledger
from workers.loading import Loading
from workers.loop.batches import (
    Batch,
    Begun,
    InHand,
    answers_of,
    refused,
    run_engine,
    terminated,
)
from workers.loop.claiming import Claiming
from workers.loop.endings import Endings
from workers.loop.hooked import Ended, Going, Replies, all_of, start_postprocess
from workers.loop.jobs import Job
from workers.orders import Orders
from workers.progress import Outcome
from workers.runner import Counters, ModelRunner
from workers.status import Lap, Status

#: Later than every order.
_NOTHING_BEGUN_S: Final = float("inf")


@dataclasses.dataclass(slots=True, kw_only=True)
class Running:
    """A begun batch on its way through hooks and engine."""

    batch: Batch
    begun: Begun
    runner: ModelRunner
    lap: Lap
    began_unix_s: float
    #: Its jobs on their way through `preprocess`.
    going: Going
    #: Those that are fit for the engine: fewer, once `preprocess` has refused some.
    jobs: tuple[Job, ...]
    #: When the engine began, and how long it took. Monotonic clock.
    engine_began_s: float = 0.0
    engine_s: float = 0.0
    #: What the engine did.
    done: Counters = dataclasses.field(default_factory=Counters)
    #: When its turn in `postprocess` came, the replies made there, and what is done with the last.
    replies_began_s: float = 0.0
    replies: Replies = dataclasses.field(default_factory=list)
    ended: Ended | None = None

    @property
    def rows(self) -> int:
        return sum(job.prepared.rows for job in self.jobs if job.prepared is not None)


class Underway:
    """All of them; the claim loop waits for them and decides what begins beside them."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        loading: Loading,
        claiming: Claiming,
        endings: Endings,
        status: Status,
        orders: Orders,
    ) -> None:
        self._ledger, self._loading, self._claiming = ledger, loading, claiming
        self._endings, self._status, self._orders = endings, status, orders
        self._engine = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._runs: list[Running] = []

    @property
    def empty(self) -> bool:
        return not self._runs

    @property
    def behind(self) -> list[Ended]:
        """What is done when the replies of a batch are, for each that is behind the engine."""
        return [run.ended for run in self._runs if run.ended is not None]

    @property
    def entries(self) -> list[Entry]:
        """The entries of all that runs: they are ours."""
        return [job.entry for run in self._runs for job in run.begun.started]

    def time(self, batch: Batch, begun: Begun) -> Lap:
        """Hold a batch to its time limit from now on."""
        places = [job.entry.place for job in begun.runs]
        limit_s = begun.limit_s(self._loading.time_limit_s(batch.model))
        return self._status.batch_begins(places, model=batch.model, limit_s=limit_s)

    # -- the way of one batch

    def begin(self, hand: InHand, begun: Begun) -> Running:
        """Take in a batch whose turn it is."""
        run = Running(
            batch=hand.batch,
            begun=begun,
            runner=self._loading.runners[hand.batch.model],
            lap=self.time(hand.batch, begun),
            began_unix_s=time.time(),
            going=list(hand.going),
            jobs=begun.runs,
        )
        self._runs.append(run)
        return run

    def prepared(self, run: Running) -> None:
        """Answer those that `preprocess` refused, or that the model refuses after it."""
        for each in run.going:
            each.result()
        worker, model = self._endings.worker, run.batch.model
        faults = [(job, job.fault) for job in run.jobs if job.fault]
        answers = [refused(job, fault, model=model, worker=worker) for job, fault in faults]
        self._endings.add_answers(run.batch.queue, answers)
        run.jobs = tuple(job for job in run.jobs if not job.fault)

    def start(self, run: Running) -> concurrent.futures.Future[list[Outcome]]:
        """Let the engine run; nothing else is in it."""
        prepared = [job.prepared for job in run.jobs if job.prepared is not None]
        run.engine_began_s = time.monotonic()
        return self._engine.submit(run_engine, run.runner, prepared)

    def engine_ended(self, run: Running, outcomes: Sequence[Outcome]) -> None:
        """Answer the batch, or let its replies be made: then it is behind the engine."""
        run.engine_s = time.monotonic() - run.engine_began_s
        run.done = run.runner.take_counters()
        hooks = run.runner.hooks
        if not run.jobs or hooks is None or not hooks.has_postprocess:
            self._answer(run, outcomes)
            return
        if self.behind:
            # Its replies wait for threads that another batch may hold.
            run.lap.stop()
        run.replies_began_s = time.monotonic()
        run.replies = start_postprocess(run.runner, run.jobs, outcomes)
        run.ended = all_of(run.replies)

    def collect(self) -> bool:
        """Answer the batches whose replies are there; returns whether there were any."""
        ended = [run for run in self._runs if run.ended is not None and run.ended.done()]
        for run in ended:
            self._answer(run, [reply.result() for reply in run.replies])
        return bool(ended)

    def _answer(self, run: Running, outcomes: Sequence[Outcome]) -> None:
        self._leave(run)
        if run.jobs:
            self._learn(run)
        answers = answers_of(
            run.jobs,
            outcomes,
            self._is_terminated,
            model=run.batch.model,
            runtime=run.runner.runtime,
            worker=self._endings.worker,
            began_unix_s=run.began_unix_s,
        )
        self._endings.add_answers(run.batch.queue, answers)

    def _leave(self, run: Running) -> None:
        self._runs = [each for each in self._runs if each is not run]
        self._status.batch_ends(run.lap)
        first = next((each for each in self._runs if each.ended is not None), None)
        if first is not None and first.lap.stands_since_s is not None:
            first.lap.go()
            first.replies_began_s = time.monotonic()

    def _learn(self, run: Running) -> None:
        """Count what the engine did, and learn how long after such a batch the next may run."""
        replies_s = time.monotonic() - run.replies_began_s if run.ended is not None else 0.0
        took_s = max(run.engine_s, replies_s)
        model = run.batch.model
        self._claiming.learn(model, took_s=took_s, rows=run.rows, runs=run.done.batches)
        closed = Closed.ALONE if run.begun.alone else run.batch.closed
        self._endings.count_batch(model, closed, run.done)

    # -- what ends them otherwise

    def end_terminated(self) -> bool:
        """Answer jobs without batch-mates that are to be ended while they run; returns whether
        there were any: then the process, and what else runs in it, is to be ended too.
        """
        ended = [run for run in self._runs if len(run.jobs) == 1 and self._is_terminated(*run.jobs)]
        for run in ended:
            model, worker = run.batch.model, self._endings.worker
            answers = [refused(job, terminated(), model=model, worker=worker) for job in run.jobs]
            self._endings.add_answers(run.batch.queue, answers)
            self._leave(run)
        return bool(ended)

    def forget_orders(self, ahead: InHand | None) -> None:
        """Forget the orders to terminate that can concern nothing which was begun."""
        begun = [run.begun for run in self._runs]
        if ahead is not None and ahead.begun is not None:
            begun.append(ahead.begun)
        oldest_s = min((each.asked_s for each in begun), default=_NOTHING_BEGUN_S)
        self._orders.forget(before_s=oldest_s)

    def close(self) -> None:
        self._engine.shutdown()

    def _is_terminated(self, job: Job) -> bool:
        return self._orders.terminates(self._ledger.marks(job.job_id, job.stamps))
