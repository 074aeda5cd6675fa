"""The doctor's findings on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from workers.doctor.command import table
from workers.finding import Finding, State

URL = "redis://user:***@redis.example.com:6379/0"
FOUND = Finding("redis persistence", State.ERROR, f"There is no Redis at {URL}", "Start `one`.")


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_finding_and_what_to_do_are_shown_without_a_broken_word(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), color_system=None)

    console.print(table([FOUND], width=width))

    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert {*FOUND.check.split(), *FOUND.line.split()} <= set(text.split())
    assert max(map(len, text.splitlines())) <= width
