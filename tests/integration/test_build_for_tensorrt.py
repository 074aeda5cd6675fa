"""Built variants are what TensorRT's parser takes and its builder makes plans of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.building import built, digits_folder, model_folder
from tests.support.mlp import write_mlp
from tests.support.tensorrt import plan_bytes
from workers.build.store import variants_folder

DIGITS = {"image": ((1, 1, 8, 8), (32, 1, 8, 8), (32, 1, 8, 8))}


def file_of(folder: Path, precision: str) -> Path:
    """Return the one file of a precision that was built."""
    (path,) = variants_folder(folder).glob(f"{precision}-*.onnx")
    return path


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8", "fp8"])
def test_variants_of_the_digits_become_plans(tmp_path: Path, precision: str) -> None:
    folder = digits_folder(tmp_path)

    built(folder, precision)

    assert plan_bytes(file_of(folder, precision), DIGITS) > 0


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
def test_variants_of_a_perceptron_become_plans_with_small_weights(
    tmp_path: Path, precision: str
) -> None:
    folder = model_folder(tmp_path, write_mlp)
    digits = digits_folder(tmp_path)

    built(folder, precision, calibrate=digits / "calibration.npz")

    parameters = 64 * 1024 + 1024 * 1024 + 1024 * 10
    bytes_each = 2 if precision == "fp16" else 1
    size = plan_bytes(file_of(folder, precision), DIGITS)
    assert parameters * bytes_each < size < parameters * (bytes_each + 1.9)
