"""What follows a batch that ran out of memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.batching.ladder import Rung, Step, after_out_of_memory, first_rung, parse_step

HALF_IN_FP16 = [parse_step("fp16/2")]


def walk(steps: list[Step], rows: int) -> list[tuple[str, int]]:
    rungs: list[tuple[str, int]] = []
    rung: Rung | None = Rung(precision="fp32", rows=rows)
    while rung is not None:
        rungs.append((rung.precision, rung.rows))
        rung = after_out_of_memory(steps, rung)
    return rungs


def test_by_default_half_the_batch_in_fp16_then_halves_down_to_one_row() -> None:
    assert walk(HALF_IN_FP16, 32) == [
        ("fp32", 32),
        ("fp16", 16),
        ("fp16", 8),
        ("fp16", 4),
        ("fp16", 2),
        ("fp16", 1),
    ]


def test_half_the_batch_in_the_same_precision_may_come_first() -> None:
    steps = [parse_step("fp32/2"), parse_step("fp16/1")]

    assert walk(steps, 4) == [("fp32", 4), ("fp32", 2), ("fp16", 2), ("fp16", 1)]


def test_one_row_is_not_run_again_in_the_precision_it_failed_in() -> None:
    assert walk([parse_step("fp32/2")], 1) == [("fp32", 1)]
    assert walk(HALF_IN_FP16, 1) == [("fp32", 1), ("fp16", 1)]


@given(
    rows=st.integers(1, 2000),
    steps=st.lists(
        st.builds(Step, precision=st.sampled_from(["fp32", "fp16"]), divisor=st.integers(1, 8)),
        max_size=4,
    ),
)
def test_every_ladder_ends_at_one_row_and_runs_nothing_twice(rows: int, steps: list[Step]) -> None:
    rungs = walk(steps, rows)

    assert rungs[-1][1] == 1
    assert [count for _, count in rungs] == sorted((count for _, count in rungs), reverse=True)
    assert all(a != b for a, b in itertools.pairwise(rungs))


@pytest.mark.parametrize(
    ("ceilings", "starts"),
    [
        ({}, ("fp32", 32)),
        ({"fp32": 16}, ("fp32", 16)),
        ({"fp32": 0}, ("fp16", 16)),
        ({"fp32": 0, "fp16": 4}, ("fp16", 4)),
        ({"fp32": 0, "fp16": 0}, ("fp16", 1)),
    ],
)
def test_a_batch_starts_where_it_is_expected_to_fit(
    ceilings: dict[str, int], starts: tuple[str, int]
) -> None:
    rung = first_rung(HALF_IN_FP16, precision="fp32", rows=32, ceilings=ceilings)

    assert (rung.precision, rung.rows) == starts


@pytest.mark.parametrize("text", ["fp16", "fp16/0", "fp16/-2", "/2", "fp16/2/2", ""])
def test_a_step_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="steps look like 'fp16/2'"):
        parse_step(text)
