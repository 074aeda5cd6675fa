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
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("", "check", "found", "what to do"):
        table.add_column(head, overflow="fold")
    for each in findings:
        # As Text: what files and servers say is no markup.
        state = Text(each.state, style=_COLORS[each.state])
        table.add_row(state, Text(each.check), Text(each.text), Text(each.do))
    # A pipe has no width; a program that wants columns takes --json.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    click.echo(summary(findings))


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
