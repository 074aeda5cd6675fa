"""The numbers of `benchmarks.beside_celery` as two tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

PUBLISH: Final = "client publish"
COLLECT: Final = "client collect"
ROLES: Final = (PUBLISH, "parent", "instance", "Redis", COLLECT)

PLAIN: Final = "plain Celery"


class Run(Protocol):
    """What is shown of one timed round."""

    @property
    def side(self) -> str: ...
    @property
    def way(self) -> str: ...
    @property
    def jobs_per_s(self) -> float: ...
    @property
    def cpu_us(self) -> Mapping[str, float]: ...
    @property
    def mean_batch(self) -> float | None: ...
    @property
    def others_cores(self) -> float: ...


def print_head(facts: Mapping[str, Any]) -> None:
    """Say what is measured, on what."""
    print(
        f"{facts['jobs']:,} jobs of one float32 row of {facts['row_bytes']:,} bytes, "
        f"{facts['rounds']} alternating rounds; both sides with one process for the model.\n"
        f"Model: {facts['model']}.\n"
        f"{facts['cores']} cores, load average {facts['load_average']:.2f}; "
        f"Python {facts['python']}, Celery {facts['celery']}, {facts['server']} "
        "(append-only file, fsync every second), shared by both.\n"
    )


def print_tables(runs: Sequence[Run]) -> None:
    """Print jobs/s with the ratios, then CPU per job."""
    sides = _by_side(runs)
    print("jobs/s from the first delay() to the last answer")
    _print_rates(sides)
    print("\nmicroseconds of CPU per job (median)")
    _print_costs(sides)
    others = [run.others_cores for run in runs]
    print(
        f"\nOther programs kept {statistics.median(others):.2f} cores busy (median of the runs; "
        f"at most {max(others):.2f}); on a quiet machine that is near 0."
    )


def ratios(ours: Sequence[Run], plain: Iterable[Sequence[Run]]) -> list[float]:
    """Return for each round how many times the faster of plain Celery's ways ours is."""
    return [
        run.jobs_per_s / max(other.jobs_per_s for other in others)
        for run, *others in zip(ours, *plain, strict=True)
    ]


def _by_side(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    sides: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        sides.setdefault((run.side, run.way), []).append(run)
    return sides


def _print_rates(sides: Mapping[tuple[str, str], Sequence[Run]]) -> None:
    plain = [runs for (side, _), runs in sides.items() if side == PLAIN]
    print(f"{'':36}{'each round':>30}{'median':>9}{'times the faster plain of the round':>39}")
    for (side, way), runs in sides.items():
        rates = [run.jobs_per_s for run in runs]
        each = " ".join(f"{rate:,.0f}" for rate in rates)
        line = f"{f'{side}, {way}':36}{each:>30}{statistics.median(rates):>9,.0f}"
        if side != PLAIN:
            times = ratios(runs, plain)
            each = " ".join(f"{ratio:.1f}" for ratio in times)
            line += f"{f'{each}, median {statistics.median(times):.1f}':>39}"
        print(line)


def _print_costs(sides: Mapping[tuple[str, str], Sequence[Run]]) -> None:
    print(f"{'':36}" + "".join(f"{role:>16}" for role in (*ROLES, "sum", "mean batch")))
    for (side, way), runs in sides.items():
        costs = [statistics.median(run.cpu_us[role] for run in runs) for role in ROLES]
        sizes = [run.mean_batch for run in runs if run.mean_batch is not None]
        batch = f"{statistics.median(sizes):.1f}" if sizes else "1" if side == PLAIN else "-"
        numbers = [f"{cost:,.0f}" for cost in (*costs, sum(costs))]
        print(f"{f'{side}, {way}':36}" + "".join(f"{text:>16}" for text in (*numbers, batch)))
