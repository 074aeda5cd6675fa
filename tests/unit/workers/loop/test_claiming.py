"""When the next batch is claimed beside the one that runs, and how many rows a claim holds."""

from __future__ import annotations

import pytest

from workers.loop.claiming import claim_ahead_in_s, rows_to_claim


@pytest.mark.parametrize(
    ("batch_s", "read_s", "in_s"),
    [
        pytest.param(0.01, 0.001, 0.0, id="a short batch: at once"),
        pytest.param(0.05, 0.001, 0.0, id="as long as it is claimed before its end: at once"),
        pytest.param(0.4, 0.001, 0.35, id="a long one: shortly before its end"),
        pytest.param(0.4, 0.1, 0.1, id="what takes long to read: earlier"),
        pytest.param(0.4, 0.2, 0.0, id="what takes longer than the batch lasts: at once"),
    ],
)
def test_the_next_batch_is_claimed_as_late_as_it_can_be_read(
    batch_s: float, read_s: float, in_s: float
) -> None:
    assert claim_ahead_in_s(batch_s=batch_s, read_s=read_s) == pytest.approx(in_s)


@pytest.mark.parametrize(
    ("max_rows", "row_s", "spread", "rows"),
    [
        pytest.param(32, None, 1.0, 32, id="before the first batch: one run"),
        pytest.param(32, 0.0001, 1.3, 32, id="claims that make full runs: one run"),
        pytest.param(32, 0.0001, 9.0, 512, id="jobs of many lengths: sixteen runs at most"),
        pytest.param(32, 0.001, 9.0, 100, id="of a slower model: what takes a tenth of a second"),
        pytest.param(32, 0.05, 9.0, 32, id="of a slow one: never less than one run"),
        pytest.param(1, None, 1.0, 1, id="row by row, before the first: one"),
        pytest.param(1, 0.01, 1.0, 10, id="row by row: what takes a tenth of a second"),
        pytest.param(1, 0.0001, 1.0, 64, id="row by row: no more than a batch"),
        pytest.param(1, 1.0, 1.0, 1, id="row by row, slowly: one"),
    ],
)
def test_a_claim_holds_more_than_a_run_where_its_runs_are_small(
    max_rows: int, row_s: float | None, spread: float, rows: int
) -> None:
    claimed = rows_to_claim(max_rows=max_rows, max_batch_size=64, row_s=row_s, spread=spread)

    assert claimed == rows
