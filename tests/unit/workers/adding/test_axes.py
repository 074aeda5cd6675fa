"""Which axes may count rows, and in which order they are tried."""

from __future__ import annotations

import numpy as np

from workers.adding.axes import grown_axes, guesses


def test_the_first_axis_of_every_input_is_guessed_first() -> None:
    assert guesses({"x": ("n", 4), "mask": ("n",), "rate": ()})[0] == {
        "x": 0,
        "mask": 0,
        "rate": None,
    }


def test_an_axis_of_one_name_is_guessed_wherever_it_lies() -> None:
    found = guesses({"x": ("b", 3), "state": (2, "b", 3), "rate": ()})

    assert {"x": 0, "state": 1, "rate": None} in found


def test_without_names_the_first_free_axis_of_each_input_is_guessed() -> None:
    assert {"x": 0, "state": 1} in guesses({"x": ("", 3), "state": (2, "", 3)})


def test_one_guess_is_made_once_and_none_without_any_axis() -> None:
    assert guesses({"x": ("n", 4)}) == [{"x": 0}]
    assert guesses({"rate": ()}) == []


def test_the_axis_that_grows_with_the_rows_is_the_batch_axis_of_an_output() -> None:
    one = {"y": np.zeros((1, 1)), "state": np.zeros((2, 1, 3)), "version": np.zeros(1)}
    two = {"y": np.zeros((2, 1)), "state": np.zeros((2, 2, 3)), "version": np.zeros(1)}

    assert grown_axes(one, two) == {"y": 0, "state": 1, "version": None}
