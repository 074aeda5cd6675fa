"""What cannot be built, or is not good enough: one clear error each, and nothing half-written."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.contract.errors import ConfigError
from tests import onnx_models
from tests.support.building import built, digits_folder, model_folder
from workers.build.store import variants_folder
from workers.models import load_model, load_source

ROWS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def left_behind(folder: Path) -> list[str]:
    """Return the files of a build, apart from its lock."""
    there = variants_folder(folder)
    return sorted(path.name for path in there.iterdir() if path.name != ".lock")


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"y": ROWS}, "holds no array 'x', which is an input of the model. It holds: y."),
        ({"x": ROWS, "z": ROWS}, "'z' is no input of the model. Known: x."),
        (
            {"x": ROWS.astype(np.float64)},
            "'x' is float64, the model takes float32; store it with .astype(\"float32\").",
        ),
        ({"x": ROWS[:, :3]}, "'x' has shape [16, 3], the model takes [rows, 4]."),
        ({"x": ROWS.ravel()}, "'x' has shape [64], the model takes [rows, 4]."),
        ({"x": ROWS[:0]}, "holds no rows."),
        ({"x": np.full_like(ROWS, np.nan)}, "'x' holds values that are not finite."),
        ({"x": np.array([None])}, "is not an .npz of plain arrays"),
    ],
    ids=["name", "extra", "dtype", "width", "rank", "empty", "nan", "objects"],
)
def test_calibration_rows_that_do_not_fit_the_model_are_refused(
    tmp_path: Path, arrays: dict[str, Any], says: str
) -> None:
    folder = model_folder(tmp_path, onnx_models.linear, files={"rows.npz": arrays})

    with pytest.raises(ConfigError) as error:
        built(folder, "int8", calibrate=folder / "rows.npz")

    assert str(error.value).startswith(f"{folder / 'rows.npz'}: ")
    assert says in str(error.value)
    assert left_behind(folder) == []


def test_inputs_with_different_numbers_of_rows_are_refused(tmp_path: Path) -> None:
    rows: dict[str, Any] = {
        "x": ROWS[:5, :3],
        "state": np.zeros((2, 4, 3), np.float32),
        "rate": np.array(1, np.int64),
    }
    toml = (
        "[inputs.state]\nbatch_axis = 1\n[outputs.next]\nbatch_axis = 1\n"
        '[inputs.rate]\nbatch_axis = "none"\n'
    )
    folder = model_folder(
        tmp_path, onnx_models.state_on_axis_one, toml=toml, files={"rows.npz": rows}
    )

    with pytest.raises(ConfigError, match="differ in their number of rows: x 5, state 4"):
        built(folder, "int8", calibrate=folder / "rows.npz")


def packed(member: bytes, *, flip: int | None = None) -> bytes:
    """Return an .npz with one member, ``x``; ``flip`` spoils two bytes of it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", member)
    content = bytearray(file.getvalue())
    if flip is not None:
        content[flip] ^= 0xFF
        content[flip + 1] ^= 0xFF
    return bytes(content)


def header(shape: str) -> bytes:
    """Return the start of an array that says that it has ``shape``."""
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00v\x00" + said.encode()


BROKEN = {
    "empty": b"",
    "cut off": b"PK\x03\x04 cut off",
    "foreign": b"not a file of numpy",
    "damaged": packed(header("(16, 4)") + ROWS.tobytes(), flip=35),
    "no array": packed(b"something else"),
    "too large": packed(header("(99999999999, 4)")),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_calibration_file_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = model_folder(tmp_path, onnx_models.linear)
    (folder / "rows.npz").write_bytes(content)

    with pytest.raises(ConfigError, match=r"is not an \.npz of plain arrays") as error:
        built(folder, "int8", calibrate=folder / "rows.npz")

    assert "pickle" not in str(error.value)


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_rows_with_a_value_that_the_model_refuses_are_named(tmp_path: Path, precision: str) -> None:
    rows = {"ids": np.full((4, 3), 90, np.int64)}
    folder = model_folder(tmp_path, onnx_models.lookup, files={"rows.npz": rows})

    with pytest.raises(ConfigError, match=r"^rows\.npz: the model refuses its rows\. .*idx=90"):
        built(folder, precision, calibrate=folder / "rows.npz")


def test_int8_without_rows_says_how_to_give_them(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, onnx_models.linear)

    with pytest.raises(ConfigError, match=r"need rows to calibrate with: --calibrate rows\.npz"):
        built(folder, "int8")


def test_a_calibration_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, onnx_models.linear)

    with pytest.raises(ConfigError, match=r"rows\.npz: there is no such file"):
        built(folder, "int8", calibrate=folder / "rows.npz")


def test_a_model_in_which_nothing_can_be_quantised_is_refused(tmp_path: Path) -> None:
    folder = model_folder(
        tmp_path, onnx_models.running_sum, files={"rows.npz": {"x": ROWS[:, :3].copy()}}
    )

    with pytest.raises(ConfigError, match="int8 would change nothing"):
        built(folder, "int8", calibrate=folder / "rows.npz")

    assert left_behind(folder) == []


def test_a_node_to_keep_that_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)

    with pytest.raises(ConfigError, match=r"no node 'conv3' to keep in fp32\. Did you mean 'conv"):
        built(folder, "fp16", keep_fp32=("conv3",))


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_truncated_model_is_refused(tmp_path: Path, share: float) -> None:
    def write(path: Path) -> None:
        content = (onnx_models.DIGITS / "digits.onnx").read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    folder = model_folder(tmp_path, write)

    with pytest.raises(ConfigError, match="is not an ONNX model, or only a part of one"):
        load_source(folder)


@pytest.mark.parametrize(
    ("domain", "says"),
    [("", "No Op registered for Frobnicate"), ("com.example", "com.example:Frobnicate")],
)
def test_an_unknown_operator_is_named(tmp_path: Path, domain: str, says: str) -> None:
    folder = model_folder(tmp_path, lambda path: unknown_operator(path, domain))

    with pytest.raises(ConfigError, match=says) as error:
        built(folder, "fp16")

    assert "\n" not in str(error.value)
    assert left_behind(folder) == []


def test_a_variant_below_the_least_agreement_is_not_kept(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    rng = np.random.default_rng(0)
    noise = rng.random((64, 1, 8, 8), np.float32) * 1e-6
    np.savez(folder / "noise.npz", image=noise)

    (int8,) = built(folder, "int8", calibrate=folder / "noise.npz", min_cosine=0.0)

    assert int8.state == "refused"
    assert "below min_agreement 0.98" in int8.text
    assert left_behind(folder) == []


def test_a_variant_far_from_fp32_is_not_kept_even_without_labels(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    np.savez(folder / "noise.npz", image=np.full((8, 1, 8, 8), 1e-6, np.float32))

    (int8,) = built(folder, "int8", calibrate=folder / "noise.npz", min_agreement=0.0)

    assert int8.state == "refused"
    assert "below min_cosine 0.9" in int8.text


def test_an_fp16_model_cannot_be_a_source(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        onnx_models.linear(path)
        model = onnx.load(path)
        weights = numpy_helper.to_array(model.graph.initializer[0]).astype(np.float16)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights, "w"))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
        onnx.save(model, path)

    folder = model_folder(tmp_path, write)

    with pytest.raises(ConfigError, match="fp16 would change nothing: none of its 1 MatMul"):
        built(folder, "fp16")


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        ("nowhere:score", "metric nowhere:score cannot be loaded: ModuleNotFoundError"),
        ("measures:missing", "metric measures:missing cannot be loaded: AttributeError"),
        ("measures:broken", "metric measures:broken failed: ZeroDivisionError"),
        ("measures:text", "metric measures:text failed: ValueError"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused(tmp_path: Path, metric: str, says: str) -> None:
    folder = model_folder(tmp_path, onnx_models.linear)
    (folder / "measures.py").write_text(
        "def broken(outputs, data):\n    return 1 / 0\n"
        "def text(outputs, data):\n    return 'good'\n"
    )

    with pytest.raises(ConfigError, match=says):
        built(folder, "fp16", metric=metric)

    assert left_behind(folder) == []


def test_labels_that_do_not_fit_the_rows_are_refused(tmp_path: Path) -> None:
    folder = digits_folder(tmp_path)
    images = np.zeros((4, 1, 8, 8), np.float32)
    np.savez(folder / "few.npz", image=images, labels=np.zeros(3, np.int64))

    with pytest.raises(ConfigError, match="'labels' holds 3 labels for 4 rows"):
        built(folder, "fp16", test=folder / "few.npz")
    for wrong, says in (
        (np.array(3), "'labels' holds no row of labels for 4 rows"),
        (np.eye(10, dtype=np.float32)[:4], "'labels' is float32; labels are whole numbers"),
        (np.eye(10, dtype=np.int64)[:4], "each row has 1, not 10"),
    ):
        np.savez(folder / "wrong.npz", image=images, labels=wrong)
        with pytest.raises(ConfigError, match=says):
            built(folder, "fp16", test=folder / "wrong.npz")
    with pytest.raises(ConfigError, match="name an output 'score', which the model does not have"):
        built(folder, "fp16", labels={"score": "labels"})


def test_an_engine_of_ones_own_has_no_variants(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, onnx_models.linear)
    (folder / "model.toml").write_text('runtime = "tests.support.engines:Scripted"\n')

    with pytest.raises(ConfigError, match="variants are built of ONNX files alone"):
        load_source(folder)


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[build]\nmin_agreement = 98\n", "must be a share from 0 to 1, not 98."),
        ('[build]\nlabels = { y = "labels" }\n', 'labels needs test = "file.npz"'),
        ('[build]\nmetric = "score"\n', "must be \"module:function\", not 'score'."),
        ('[build]\ncalibrat = "rows.npz"\n', "Did you mean 'calibrate'?"),
    ],
)
def test_a_slip_below_build_is_one_line_for_workers_too(
    tmp_path: Path, toml: str, says: str
) -> None:
    folder = model_folder(tmp_path, onnx_models.linear, toml=toml)
    read: tuple[Callable[[Path], object], ...] = (load_model, load_source)

    for load in read:
        with pytest.raises(ConfigError) as error:
            load(folder)

        assert says in str(error.value)
        assert str(error.value).startswith(f"{folder / 'model.toml'} [build]: ")


def unknown_operator(path: Path, domain: str) -> None:
    """Write a model with an operator that nobody knows."""
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain=domain)
    value = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "unknown",
        [helper.make_tensor_value_info("x", value, ["n", 4])],
        [helper.make_tensor_value_info("y", value, ["n", 4])],
    )
    opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())
