"""`fleet doctor`: the findings as a table or as JSON, and the exit code that they mean."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from workers.doctor.checkup import checkup
from workers.finding import Finding, State

_COLORS: Final = {State.OK: "green", State.WARNING: "yellow", State.ERROR: "bold red"}

#: On a narrower terminal, what to do stands behind what was found: two columns would break paths.
_WIDE: Final = 120


def doctor(*, as_json: bool, strict: bool) -> None:
    """Look, print, and end with the exit code."""
    findings = checkup()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
    else:
        _print(findings)
    if code := exit_code(findings, strict=strict):
        raise SystemExit(code)


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """Return 2 where anything is an error; 1 for a warning, where warnings count."""
    states = {each.state for each in findings}
    if State.ERROR in states:
        return 2
    return 1 if strict and State.WARNING in states else 0


def _print(findings: Sequence[Finding]) -> None:
    # A pipe has no width; a program that wants columns takes --json.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(findings, width=console.width))
    click.echo(summary(findings))


def table(findings: Iterable[Finding], *, width: int) -> Table:
    """Return the findings as a table that fits a terminal of that width."""
    is_wide = width >= _WIDE
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("", "check", "found", "what to do") if is_wide else ("", "check", "found"):
        shown.add_column(head, overflow="fold")
    for each in findings:
        # As Text: what files and servers say is no markup.
        state = Text(each.state, style=_COLORS[each.state])
        told = (each.text, each.do) if is_wide else (each.line,)
        shown.add_row(state, Text(each.check), *map(Text, told))
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """Return how it stands in one line."""
    counts = {state: sum(each.state is state for each in findings) for state in State}
    if not counts[State.ERROR] and not counts[State.WARNING]:
        return "All is well."
    words = [
        f"{counts[state]} {state}{'s' if counts[state] > 1 else ''}"
        for state in (State.ERROR, State.WARNING)
        if counts[state]
    ]
    return f"{', '.join(words)}."
