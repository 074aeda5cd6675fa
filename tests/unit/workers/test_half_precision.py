"""Files that are said to be FP16: those that are, those that are not, and what lies between."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common import float16

from producer.contract.errors import ConfigError
from tests import onnx_models
from workers.half_precision import is_half_precision
from workers.models import load_model


def with_initializer(path: Path, *dtypes: str) -> Path:
    """Write a model with one weight of each dtype; float32 in, float32 out."""
    made = [numpy_helper.from_array(np.ones(4, dtype), f"w{n}") for n, dtype in enumerate(dtypes)]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        made,
    )
    onnx.save(helper.make_model(graph), path)
    return path


def test_the_digits_in_fp16_are_and_those_in_fp32_are_not() -> None:
    assert is_half_precision(onnx_models.DIGITS / "digits_fp16.onnx")
    assert not is_half_precision(onnx_models.DIGITS / "digits.onnx")


@pytest.mark.parametrize("keep_io_types", [True, False])
def test_a_converted_file_is_half_whatever_it_takes_and_gives(
    tmp_path: Path, keep_io_types: bool
) -> None:
    onnx_models.linear(tmp_path / "fp32.onnx")
    model = onnx.load(tmp_path / "fp32.onnx")
    half = float16.convert_float_to_float16(model, keep_io_types=keep_io_types)
    onnx.save(half, tmp_path / "fp16.onnx")

    assert is_half_precision(tmp_path / "fp16.onnx")
    assert not is_half_precision(tmp_path / "fp32.onnx")


def test_some_nodes_may_stay_in_single_precision(tmp_path: Path) -> None:
    assert is_half_precision(with_initializer(tmp_path / "m.onnx", "float32", "float16"))
    assert not is_half_precision(with_initializer(tmp_path / "m.onnx", "float32", "int8"))


def test_a_model_without_any_weight_in_single_precision_is_not_suspected(tmp_path: Path) -> None:
    onnx_models.positive_pixels(tmp_path / "m.onnx")

    assert is_half_precision(tmp_path / "m.onnx")
    assert is_half_precision(with_initializer(tmp_path / "m.onnx", "int8"))


def test_weights_that_are_cast_to_half_count_also_inside_a_branch(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Cast", ["w"], ["z"], to=TensorProto.FLOAT16)],
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT16, [4])],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)],
        "made",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [4])],
        [numpy_helper.from_array(np.ones(4, np.float32), "w")],
    )
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")

    assert is_half_precision(tmp_path / "m.onnx")


def test_a_torn_file_is_read_to_its_end_and_no_further(tmp_path: Path) -> None:
    whole = (onnx_models.DIGITS / "digits.onnx").read_bytes()
    for size in range(1, len(whole), 997):
        (tmp_path / "torn.onnx").write_bytes(whole[:size])

        is_half_precision(tmp_path / "torn.onnx")


def test_an_fp16_engine_that_is_really_fp32_is_refused_at_start(tmp_path: Path) -> None:
    folder = tmp_path / "twins"
    folder.mkdir()
    shutil.copy(onnx_models.DIGITS / "digits.onnx", folder / "digits.onnx")
    shutil.copy(onnx_models.DIGITS / "digits.onnx", folder / "half.onnx")
    (folder / "model.toml").write_text('[engines]\nfp32 = "digits.onnx"\nfp16 = "half.onnx"\n')

    with pytest.raises(ConfigError, match=r"computes in float32.*fleet build twins --precision fp"):
        load_model(folder)
