"""What a person may say about the values that a model is tried with."""

from __future__ import annotations

import pytest

from producer.contract.errors import ConfigError
from workers.adding.hints import check, from_json, read_hints, to_json
from workers.tensor_tables import ProbeHint


def test_shape_and_largest_value_of_an_input_go_together_and_survive_the_way() -> None:
    hints = read_hints(["x=1,576", "a=b=2"], ["x=16000"], ["x=-8"])

    assert hints == {
        "x": ProbeHint(shape=(1, 576), largest=16000.0, least=-8.0),
        "a=b": ProbeHint(shape=(2,)),
    }
    assert from_json(to_json(hints)) == hints


@pytest.mark.parametrize("text", ["x", "=1", "x=", "x=1,,2", "x=0", "x=-1", "x=a"])
def test_a_shape_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME=1,576"):
        read_hints([text], [])


@pytest.mark.parametrize("text", ["x", "x=", "x=nan", "x=inf", "x=-1", "x=a"])
def test_a_largest_value_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--probe-max must be"):
        read_hints([], [text])


@pytest.mark.parametrize("text", ["x", "x=", "x=nan", "x=-inf", "x=1", "x=a"])
def test_a_least_value_that_is_no_number_below_the_largest_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--probe-min must be"):
        read_hints([], [], [text])


def test_an_unknown_input_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no input 'sate'\. Did you mean 'state'"):
        check(read_hints(["sate=1"], []), {"state": (), "x": ()})
