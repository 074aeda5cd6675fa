"""One job's inputs: what is taken as it is, what is cast, what is refused and with which words."""

from __future__ import annotations

import numpy as np
import pytest

from producer.contract.errors import BadRequest
from workers.models import TensorSpec
from workers.prepared import Prepared, prepare

IMAGE = TensorSpec(name="image", dtype="float32", shape=(None, 2), batch_axis=0)
IDS = TensorSpec(name="ids", dtype="uint8", shape=(None,), batch_axis=0)
FLAG = TensorSpec(name="flag", dtype="bool", shape=(), batch_axis=None)


def prepared(value: object, tensor: TensorSpec = IMAGE) -> Prepared:
    return prepare({tensor.name: value}, [tensor], exact=False)


def test_an_array_of_the_models_dtype_is_taken_as_it_is() -> None:
    array = np.ones((3, 2), np.float32)

    job = prepared(array)

    assert job.arrays["image"] is array
    assert job.rows == 3


@pytest.mark.parametrize(
    ("value", "tensor"),
    [([[1, 2.5]], IMAGE), ([[1, 2]], IMAGE), ([0, 255], IDS), (True, FLAG)],
)
def test_json_is_cast_to_the_models_dtype(value: object, tensor: TensorSpec) -> None:
    job = prepared(value, tensor)

    assert job.arrays[tensor.name].dtype == np.dtype(tensor.dtype)
    assert job.arrays[tensor.name].tolist() == value


@pytest.mark.parametrize(
    ("value", "tensor", "says"),
    [
        (np.ones((3, 2)), IMAGE, r"must be float32, not float64; convert it with \.astype"),
        (np.ones((3, 3), np.float32), IMAGE, r"must have shape \[rows, 2\], not \[3, 3\]"),
        (np.ones(2, np.float32), IMAGE, r"must have shape \[rows, 2\], not \[2\]"),
        (np.ones((0, 2), np.float32), IMAGE, "holds no rows"),
        ([], IMAGE, "must have shape"),
        ([[1, 2], [3]], IMAGE, "nested lists differ in length"),
        ([["a", "b"]], IMAGE, "must hold numbers that fit float32"),
        ("text", IMAGE, "must be an array or nested lists of numbers, not str"),
        (None, IMAGE, "not NoneType"),
        ([1.5], IDS, "must hold numbers that fit uint8"),
        ([256], IDS, "must hold numbers that fit uint8"),
        ([-1], IDS, "must hold numbers that fit uint8"),
        ([10**40], IDS, "must hold numbers that fit uint8"),
        (1, FLAG, "must hold numbers that fit bool"),
        (np.array([True]), FLAG, r"must have shape \[\], not \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    value: object, tensor: TensorSpec, says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        prepared(value, tensor)


def test_unknown_and_missing_inputs_are_named() -> None:
    image = np.ones((1, 2), np.float32)

    with pytest.raises(BadRequest, match=r"no input 'imgae'\. Did you mean 'image'"):
        prepare({"imgae": image}, [IMAGE], exact=False)
    with pytest.raises(BadRequest, match="input 'ids' is missing; the model needs image, ids"):
        prepare({"image": image}, [IMAGE, IDS], exact=False)


def test_inputs_of_one_job_have_equally_many_rows() -> None:
    inputs = {"image": np.ones((2, 2), np.float32), "ids": np.ones(3, np.uint8)}

    with pytest.raises(BadRequest, match="equally many rows"):
        prepare(inputs, [IMAGE, IDS], exact=False)


def test_a_representation_holds_no_values() -> None:
    job = prepared(np.full((1, 2), 12345, np.float32))

    assert "12345" not in repr(job)
