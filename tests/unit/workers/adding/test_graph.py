"""What is in the way of serving a file, told from the file alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.datasets import get_example

from producer.contract.errors import ConfigError
from tests import onnx_models
from workers.adding.graph import read_graph


def iris(path: Path) -> None:
    shutil.copy(get_example("logreg_iris.onnx"), path)


def constant(path: Path) -> None:
    """A graph without inputs."""
    value = numpy_helper.from_array(np.ones(3, np.float32))
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["y"], value=value)],
        "constant",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
    )
    onnx.save(helper.make_model(graph), path)


def garbage(path: Path) -> None:
    path.write_bytes(b"no model at all")


def lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def shapeless(path: Path) -> None:
    """A graph whose input does not say how many axes it has."""
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "shapeless",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph), path)


def cut_off(path: Path) -> None:
    onnx_models.linear(path)
    path.write_bytes(path.read_bytes()[:-20])


def external(path: Path) -> Path:
    """Write a model whose weights lie beside it; return their file."""
    onnx_models.linear(path)
    onnx.save(
        onnx.load(path),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    return path.with_name("weights.bin")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (iris, "output 'probabilities' is a sequence of maps"),
        (iris, "options={'zipmap': False}"),
        (onnx_models.text, "input 'x' is text"),
        (constant, "the model has no inputs"),
        (shapeless, "input 'x' has no shape"),
        (lfs_pointer, "`git lfs pull` fetches it"),
        (garbage, "is not an ONNX model"),
        (cut_off, "is not an ONNX model, or only a part of one"),
        (Path.touch, "is empty"),
        (Path.mkdir, "is a folder"),
    ],
)
def test_what_is_in_the_way_is_named(
    tmp_path: Path, write: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "model.onnx"
    write(path)

    with pytest.raises(ConfigError) as error:
        read_graph(path)

    assert str(error.value).startswith(str(path))
    assert says in str(error.value)


def test_a_file_of_pytorch_is_told_from_its_suffix_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    garbage(path)

    with pytest.raises(ConfigError, match=r"looks like PyTorch: export it with torch\.onnx"):
        read_graph(path)


def test_weights_beside_the_file_are_found_and_missed(tmp_path: Path) -> None:
    weights = external(tmp_path / "model.onnx")

    assert read_graph(tmp_path / "model.onnx").external == (weights,)

    weights.unlink()
    with pytest.raises(ConfigError, match=r"weights\.bin, which is not there"):
        read_graph(tmp_path / "model.onnx")


def test_weights_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    external(tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = "../weights.bin"
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(ConfigError, match="outside its folder"):
        read_graph(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("write", "precision"),
    [
        (onnx_models.linear, "fp32"),
        (onnx_models.digits_int8, "int8"),
        (onnx_models.digits_int8_static, "int8"),
    ],
)
def test_the_precision_is_that_of_the_nodes(
    tmp_path: Path, write: Callable[[Path], None], precision: str
) -> None:
    write(tmp_path / "model.onnx")

    assert read_graph(tmp_path / "model.onnx").precision == precision


def test_a_half_precision_file_is_called_fp16(tmp_path: Path) -> None:
    onnx_models.linear(tmp_path / "model.onnx")

    assert read_graph(onnx_models.in_fp16(tmp_path / "model.onnx")).precision == "fp16"


@pytest.mark.parametrize(
    ("element", "precision"), [(TensorProto.FLOAT, "fp32"), (TensorProto.FLOAT16, "fp16")]
)
def test_a_graph_without_weights_has_the_precision_of_its_inputs(
    tmp_path: Path, element: int, precision: str
) -> None:
    x, y = (helper.make_tensor_value_info(name, element, ["n", 4]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "bare", [x], [y])
    onnx.save(helper.make_model(graph, ir_version=9), tmp_path / "model.onnx")

    assert read_graph(tmp_path / "model.onnx").precision == precision
