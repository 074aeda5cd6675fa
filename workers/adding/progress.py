"""What `fleet add` is at, said on standard error while somebody waits for it.

A terminal has one line that changes. Elsewhere a line is written when it takes long, and again
whenever it has taken twice as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import click
from rich.console import Console
from rich.markup import escape

#: Where nobody watches, nothing is said of what takes less.
_LONG_S: Final = 10.0

Tell: TypeAlias = Callable[[str], None]


@contextlib.contextmanager
def shown(text: str) -> Iterator[Tell]:
    """Show ``text`` for the length of the block, and yield what shows another in its place."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Seldom().tell
        return
    with console.status(escape(text)) as status:
        yield lambda said: status.update(escape(said))


class _Seldom:
    """Writes a line at growing gaps."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._next_s = _LONG_S

    def tell(self, text: str) -> None:
        took_s = time.monotonic() - self._began_s
        if took_s >= self._next_s:
            self._next_s = 2 * took_s
            click.echo(f"fleet: {text}", err=True)
