"""What is said of a model that was tried, and the largest batch that follows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from workers.adding.found import Found, Port
from workers.adding.report import example, lines, plain, why_batch
from workers.adding.speed import Timing

FOUND = Found(
    inputs=(
        Port(name="x", dtype="float32", sizes=("n", "t", 3), batch_axis=0, tried=(1, 16, 3)),
        Port(name="rate", dtype="int64", sizes=(), batch_axis=None, tried=()),
    ),
    outputs=(Port(name="y", dtype="float32", sizes=("m", 2), batch_axis=0),),
    precision="fp32",
    batches=True,
    why="",
    whole=False,
    timings=tuple(Timing(rows=rows, run_s=0.01 * max(rows, 4)) for rows in (1, 2, 4, 8)),
    untimed="",
    runtime="onnxruntime 1.32.0",
    threads=1,
)


def changed(**values: object) -> Found:
    return dataclasses.replace(FOUND, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "rows", "why"),
    [
        (FOUND, 4, "4 rows in a run give 4.0 times the jobs/s of one by one; larger"),
        (changed(timings=FOUND.timings[:3]), 4, "the most of what was timed"),
        (changed(timings=FOUND.timings[:1]), 1, "gain less than a tenth on this machine"),
        (changed(batches=False, why="so it is"), 1, "Each row runs alone: so it is."),
        (changed(batches=False, whole=True, why="x"), 1, "A job runs alone and uncut: x."),
        (changed(other_runtime="tensorrt"), 8, "would use tensorrt, which was not timed"),
    ],
)
def test_the_largest_batch_has_a_reason(found: Found, rows: int, why: str) -> None:
    assert found.max_batch_size == rows
    assert why in why_batch(found)


def test_what_was_found_survives_the_way_from_the_process_of_the_trial() -> None:
    assert Found.from_json(json.loads(json.dumps(FOUND.as_json()))) == FOUND


def test_rows_are_called_rows_and_other_free_sizes_as_the_exporter_did() -> None:
    assert [port.shape for port in (*FOUND.inputs, *FOUND.outputs)] == [
        "[rows, t, 3]",
        "[]",
        "[rows, 2]",
    ]
    assert FOUND.inputs[0].free_axes == (1,)


def test_the_example_sends_one_row_of_each_input() -> None:
    assert example("my", FOUND) == (
        'infer.delay("my", {"x": numpy.zeros([1, 16, 3], "float32"), '
        '"rate": numpy.zeros([], "int64")}).get(timeout=10)'
    )


def test_the_report_is_lines_without_what_a_terminal_would_obey() -> None:
    strange = changed(runtime="bad\x1b[2J\nruntime", untimed="a\x07b")

    text = "\n".join(lines("my", Path("models/my"), strange))

    assert not any(not letter.isprintable() for line in text.split("\n") for letter in line)
    assert plain("a\n b\x1b") == "a b"
