"""When the next batch is claimed beside the one that runs."""

from __future__ import annotations

import pytest

from workers.claiming import claim_ahead_in_s


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
