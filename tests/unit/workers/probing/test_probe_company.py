"""Rows that change each other's answers, and answers that the number of rows moves: told apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from workers.models import ModelSpec, TensorSpec
from workers.probing.probe import Batching, probe

Array: TypeAlias = npt.NDArray[Any]

SPEC = ModelSpec(
    name="m", folder=Path(), runtime="onnxruntime", engines={"fp32": None}, precision="fp32"
)
X = TensorSpec(name="x", dtype="float32", shape=(None, 4), batch_axis=0)
Y = TensorSpec(name="y", dtype="float32", shape=(None, 4), batch_axis=0)


def probed(answer: Callable[[Array], Array]) -> Batching:
    return probe(
        lambda feeds: {"y": answer(feeds["x"])}, SPEC, inputs=[X], outputs=[Y], precision="fp32"
    )


def test_an_answer_that_the_number_of_rows_alone_moves_is_not_blamed_on_other_rows() -> None:
    found = probed(lambda x: x * np.float32(1 + 0.01 * len(x)))

    assert (found.max_rows, found.whole) == (1, True)
    assert found.moved_by == pytest.approx(0.01 / 1.01, rel=0.01)
    assert "though no row changes another's: output 'y' changes by more than 0.001" in found.why


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x / np.abs(x).max(),
        lambda x: x - x.mean(axis=0) * np.float32(0.1),
        lambda x: x * np.float32(1 + 0.01 * len(x)) + x.mean(axis=0) * np.float32(0.001),
    ],
    ids=["a shared scale", "a shared mean", "both"],
)
def test_rows_that_change_each_other_are_called_so(answer: Callable[[Array], Array]) -> None:
    found = probed(answer)

    assert (found.max_rows, found.moved_by) == (1, 0)
    assert found.why.startswith("rows influence each other: output 'y' changes")


def test_rows_that_do_neither_share_a_run() -> None:
    found = probed(lambda x: x * np.float32(2))

    assert (found.max_rows, found.why, found.moved_by) == (32, "", 0)


def test_answers_that_are_nan_throughout_prove_nothing() -> None:
    found = probed(lambda x: np.full_like(x, np.nan))

    assert (found.max_rows, found.moved_by) == (1, 0)
    assert "nothing but NaN" in found.why


def test_a_nan_among_numbers_hides_nothing() -> None:
    found = probed(lambda x: np.where(x > np.float32(0.9), np.float32("nan"), x))

    assert found.max_rows == 32
