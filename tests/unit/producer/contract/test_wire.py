"""The wire format: what goes in comes out, and hostile bytes do nothing but raise."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from celery import Celery, Signature, group
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kombu.serialization import registry

from producer.contract import wire
from producer.contract.errors import BadMessage, BadRequest

_SENT = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
)
arrays = hnp.arrays(
    dtype=_SENT, shape=hnp.array_shapes(min_dims=0, max_dims=wire.MAX_RANK, min_side=0, max_side=3)
)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(arrays)
def test_an_array_comes_back_with_its_dtype_shape_and_elements(array: np.ndarray[Any, Any]) -> None:
    back = wire.loads(wire.dumps(array))

    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    assert back.flags.aligned


@given(plain)
def test_plain_values_come_back_unchanged(value: Any) -> None:
    assert wire.loads(wire.dumps(value)) == value


@given(st.binary(max_size=200))
def test_garbage_raises_bad_message_alone(data: bytes) -> None:
    for hostile in (data, b"\x01" + data):
        try:
            wire.loads(hostile)
        except BadMessage:
            continue


@given(arrays, st.data())
def test_a_truncated_message_raises_bad_message(
    array: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    packed = wire.dumps({"x": array})
    cut = data.draw(st.integers(0, len(packed) - 1))

    with pytest.raises(BadMessage):
        wire.loads(packed[:cut])


@given(arrays, st.data())
def test_a_flipped_byte_raises_bad_message_or_decodes(
    array: np.ndarray[Any, Any], data: st.DataObject
) -> None:
    packed = bytearray(wire.dumps({"x": array}))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))

    try:
        wire.loads(packed)
    except BadMessage:
        return


def _extension(header: bytes, code: int = 1) -> bytes:
    return b"\x01" + bytes(msgpack.packb(msgpack.ExtType(code, header)))


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(_extension(struct.pack("<3sB2Q", b"<f4", 2, 2**20, 2**20)), id="4 TiB"),
        pytest.param(_extension(struct.pack("<3sB2Q", b"<f4", 2, 2**63, 2)), id="overflow"),
        pytest.param(_extension(struct.pack("<3sB2Q", b"<f4", 2, 0, 2**40)), id="huge empty"),
        pytest.param(_extension(struct.pack("<3sB1Q", b"|O8", 1, 0)), id="object"),
        pytest.param(_extension(struct.pack("<3sB1Q", b"<f4", 9, 0)), id="rank 9"),
        pytest.param(_extension(b"<f4"), id="half a header"),
        pytest.param(_extension(b"x", code=7), id="another extension"),
        pytest.param(b"\x01\xdd\xff\xff\xff\xff", id="list of 4 billion"),
        pytest.param(b"\x01\xdf\xff\xff\xff\xff", id="map of 4 billion"),
        pytest.param(b"\x01\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\x01" + b"\x91" * 5000, id="deep"),
    ],
)
def test_a_hostile_size_is_refused_and_allocates_nothing(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage):
            wire.loads(hostile)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1_000_000


@pytest.mark.parametrize("data", [b"", b"\x00\x90", b"\x03\x90", b"\xff"])
def test_an_unknown_version_is_refused_with_what_is_readable(data: bytes) -> None:
    with pytest.raises(BadMessage, match="readable here: 1"):
        wire.loads(data)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.array([object()]), id="object"),
        pytest.param(np.array([1j]), id="complex"),
        pytest.param(np.array(["a"]), id="text array"),
        pytest.param(np.zeros((1,) * 9), id="rank 9"),
        pytest.param(object(), id="not data"),
        pytest.param(2**70, id="big integer"),
    ],
)
def test_what_has_no_place_on_the_wire_is_a_bad_request(value: object) -> None:
    with pytest.raises(BadRequest):
        wire.dumps({"x": value})


def test_a_big_endian_or_strided_array_is_sent_in_our_order() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]

    back = wire.loads(wire.dumps(array))

    assert back.dtype == np.dtype("<i4")
    np.testing.assert_array_equal(back, array)


def test_kombu_packs_and_reads_it_under_its_name() -> None:
    wire.register()

    content_type, encoding, data = registry.dumps({"x": np.ones(2, np.float16)}, wire.SERIALIZER)

    assert (content_type, encoding) == (wire.CONTENT_TYPE, "binary")
    assert registry.loads(data, content_type, encoding, accept=[content_type])["x"].tolist() == [
        1,
        1,
    ]


def _values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(_values(key) + _values(inner) for key, inner in value.items())
    if isinstance(value, list):
        return 1 + sum(map(_values, value))
    return 1


_longer = st.text(min_size=30, max_size=300) | st.binary(min_size=200, max_size=300) | arrays


@given(st.lists(plain | _longer, min_size=1, max_size=4))
def test_a_value_of_any_kind_counts_as_one(value: list[Any]) -> None:
    _assert_counted(value)


@pytest.mark.parametrize("length", [40, 300, 70_000])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda length: "a" * length, id="text"),
        pytest.param(bytes, id="bytes"),
        pytest.param(lambda length: np.zeros(length, np.uint8), id="array"),
        pytest.param(lambda length: [0] * length, id="list"),
        pytest.param(lambda length: dict.fromkeys(range(length)), id="map"),
    ],
)
def test_a_value_of_any_length_counts_as_one(make: Callable[[int], Any], length: int) -> None:
    _assert_counted([make(length), "end"])


def _assert_counted(value: list[Any]) -> None:
    """Assert that ``value`` may be sent when exactly as many values as it has are allowed."""
    packed = wire.dumps(value)
    count = _values(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_VALUES", count)
        wire.loads(packed)
        patch.setattr(wire, "MAX_VALUES", count - 1)
        with pytest.raises(BadMessage):
            wire.loads(packed)
        with pytest.raises(BadRequest, match="as arrays"):
            wire.dumps(value)


@given(st.binary(max_size=200))
def test_counting_garbage_raises_nothing(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MAX_VALUES", 2)
        assert wire._too_many(data) in (True, False)


@pytest.mark.parametrize(
    "empty", [pytest.param(b"\x80", id="map"), pytest.param(b"\x90", id="list")]
)
def test_many_small_containers_are_refused_before_any_is_made(
    empty: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Counting is slow under tracemalloc.
    monkeypatch.setattr(wire, "MAX_VALUES", 2**16)
    full = b"\xdc\xff\xff" + empty * 0xFFFF
    hostile = b"\x01\xdc" + struct.pack(">H", 900) + full * 900

    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match="values"):
            wire.loads(hostile)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1_000_000


def test_the_most_values_there_may_be_are_sent_and_read() -> None:
    most = [0] * (wire.MAX_VALUES - 1)

    assert wire.loads(wire.dumps(most)) == most
    with pytest.raises(BadRequest, match="as arrays"):
        wire.dumps([*most, 0])


def test_a_group_of_celery_is_the_map_that_it_holds() -> None:
    # Its len() is the number of its tasks.
    steps = group(Signature("own.task", app=Celery(set_as_current=False)) for _ in range(2))

    assert wire.loads(wire.dumps({"chain": [steps]})) == json.loads(json.dumps({"chain": [steps]}))


def _wide(rows: int = 1, dtype: str = "<f4") -> np.ndarray[Any, Any]:
    return np.arange(rows * 70_000).astype(dtype).reshape(rows, -1)


@pytest.mark.parametrize("dtype", ["<f4", "<i8", "|u1"])
@pytest.mark.parametrize("by_dumps", [True, False])
def test_large_arrays_lie_beside_their_message_and_come_back(dtype: str, by_dumps: bool) -> None:
    sent: dict[str, Any] = {
        "big": [_wide(2, dtype), _wide(3, dtype)],
        "small": np.ones(3),
        "text": "ä" * 70_000,
    }
    spill = wire.Spill(over_bytes=65_536, where=wire.Where.REDIS)

    packed = wire.dumps(sent, spill) if by_dumps else wire.spill_packed(wire.dumps(sent), spill)
    blobs = {blob_id: bytes(data) for blob_id, data in spill.blobs.items()}
    back = wire.loads(packed, blobs)

    assert packed[0] == 2
    assert len(packed) < 150_000
    assert [reference.blob_id for reference in wire.references(packed)] == list(blobs)
    assert [reference.nbytes for reference in wire.references(packed)] == list(
        map(len, blobs.values())
    )
    for array, original in zip(back["big"], sent["big"], strict=True):
        np.testing.assert_array_equal(array, original)
        assert array.dtype == original.dtype
        assert array.flags.writeable
    np.testing.assert_array_equal(back["small"], sent["small"])
    assert back["text"] == sent["text"]


def test_a_message_without_large_arrays_is_one_that_older_readers_know() -> None:
    spill = wire.Spill(over_bytes=65_536, where=wire.Where.REDIS)

    packed = wire.dumps({"x": np.zeros(16_384, "f4"), "b": bytes(70_000)}, spill)

    assert packed[0] == 1
    assert wire.spill_packed(packed, spill) is packed
    assert not spill.blobs


def _reference(packed: bytes) -> bytes:
    return b"\x02" + bytes(msgpack.packb(msgpack.ExtType(2, packed)))


_HEADER = struct.pack("<3sB2Q", b"<f4", 2, 1, 4)
_ID = bytes(range(16))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        _HEADER,
        _HEADER + b"\x00" + _ID[:-1],
        _HEADER + b"\x02" + _ID,
        _HEADER + b"\x00" + _ID + b"/etc/passwd",
        struct.pack("<3sB2Q", b"<f4", 2, 1, 2**40) + b"\x00" + _ID,
        struct.pack("<3sB2Q", b"|O8", 2, 1, 4) + b"\x00" + _ID,
    ],
)
def test_a_reference_that_makes_no_sense_is_refused(packed: bytes) -> None:
    for read in (wire.loads, wire.references):
        with pytest.raises(BadMessage):
            read(_reference(packed))


def test_a_reference_is_read_only_where_its_blob_is_given_and_fits() -> None:
    message = _reference(_HEADER + b"\x00" + _ID)

    with pytest.raises(BadMessage, match="not read here"):
        wire.loads(message)
    with pytest.raises(BadMessage, match="does not match"):
        wire.loads(message, {_ID.hex(): bytes(15)})
    assert wire.loads(message, {_ID.hex(): bytes(16)}).shape == (1, 4)
    missing = wire.loads(message, {_ID.hex(): None})
    assert (missing.shape, missing.nbytes) == ((1, 4), 16)
