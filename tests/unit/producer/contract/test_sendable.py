"""What can be packed can be read, and is what it was: anything else is refused where it is sent."""

from __future__ import annotations

import datetime
import enum
import sys
import uuid
from collections import OrderedDict, namedtuple
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from producer.client import Client
from producer.contract import wire
from producer.contract.app import make_app
from producer.contract.errors import BadRequest
from producer.contract.settings import Settings
from producer.tasks import Infer, register
from producer.testing import answering
from tests.unit.producer.conftest import Worker

Point = namedtuple("Point", "x y")


class Colour(enum.StrEnum):
    RED = "red"


scalars = hnp.from_dtype(np.dtype("float32"), allow_nan=False) | hnp.from_dtype(np.dtype("int64"))
moments = st.datetimes() | st.dates() | st.uuids()
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.binary(max_size=4).map(bytearray),
    st.binary(max_size=4).map(lambda data: memoryview(b"" + data)),
    st.just(Colour.RED),
    st.builds(lambda: np.ones(2).data),
    st.builds(lambda: np.ma.masked_array([1, 2], [False, True])),
    st.just(np.zeros((0, wire.MAX_EXTENT + 1), np.int8)),
    st.builds(msgpack.ExtType, st.integers(0, 3), st.binary(max_size=24)),
    st.builds(msgpack.Timestamp, st.integers(0, 9)),
    scalars,
    scalars.map(np.float64),
    moments,
    hnp.arrays(np.dtype(np.float32), hnp.array_shapes(max_side=2), elements=st.just(1.0)),
)
keys = leaves.filter(lambda key: not isinstance(key, bytearray | np.ndarray | memoryview))
anything = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.tuples(st.integers()), inner, max_size=1),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=6,
)


def as_read(value: Any) -> Any:
    """Return what is documented to come back for ``value``, in a form that can be compared."""
    if isinstance(value, dict):
        return {"map": {key: as_read(each) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        return [as_read(each) for each in value]
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, float):
        array = np.asarray(value)
        return ("array", array.dtype.str, array.shape, array.tobytes())
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


@given(anything)
def test_whatever_is_packed_is_read_as_it_is_documented(value: Any) -> None:
    try:
        packed = wire.dumps({"inputs": value})
    except BadRequest:
        return

    assert as_read(wire.loads(packed)["inputs"]) == as_read(value)


@pytest.mark.parametrize(
    ("value", "do"),
    [
        pytest.param({("a", 1): 2}, r"tuple.*use str\(key\)", id="tuple as a key"),
        pytest.param({np.int64(1): 2}, r"int64.*use key\.item\(\)", id="numpy number as a key"),
        pytest.param({datetime.date(2026, 1, 1): 2}, r"date.*str\(key\)", id="date as a key"),
        pytest.param([{"a": ({Point(1, 2): 3},)}], r"Point.*str\(key\)", id="deep"),
        pytest.param(msgpack.ExtType(2, b"x" * 20), "Send bytes", id="an extension"),
        pytest.param(np.ma.masked_array([1], [True]), r"array\.filled", id="masked"),
        pytest.param(np.ones(2).data, r"numpy\.asarray", id="view of numbers"),
        pytest.param(np.zeros((0, 2**31)), "in parts", id="long axis"),
    ],
)
def test_what_nobody_could_read_is_refused_with_what_to_do(value: Any, do: str) -> None:
    with pytest.raises(BadRequest, match=do):
        wire.dumps(value)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param({("a", 1): 2}, id="a key"),
        pytest.param({1.0: msgpack.ExtType(2, b"x" * 20)}, id="an extension"),
        pytest.param(msgpack.Timestamp(1), id="a timestamp"),
        pytest.param(np.ma.masked_array(1.0, True), id="masked"),
        pytest.param(np.ones(2).data, id="view of numbers"),
    ],
)
def test_it_is_refused_behind_many_numbers_too(bad: object) -> None:
    row = [1.0] * 20

    for value in ([*row, bad], [[*row, bad]], [*[row] * 20, bad], [*[row] * 20, [bad]]):
        with pytest.raises(BadRequest):
            wire.dumps(value)


@pytest.mark.parametrize("value", [[0.5] * 9600, [[0.5] * 3] * 3200, [[[0.5] * 24] * 40] * 10])
def test_numbers_in_long_lists_are_not_looked_at_one_by_one(value: list[Any]) -> None:
    lines = 0

    def count(frame: object, event: str, _: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        wire.dumps(value)
    finally:
        sys.settrace(before)

    assert 0 < lines < 300


UNREADABLE = {"lookup": {("a", 1): 2}}


@pytest.mark.redis
def test_a_job_that_nobody_could_read_is_refused_at_the_call(
    settings: Settings, infer: Infer, worker: Worker
) -> None:
    with Client(settings) as fleet:
        for send in (
            lambda: infer.delay("digits", UNREADABLE),
            lambda: infer.apply_async(("digits", UNREADABLE), countdown=1),
            lambda: fleet.submit("digits", UNREADABLE),
            lambda: fleet.submit_many("digits", [UNREADABLE]),
        ):
            with pytest.raises(BadRequest, match="tuple"):
                send()

    assert not worker.messages


def test_it_is_refused_in_an_apps_own_tests_too(app_without_redis: Infer) -> None:
    with answering({"digits": lambda inputs: inputs}), Client() as fleet:
        with pytest.raises(BadRequest, match="tuple"):
            app_without_redis.delay("digits", UNREADABLE)
        with pytest.raises(BadRequest, match="tuple"):
            fleet.submit("digits", UNREADABLE)


@pytest.fixture
def app_without_redis() -> Infer:
    return register(make_app(Settings(broker_url="redis://127.0.0.1:1/0")))
