"""Tables for people, as wide as their terminal."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence

import pytest
from rich.console import Console

from producer.commands.output import table

HEADS = ("model", "ready", "queued", "runtime", "precision", "memory", "rows a batch", "because")
ROWS = [
    ("digits", "1 of 1", "0", "onnxruntime 1.32.0", "fp32", "15.6 MB", "32", ""),
    (
        *("digits-fixed1", "1 of 1", "0", "onnxruntime 1.32.0", "fp32", "0.3 MB", "1"),
        "input 'image' takes exactly one row",
    ),
]


def shown(rows: Sequence[tuple[str, ...]], width: int, heads: tuple[str, ...] = HEADS) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table(heads, rows, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_no_word_is_cut_on_80_columns() -> None:
    text = shown(ROWS, 80)

    words = {word for cell in itertools.chain(HEADS, *ROWS) for word in cell.split()}
    assert words <= set(text.split())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_nothing_is_left_out_at_any_width(width: int) -> None:
    long = ("a-rather-long-name-of-a-model", *ROWS[1][1:7], "y " * 60)

    text = shown([long], width)

    assert text.count("y") == 60 + sum(cell.count("y") for cell in (*HEADS, *long[:-1]))
    assert max(map(len, text.splitlines())) <= width


LETTERS = ("queue", "job", "code", "starts", "buried", "reason")
LETTER = (
    *("fleet.digits", "0b61f6d4-3c7e-4a5c-9f51-2d1a6d9f3b10", "WORKER_LOST", "3"),
    *("2026-11-30 20:27:36", "its process died at each of 3 starts"),
)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_id_of_a_job_can_be_copied_at_any_width(width: int) -> None:
    text = shown([LETTER, LETTER], width, LETTERS)

    assert text.count(LETTER[1]) == 2
    assert max(map(len, text.splitlines())) <= width


def test_what_fits_stands_on_one_line() -> None:
    assert len(shown(ROWS, 160).splitlines()) == 6
