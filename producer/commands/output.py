"""How commands speak: tables for people, JSON for programs, one line when something is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from rich.table import Table


#: Longer words are folded; the id of a job, which people copy, is none of them.
_LONGEST_WORD: Final = 40
#: What is between two columns.
_BETWEEN: Final = 2


class Refused(click.ClickException):
    """One line that says what is wrong and what to do."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"fleet: {plain(' '.join(self.message.split()))}", file=file or sys.stderr)


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")(
        command
    )


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


def plain(text: str) -> str:
    """Return ``text`` without what a terminal would take for an order."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def print_table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    from rich.console import Console

    # A pipe has no width; a program that wants columns takes --json.
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(heads, rows, console.width))


def table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], width: int) -> Table:
    """Return a table that cuts no word of up to 40 letters; where ``width`` has no room for that,
    what would be a row is a line for each of its cells.
    """
    # Texts come from workers and files; rich must not read markup in them.
    cells = [tuple(plain(cell) for cell in row) for row in rows]
    widths = _widths([heads, *cells], width)
    return _lines(heads, cells) if widths is None else _columns(heads, cells, widths)


def _columns(heads: Sequence[str], rows: Iterable[Sequence[str]], widths: Iterable[int]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head, wide in zip(heads, widths, strict=True):
        shown.add_column(head, overflow="fold", width=wide)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def _lines(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    shown = Table.grid(padding=(0, _BETWEEN, 0, 0))
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for row in rows:
        shown.add_row()
        for head, cell in zip(heads, row, strict=True):
            if cell:
                shown.add_row(head, escape(cell))
    return shown


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return the width of each column: of its longest cell, or, where that is too much for all, at
    least of its longest word; None where that is too much.
    """
    columns = list(zip(*rows, strict=True))
    words = [
        min(_LONGEST_WORD, max((len(word) for cell in column for word in cell.split()), default=1))
        for column in columns
    ]
    room = width - _BETWEEN * len(columns)
    if sum(words) > room:
        return None
    widths = [max(1, *map(len, column)) for column in columns]
    while sum(widths) > room:
        over = [at for at, word in enumerate(words) if widths[at] > word]
        widths[max(over, key=widths.__getitem__)] -= 1
    return widths
