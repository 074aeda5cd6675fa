"""What a storm measured, as a table for people and as JSON for machines."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.chaos.memory import Sample


@dataclasses.dataclass(slots=True, kw_only=True)
class Round:
    """One fault and what it met."""

    number: int
    fault: str
    which: str
    #: No job of it has a lower number.
    first: int
    unfinished: int = 0
    #: From the start of the fault until the fleet was whole again.
    recovery_s: float = 0.0
    #: Whether the next fault struck before the jobs that this one ended were given back.
    overtaken: bool = False
    #: From the start of the fault to the next start of each job that it had ended.
    again_s: list[float] = dataclasses.field(default_factory=list)
    lost: int = 0
    doubled: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Minute:
    """A minute of a soak, or whatever lies between two faults."""

    minute: float
    fault: str
    recovery_s: float
    jobs_per_s: float
    #: By kind, the largest process of each.
    memory_mb: dict[str, float]

    def line(self) -> str:
        memory = "  ".join(f"{kind} {mb:.1f}" for kind, mb in self.memory_mb.items())
        return (
            f"{self.minute:5.1f} min  {self.fault:26} whole after {self.recovery_s:5.1f} s"
            f"  {self.jobs_per_s:5.0f} jobs/s  MB: {memory}"
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class Report:
    """A whole storm."""

    seed: int
    server: str
    took_s: float = 0.0
    accepted: int = 0
    rounds: list[Round] = dataclasses.field(default_factory=list)
    #: Of a soak.
    minutes: list[Minute] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    #: By kind of process, in ten minutes.
    growth_mb: dict[str, float] = dataclasses.field(default_factory=dict)
    #: How many jobs were started once, twice, ...
    starts: dict[int, int] = dataclasses.field(default_factory=dict)
    #: What calls of clients raised meanwhile, and how often.
    troubles: dict[str, int] = dataclasses.field(default_factory=dict)
    broken: list[str] = dataclasses.field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def round_of(rounds: Sequence[Round], number: int) -> Round:
    """Return the round whose job has this number."""
    return next((each for each in reversed(rounds) if each.first <= number), rounds[0])


def markdown(report: Report) -> str:
    """Return the report in Markdown."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    if report.minutes:
        yield from _minutes(report)
        yield ""
    yield (
        "| fault | times | unfinished at the fault, least | lost | doubled "
        "| whole again after, p50 / max s | its jobs again after, p50 / max s |"
    )
    yield "|---|---|---|---|---|---|---|"
    kinds: dict[str, list[Round]] = collections.defaultdict(list)
    for each in report.rounds:
        kinds[each.fault].append(each)
    for fault, rounds in kinds.items():
        yield f"| {' | '.join(_cells(fault, rounds))} |"
    starts = ", ".join(f"{count:,} with {times}" for times, count in sorted(report.starts.items()))
    yield ""
    yield (
        f"{report.accepted:,} jobs in {report.took_s / 60:.1f} minutes on {report.server}, "
        f"seed {report.seed}. Jobs by starts: {starts}."
    )


def _minutes(report: Report) -> Iterator[str]:
    kinds = list(report.minutes[-1].memory_mb)
    yield f"| minute | fault | whole again after s | jobs/s | {', MB | '.join(kinds)}, MB |"
    yield "|---" * (4 + len(kinds)) + "|"
    for each in report.minutes:
        cells = [f"{each.minute:.1f}", each.fault, f"{each.recovery_s:.1f}"]
        cells += [f"{each.jobs_per_s:.0f}"]
        cells += [f"{each.memory_mb.get(kind, 0.0):.1f}" for kind in kinds]
        yield f"| {' | '.join(cells)} |"
    grown = ", ".join(f"{kind} {mb:+.2f}" for kind, mb in report.growth_mb.items())
    yield ""
    yield f"Growth after the third minute of a process, MB in ten minutes: {grown or '-'}."


def _cells(fault: str, rounds: Sequence[Round]) -> Iterator[str]:
    yield fault
    yield str(len(rounds))
    yield str(min(each.unfinished for each in rounds))
    yield str(sum(each.lost for each in rounds))
    yield str(sum(each.doubled for each in rounds))
    yield _middle_and_most([each.recovery_s for each in rounds])
    yield _middle_and_most([s for each in rounds if not each.overtaken for s in each.again_s])


def _middle_and_most(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} / {max(values):.1f}" if values else "-"
