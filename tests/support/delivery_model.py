"""A model of delivery in plain Python: what must be true of jobs, whatever scripts were called."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from workers.delivery.ledger import Verdict

#: A stream and an entry id in it.
Place = tuple[str, str]


@dataclasses.dataclass(slots=True, kw_only=True)
class Model:
    """Who holds which entry, how often each job was started, which jobs have ended."""

    max_attempts: int
    job_of: dict[Place, str] = dataclasses.field(default_factory=dict)
    #: Of every entry that lives: who holds it; None for one that nobody was given.
    owner: dict[Place, str | None] = dataclasses.field(default_factory=dict)
    #: Jobs begun and not ended: starts that count, and who began it last, with which entry.
    starts: dict[str, int] = dataclasses.field(default_factory=dict)
    begun_by: dict[str, tuple[str, Place]] = dataclasses.field(default_factory=dict)
    ended: set[str] = dataclasses.field(default_factory=set)
    cancelled: set[str] = dataclasses.field(default_factory=set)
    #: Jobs whose last start ran alone for too long.
    timed_out: set[str] = dataclasses.field(default_factory=set)

    def held_by(self, consumer: str) -> list[Place]:
        return [place for place, owner in self.owner.items() if owner == consumer]

    def gone(self, place: Place) -> None:
        """An entry was acknowledged and deleted."""
        del self.owner[place]

    def end(self, place: Place) -> None:
        """A job has its outcome."""
        self.gone(place)
        job = self.job_of[place]
        self.ended.add(job)
        self.starts.pop(job, None)
        self.begun_by.pop(job, None)

    def begin(self, place: Place, consumer: str) -> None:
        job = self.job_of[place]
        self.starts[job] = self.starts.get(job, 0) + 1
        self.begun_by[job] = (consumer, place)

    def forgive(self, consumer: str, only: Place | None = None) -> int:
        """Take back the starts of what a consumer began, or of one; returns of how many jobs."""
        jobs = [
            job
            for job, (who, place) in self.begun_by.items()
            if who == consumer == self.owner.get(place) and only in (None, place)
        ]
        self.timed_out.difference_update(jobs)
        for job in jobs:
            self.starts[job] -= 1
            if self.starts[job]:
                self.begun_by[job] = ("-", self.begun_by[job][1])
            else:
                del self.starts[job], self.begun_by[job]
        return len(jobs)

    def time_out(self, consumer: str, place: Place) -> int:
        """Note that a consumer ran the job of ``place`` for too long; returns 0 when it did not."""
        held = self.owner.get(place) == consumer
        jobs = [job for job, begun in self.begun_by.items() if held and begun == (consumer, place)]
        for job in jobs:
            self.timed_out.add(job)
            self.begun_by[job] = ("-", place)
        return len(jobs)

    def check_verdicts(
        self, consumer: str, places: Sequence[Place], verdicts: Sequence[tuple[Verdict, int]]
    ) -> None:
        """Assert that each verdict of one `begin` may be given."""
        seen: set[str] = set()
        running: list[Verdict] = []
        for place, (verdict, starts) in zip(places, verdicts, strict=True):
            job = self.job_of[place]
            if self.owner.get(place) != consumer:
                assert verdict is Verdict.LOST
                continue
            begun = self.begun_by.get(job)
            elsewhere = begun is not None and begun[1] != place and begun[1] in self.owner
            if job in seen or elsewhere:
                assert verdict is Verdict.DUPLICATE
                self.gone(place)
                continue
            seen.add(job)
            assert starts == self.starts.get(job, 0)
            assert verdict is self._due(job, starts, running)
            if verdict is Verdict.DONE:
                self.end(place)
            elif verdict in (Verdict.RUN, Verdict.ALONE):
                running.append(verdict)
                self.begin(place, consumer)

    def _due(self, job: str, starts: int, running: Sequence[Verdict]) -> Verdict:
        if job in self.ended:
            return Verdict.DONE
        if job in self.cancelled:
            return Verdict.CANCELLED
        if starts and job in self.timed_out:
            return Verdict.TIMEOUT
        if starts >= self.max_attempts:
            return Verdict.EXHAUSTED
        if Verdict.ALONE in running or (starts and running):
            return Verdict.LATER
        return Verdict.ALONE if starts else Verdict.RUN
