"""How the demo looks: tables and pictures for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import click
import numpy as np
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from workers.demo.acts import Answers
from workers.demo.burst import Burst, Moment
from workers.demo.digits import Digits, picture, shown

_PICTURES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the acts gave."""

    first: Answers
    second: Answers
    third: Burst
    #: Engines that each process of the first act's worker loaded.
    loads: Sequence[int]
    memory_limit_bytes: int


@contextlib.contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for the length of the block; gives the function that moves it."""
    columns = (TextColumn("answered"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def first_act(console: Console, answers: Answers, loads: Sequence[int], digits: Digits) -> None:
    """Print the numbers of the first act, and a few digits with their answers."""
    p50_s, p99_s = np.percentile(answers.latencies_s, [50, 99])
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("jobs", f"{len(answers.replies)}")
    table.add_row("accuracy", f"{answers.accuracy:.4f}")
    table.add_row("jobs/s", f"{len(answers.replies) / answers.wall_s:,.0f}")
    table.add_row("mean batch", f"{answers.mean_batch:.1f} rows")
    table.add_row(
        "latency", f"p50 {p50_s * 1000:.0f} ms, p99 {p99_s * 1000:.0f} ms (sent at once: they wait)"
    )
    table.add_row("engine loads", f"{sum(loads)} in {len(loads)} processes")
    console.print("", table, "")
    _pictures(console, answers, digits)


def second_act(console: Console, answers: Answers, limit_bytes: int) -> None:
    """Print which answers came from which precision and batch."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("precision", "rows in the batch", "answers"):
        table.add_column(head, justify="left" if head == "precision" else "right")
    for precision, batch, jobs in answers.by_precision():
        table.add_row(precision, str(batch), str(jobs))
    console.print(table)
    console.print(
        f"{len(answers.out_of_memory())} of {len(answers.replies)} answers come from a batch that "
        f"exceeded {limit_bytes:,} bytes and was run again, smaller and in FP16; later batches "
        f"keep to a size that fits.\nAccuracy {answers.accuracy:.4f}; no job failed."
    )


def burst_head(console: Console) -> None:
    """Print the heads of the third act's lines."""
    console.print("\n  seconds   waiting or running   instances")


def burst_moment(console: Console, moment: Moment) -> None:
    """Print one line of the third act, as it happens."""
    bar = "#" * moment.instances
    console.print(f"  {moment.at_s:7.1f}   {moment.queued:18,}   {moment.instances}  {bar}")


def third_act(console: Console, burst: Burst) -> None:
    """Print what became of the burst."""
    console.print(
        f"\n{burst.answered:,} jobs answered in {burst.wall_s:.1f} s; the worker grew to "
        f"{burst.most} instances and is back at {burst.last}."
    )


def as_json(outcome: Outcome, failed: Sequence[str]) -> None:
    """Print everything as one JSON object."""
    first, second = outcome.first, outcome.second
    p50_s, p99_s = np.percentile(first.latencies_s, [50, 99])
    shown_as: dict[str, Any] = {
        "jobs": len(first.replies),
        "accuracy": first.accuracy,
        "jobs_per_s": len(first.replies) / first.wall_s,
        "mean_batch_size": first.mean_batch,
        "latency_p50_s": float(p50_s),
        "latency_p99_s": float(p99_s),
        "engine_loads": list(outcome.loads),
        "little_memory": {
            "memory_limit_bytes": outcome.memory_limit_bytes,
            "accuracy": second.accuracy,
            "out_of_memory": len(second.out_of_memory()),
            "answers": [
                {"precision": precision, "batch_size": batch, "jobs": jobs}
                for precision, batch, jobs in second.by_precision()
            ],
        },
        "burst": {
            "answered": outcome.third.answered,
            "wall_s": outcome.third.wall_s,
            "most_instances": outcome.third.most,
            "moments": [dataclasses.asdict(moment) for moment in outcome.third.moments],
        },
        "failed": list(failed),
    }
    click.echo(json.dumps(shown_as, indent=2))


def _pictures(console: Console, answers: Answers, digits: Digits) -> None:
    shown_ones = shown(answers.digits, digits.labels, count=_PICTURES)
    console.print(
        Columns(
            [
                _captioned(
                    picture(digits.images[index]), answers.digits[index], digits.labels[index]
                )
                for index in shown_ones
            ],
            padding=(0, 3),
        )
    )


def _captioned(lines: Sequence[str], answer: int, label: int) -> Text:
    right = answer == label
    caption = f"answer {answer}" if right else f"answer {answer}, is {label}"
    drawn = Text("\n".join(lines), no_wrap=True)
    return drawn.append(f"\n{caption:<16}\n", style="green" if right else "bold red")
