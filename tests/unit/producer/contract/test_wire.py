"""The wire format: what goes in comes out, and hostile bytes do nothing but raise."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
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


@pytest.mark.parametrize("data", [b"", b"\x00\x90", b"\x02\x90", b"\xff"])
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
