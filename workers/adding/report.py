"""What `fleet add` decided and why, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from producer.contract.names import queue_of
from workers.adding.found import Found, Port
from workers.adding.hints import WIDER
from workers.adding.serving import Served
from workers.adding.speed import AROUND_JOB_S, AROUND_RUN_S


def plain(text: str) -> str:
    """Return ``text`` on one line, without what a terminal or a comment would choke on."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())


def threads(found: Found) -> str:
    """Return how many threads ran it, in words."""
    return "1 thread" if found.threads == 1 else f"{found.threads} threads"


def why_batch(found: Found) -> str:
    """Return in a sentence why batches have the size they have."""
    if not found.batches:
        jobs = "A job runs alone and uncut" if found.whole else "Each row runs alone"
        return f"{jobs}: {found.why}."
    if found.other_runtime:
        return (
            f"Rows may share a run. Workers here would use {found.other_runtime}, which was not "
            "timed: try sizes under load."
        )
    best = found.max_batch_size
    if best == 1:
        return "Rows may share a run, but larger batches gain less than a tenth on this machine."
    largest = max(timing.rows for timing in found.timings)
    rates = {timing.rows: timing.jobs_per_s for timing in found.timings}
    gain = f"{rates[best] / rates[1]:.1f} times the jobs/s of one by one"
    if best == largest:
        return f"{best} rows in a run give {gain}, the most of what was timed."
    return f"{best} rows in a run give {gain}; larger batches gain less than a tenth more."


def why_wider(found: Found) -> str:
    """Return why integer inputs were tried with larger values, or nothing: they were not."""
    if not found.wider:
        return ""
    return (
        f"{', '.join(found.wider)}: tried with integers up to {WIDER}. With 0 and 1 alone, the "
        "number of rows in a run moves answers, though no row changes another's: by up to "
        f"{found.tolerance:g} of the largest, which is the tolerance. If that is too much for "
        "you, write max_batch_size = 1."
    )


def timing_rows(found: Found) -> list[str]:
    """Return what was measured, a line for each batch size, and why there are no more."""
    lines = _columns(
        [
            ("rows", "ms a run", "rows/s", "jobs/s"),
            *(
                (
                    str(t.rows),
                    f"{1000 * t.run_s:.3g}",
                    f"{t.rows_per_s:,.0f}",
                    f"{t.jobs_per_s:,.0f}",
                )
                for t in found.timings
            ),
        ]
    )
    lines.append(
        f"jobs/s: of one row in a worker, which takes {1000 * AROUND_RUN_S:g} ms more a run and "
        f"{1000 * AROUND_JOB_S:g} ms a job"
    )
    if found.untimed:
        lines.append(plain(f"no larger: {found.untimed}"))
    return lines


def lines(name: str, folder: Path, found: Found) -> Iterator[str]:
    """Yield what was decided."""
    yield f"{name}: added as {folder}"
    yield ""
    yield from (f"  {line}" for line in _ports(found))
    yield ""
    yield f"  batching   {'on' if found.batches else 'off'}, max_batch_size {found.max_batch_size}"
    yield f"  why        {plain(why_batch(found))}"
    if wider := why_wider(found):
        yield f"  values     {plain(wider)}"
    for (axes, tried), names in _free_axes(found).items():
        several = ", ".join(str(axis) for axis in axes)
        yield (
            f"  free size  axis {several} of {', '.join(names)}: jobs of one size share a batch; "
            f"tried with {list(tried)}; --probe-shape tries yours"
        )
    yield f"  precision  {found.precision}"
    yield f"  measured   {plain(found.runtime)} with {threads(found)}"
    yield from (f"             {line}" for line in timing_rows(found))


def next_lines(name: str, found: Found, served: Served) -> Iterator[str]:
    """Yield what to do now."""
    if served.trouble:
        yield f"Not served yet: {plain(served.trouble).rstrip('.')}."
    for node in served.older:
        yield (
            f"{node} serves the file that was there until it is started again (Ctrl-C and "
            "`fleet up`, or as you start your workers); a process of it that dies before comes "
            "back with the new one. What waits meanwhile is kept."
        )
    yield _how_to_try(name, served)
    yield f"  {example(name, found)}"


def _how_to_try(name: str, served: Served) -> str:
    if served.instances:
        workers = _counted(served.workers, "worker")
        return f"Served by {workers}, {_counted(served.instances, 'instance')}. In Python:"
    if served.older:
        return "Then, in Python:"
    if served.trouble:
        return (
            "Next: mend that, then start your workers again (fleet up), or ask them again: celery "
            f"-A workers.app control add_consumer {queue_of(name)}\nThen, in Python:"
        )
    return "Next: fleet up (or start your workers again), then in Python:"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def example(name: str, found: Found) -> str:
    """Return a line of Python that sends a job of one row."""
    arrays = ", ".join(
        f'"{plain(port.name)}": numpy.zeros({list(port.tried)}, "{port.dtype}")'
        for port in found.inputs
    )
    return f'infer.delay("{name}", {{{arrays}}}).get(timeout=10)'


def _free_axes(found: Found) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]]:
    """Return the names of inputs by their axes of any size and the shape that was tried."""
    names: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for port in found.inputs:
        if port.free_axes:
            names.setdefault((port.free_axes, port.tried), []).append(plain(port.name))
    return names


def _ports(found: Found) -> list[str]:
    return _columns(
        [
            ("", "name", "dtype", "shape", "counts rows"),
            *(_port("input", port) for port in found.inputs),
            *(_port("output", port) for port in found.outputs),
        ]
    )


def _port(side: str, port: Port) -> tuple[str, ...]:
    axis = "no axis" if port.batch_axis is None else f"axis {port.batch_axis}"
    return (side, plain(port.name), port.dtype, port.shape, axis)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
