"""A batch between the steps of the claim loop: what was read, what may run, what each job was
answered.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from producer.contract.errors import (
    Cancelled,
    EngineFailed,
    FleetError,
    JobTimeout,
    WorkerLost,
)
from producer.contract.names import model_of
from workers.batching.closing import Closed
from workers.delivery.ledger import Claimed, Entry, Verdict
from workers.loop.answers import Answer
from workers.loop.jobs import Job, Unreadable, expired, read_entry, unread
from workers.runner import ModelRunner, Outcome, Prepared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Claimed jobs of one queue, decoded and not begun."""

    queue: str
    closed: Closed
    jobs: tuple[Job, ...]
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def model(self) -> str:
        return model_of(self.queue)

    @property
    def entries(self) -> list[Entry]:
        return [job.entry for job in self.jobs]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A batch after `begin`: every job is in exactly one of these."""

    #: Started, and fit for the engine.
    runs: tuple[Job, ...]
    #: Ended without a run: bad inputs, expired, cancelled.
    answered: tuple[Answer, ...]
    #: Not to be tried again, each for the reason beside it: dead letters.
    buried: tuple[tuple[Job, FleetError], ...]
    #: To be given back, uncounted.
    later: tuple[Job, ...]
    #: Copies that came too late: nothing is left of them but files of their own.
    dropped: tuple[Job, ...]
    #: Whether nothing else may be begun in this process before the batch has ended.
    alone: bool
    #: When Redis was asked. Monotonic clock.
    asked_s: float

    @property
    def started(self) -> tuple[Job, ...]:
        """The jobs whose start was counted."""
        return (*self.runs, *(answer.job for answer in self.answered))

    @property
    def suspects(self) -> tuple[Job, ...]:
        """Those whose earlier start has no outcome that the broker knows."""
        buried = (job for job, _ in self.buried)
        return tuple(job for job in (*self.started, *buried) if job.starts)

    def without(self, jobs: Sequence[Job]) -> Begun:
        """Return the same without ``jobs``, which are ended already."""
        if not jobs:
            return self
        return dataclasses.replace(
            self,
            runs=tuple(job for job in self.runs if job not in jobs),
            answered=tuple(answer for answer in self.answered if answer.job not in jobs),
            buried=tuple(each for each in self.buried if each[0] not in jobs),
        )

    def limit_s(self, limit_s: float) -> float:
        """Return how long the batch may run: as long as the strictest of its jobs says."""
        return min([limit_s, *(job.time_limit_s for job in self.runs if job.time_limit_s)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InHand:
    """A batch that waits for the engine, and how far it is."""

    batch: Batch
    #: Begun already, because its hooks run before it is its turn.
    begun: Begun | None = None
    #: Its jobs on their way through `preprocess`.
    going: Sequence[concurrent.futures.Future[None]] = ()
    #: Monotonic clock.
    since_s: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def started(self) -> tuple[Job, ...]:
        """The jobs whose start was counted."""
        return self.begun.started if self.begun else ()

    @property
    def is_alone(self) -> bool:
        """Whether nothing may be in this process when it is begun, or nothing when it runs."""
        return self.batch.closed is Closed.ALONE or (self.begun is not None and self.begun.alone)

    @property
    def is_worked_on(self) -> bool:
        """Whether hooks of it still run: then nobody else would be sooner, and a thread that one
        of them never leaves would be taken from jobs that can do nothing for it.
        """
        return not all(each.done() for each in self.going)

    def drop(self) -> None:
        """Start no more of its hooks."""
        for each in self.going:
            each.cancel()


def read_claim(
    claimed: Claimed,
    runner: ModelRunner,
    *,
    blobs: Mapping[str, bytes | None],
    max_reads: int,
    tick: Callable[[], None],
) -> Batch:
    """Decode every claimed entry; one that cannot be read stands apart from the others.

    ``blobs`` are the large arrays of all of them.

    So does one that killed whoever read it, more than ``max_reads`` times.

    ``tick`` is called before each: together they may take longer than a loop may be silent.
    """
    read: list[Job | Unreadable] = []
    for entry in claimed.entries:
        tick()
        if entry.reads > max_reads:
            read.append(unread(entry, never_read(entry)))
        else:
            read.append(read_entry(entry, queue=claimed.queue, runner=runner, blobs=blobs))
    return Batch(
        queue=claimed.queue,
        closed=claimed.closed,
        jobs=tuple(job for job in read if isinstance(job, Job)),
        unreadable=tuple(entry for entry in read if isinstance(entry, Unreadable)),
    )


def sort_begun(
    batch: Batch,
    verdicts: Sequence[tuple[Verdict, int]],
    *,
    worker: str,
    asked_s: float,
    now_unix_s: float,
) -> Begun:
    """Sort the jobs by what `begin` said of each; those that are lost, or whose arrays are
    another's, appear nowhere.
    """
    runs: list[Job] = []
    answered: list[Answer] = []
    buried: list[tuple[Job, FleetError]] = []
    later: list[Job] = []
    dropped: list[Job] = []
    alone = False
    for job, (verdict, starts) in zip(batch.jobs, verdicts, strict=True):
        job.starts = starts
        match verdict:
            case Verdict.RUN | Verdict.ALONE:
                alone = alone or verdict is Verdict.ALONE
                error = expired(job, now_unix_s=now_unix_s) or job.fault
                if error is None:
                    runs.append(job)
                else:
                    answered.append(refused(job, error, model=batch.model, worker=worker))
            case Verdict.CANCELLED:
                error = Cancelled("The job was cancelled before it was started.")
                answered.append(refused(job, error, model=batch.model, worker=worker))
            case Verdict.TIMEOUT:
                buried.append((job, timed_out(job)))
            case Verdict.EXHAUSTED:
                buried.append((job, lost(job)))
            case Verdict.LATER:
                later.append(job)
            case Verdict.DONE | Verdict.DUPLICATE:
                dropped.append(job)
            case Verdict.LOST | Verdict.AGAIN:
                pass
    return Begun(
        runs=tuple(runs),
        answered=tuple(answered),
        buried=tuple(buried),
        later=tuple(later),
        dropped=tuple(dropped),
        alone=alone,
        asked_s=asked_s,
    )


def refused(job: Job, error: FleetError, *, model: str, worker: str) -> Answer:
    """Return the answer of a job that never reached the engine."""
    about = {"model": model, "attempts": job.starts + 1, "worker": worker}
    return Answer(job=job, error=error, about=about)


def answers_of(
    jobs: Sequence[Job],
    outcomes: Sequence[Outcome],
    is_terminated: Callable[[Job], bool],
    *,
    model: str,
    runtime: str,
    worker: str,
    began_unix_s: float,
) -> list[Answer]:
    """Return the answers of jobs that the engine ran; what a terminated one answers is dropped."""
    return [
        refused(job, terminated(), model=model, worker=worker)
        if is_terminated(job)
        else _answer_of(
            job, outcome, model=model, runtime=runtime, worker=worker, began_unix_s=began_unix_s
        )
        for job, outcome in zip(jobs, outcomes, strict=True)
    ]


def _answer_of(
    job: Job, outcome: Outcome, *, model: str, runtime: str, worker: str, began_unix_s: float
) -> Answer:
    about = {
        "model": model,
        "runtime": runtime,
        "precision": outcome.precision,
        "batch_size": outcome.batch_size,
        "attempts": job.starts + 1,
        # The entry's own time is the server's clock; another host's may be a little ahead of it.
        "queue_s": max(0.0, round(began_unix_s - job.entry.added_unix_s, 6)),
        "compute_s": round(outcome.compute_s, 6),
        "worker": worker,
        "out_of_memory": outcome.out_of_memory,
        "non_finite": outcome.non_finite,
    }
    return Answer(job=job, outputs=outcome.outputs, error=outcome.error, about=about)


def lost(job: Job) -> WorkerLost:
    """Return the error of a job whose process died at every start it was allowed."""
    return WorkerLost(
        f"The process that ran this job died {job.starts} times while it ran; it is not tried "
        f"again. Look at it with `fleet dead show {job.job_id}`."
    )


def never_read(entry: Entry) -> WorkerLost:
    """Return the error of a job whose processes died while they read it."""
    return WorkerLost(
        f"{entry.reads - 1} processes died after they had claimed this job and before they began "
        "it, the last of them with nothing else at hand; it is not tried again."
    )


def terminated() -> Cancelled:
    """Return the error of a job that was ended, or whose answer was dropped, while it ran."""
    return Cancelled("The job was terminated while it ran.")


def timed_out(job: Job) -> JobTimeout:
    """Return the error of a job that ran alone for longer than it may."""
    return JobTimeout(
        "The job ran for longer than its time limit, alone, and its process was ended for that. "
        "Send fewer rows, or raise time_limit_s in the model's file."
    )


def run_engine(runner: ModelRunner, prepared: Sequence[Prepared]) -> list[Outcome]:
    """Run the engine; a fault of our own code fails the batch's jobs instead of the process."""
    began_s = time.monotonic()
    try:
        return runner.run(list(prepared))
    except (Exception, SystemExit, concurrent.futures.CancelledError) as error:  # noqa: BLE001
        # Whatever an engine raises ends its jobs; the process and its other jobs go on.
        failed = EngineFailed(f"{type(error).__name__} while the batch ran: {error}")
        return [
            Outcome(
                outputs=None,
                error=failed,
                precision=runner.spec.precision,
                batch_size=0,
                out_of_memory=0,
                compute_s=time.monotonic() - began_s,
            )
            for _ in prepared
        ]
