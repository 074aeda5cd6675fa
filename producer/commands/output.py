"""How commands speak: tables for people, JSON for programs, one line when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table


class Refused(click.ClickException):
    """One line that says what is wrong and what to do."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"fleet: {' '.join(self.message.split())}", file=file or sys.stderr)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")(
        command
    )


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console

    # A pipe has no width; a program that wants columns takes --json.
    Console(width=None if sys.stdout.isatty() else 160).print(table(heads, rows))


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        shown.add_column(head, overflow="fold")
    for row in rows:
        # Texts come from workers and files; rich must not read markup in them.
        shown.add_row(*(cell.replace("[", "\\[") for cell in row))
    return shown
