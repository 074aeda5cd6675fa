"""The ways to write a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from producer.contract.call import parse_call, rows_of, shapes_of
from producer.contract.errors import BadRequest

INPUTS = {"image": [[1.0]]}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (("digits", INPUTS), {}),
        (("digits",), {"inputs": INPUTS}),
        ((INPUTS,), {"model": "digits"}),
        ((), {"model": "digits", "inputs": INPUTS}),
    ],
)
def test_every_way_to_write_a_call_means_the_same(args: Any, kwargs: Any) -> None:
    call = parse_call(args, kwargs)

    assert (call.model, call.inputs) == ("digits", INPUTS)


def test_a_call_without_a_model_leaves_it_to_the_queue() -> None:
    assert parse_call((), {"inputs": INPUTS}).model is None


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, "needs inputs"),
        (("digits",), {}, "needs inputs"),
        (("digits", INPUTS, 1), {}, "once each"),
        (("digits", INPUTS), {"model": "digits"}, "once each"),
        (("digits", INPUTS), {"batch": 1}, "not batch"),
        ((INPUTS, "digits"), {}, "for_model"),
        ((5, INPUTS), {}, "must be a name"),
        (("digits", [1]), {}, "must be a map"),
        (("digits", {1: 2}), {}, "must be text"),
    ],
)
def test_anything_else_is_a_bad_request_that_says_what(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_call(args, kwargs)


@pytest.mark.parametrize(
    ("inputs", "rows"),
    [
        ({"image": np.zeros((7, 2))}, 7),
        ({"scale": np.float32(1), "image": np.zeros((7, 2))}, 7),
        ({"image": [[1], [2]]}, 2),
        ({"image": np.zeros((0, 2))}, 1),
        ({"file": b"abc"}, 1),
        ({"text": "abc", "more": [1, 2]}, 2),
        ({}, 1),
    ],
)
def test_rows_are_counted_without_knowing_the_model(inputs: dict[str, Any], rows: int) -> None:
    assert rows_of(inputs) == rows


def test_shapes_show_no_values() -> None:
    text = shapes_of({"a": np.full((1, 2), 77, np.float32), "b": "secret", "c": [77], "d": 77})

    assert text == "{a: float32[1, 2], b: str[6], c: list[1], d: int}"
