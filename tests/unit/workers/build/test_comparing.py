"""What is said of a variant beside fp32, and when it is refused."""

from __future__ import annotations

import numpy as np
import pytest

from workers.build.compare import Comparison, Difference, accuracy, why_refused

ONES = np.ones((2, 3), np.float32)


def compared(*pairs: tuple[object, object], axis: int | None = 0) -> Difference:
    """Return the difference of outputs that came in several batches."""
    comparison = Comparison(axis)
    for expected, found in pairs:
        comparison.add(np.asarray(expected), np.asarray(found))
    return comparison.difference()


def test_batches_of_different_sizes_count_by_rows() -> None:
    expected = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]], np.float32)
    found = np.array([[1.0, 2.5], [1.0, 3.0], [0.0, 5.0]], np.float32)

    all_rows = compared((expected[:2], found[:2]), (expected[2:], found[2:]))

    assert all_rows.rows == 3
    assert all_rows.max_abs == 2
    assert all_rows.mean_abs == pytest.approx(4.5 / 6)
    assert all_rows.top1_agreement == pytest.approx(2 / 3)
    assert all_rows.cosine_least == pytest.approx(0.6)


def test_rows_may_lie_on_another_axis() -> None:
    expected = np.eye(3, 2, dtype=np.float32)

    found = compared((expected, -expected), axis=1)

    assert found.rows == 2
    assert found.cosine_mean == pytest.approx(-1)


def test_zeros_are_like_zeros_and_unlike_anything_else() -> None:
    zeros = np.zeros((2, 3), np.float32)

    same, other = compared((zeros, zeros)), compared((zeros, ONES))

    assert (same.cosine_mean, other.cosine_mean) == (1, 0)


def test_whole_numbers_agree_where_they_are_equal() -> None:
    found = compared(([1, 2, 3, 4], [1, 2, 3, 9]))

    assert found.top1_agreement == 0.75
    assert found.cosine_mean is None


def test_one_number_a_row_has_no_top_1() -> None:
    assert compared((ONES[:, :1], ONES[:, :1])).top1_agreement is None


def test_values_that_stopped_being_finite_are_counted_and_refused() -> None:
    expected = np.array([[1, np.inf, 2]], np.float32)
    found = np.array([[np.nan, np.inf, np.inf]], np.float32)

    difference = compared((expected, found))

    assert difference.not_finite == 2
    assert "2 values that are not finite" in why_refused(
        {"y": difference}, min_agreement=0, min_cosine=0
    )


def test_infinity_where_fp32_has_it_is_no_difference() -> None:
    values = np.array([[1, -np.inf, 2]], np.float32)

    difference = compared((values, values))

    assert (difference.not_finite, difference.max_abs) == (0, 0)
    assert why_refused({"y": difference}, min_agreement=1, min_cosine=0.999) == ""


@pytest.mark.parametrize(
    ("least", "says"),
    [
        ({"min_agreement": 0.6, "min_cosine": 0}, "agrees with fp32 in 0.5000 of the rows"),
        ({"min_agreement": 0, "min_cosine": 0.9}, "has a mean cosine of 0.8000 to fp32"),
        ({"min_agreement": 0.5, "min_cosine": 0.7}, ""),
    ],
)
def test_a_variant_is_held_to_what_its_model_asks_for(least: dict[str, float], says: str) -> None:
    expected = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    found = np.array([[1.0, 0.0], [0.8, 0.6]], np.float32)

    refused = why_refused({"y": compared((expected, found))}, **least)

    assert says in refused
    assert bool(refused) == bool(says)


def test_accuracy_is_the_share_of_labelled_classes() -> None:
    scores = np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)

    assert accuracy(scores, np.array([1, 1]), axis=0) == 0.5
    assert accuracy(scores.T, np.array([1, 1]), axis=1) == 0.5
    assert accuracy(np.array([1, 0]), np.array([1, 1]), axis=0) == 0.5
