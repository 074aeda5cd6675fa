"""Sources that are right by the rules of ONNX and unlike what exporters write today."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from producer.contract.errors import ConfigError
from tests.support.building import built, model_folder
from workers.build import graph, variants
from workers.models import load_model

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
ROWS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def linear(*, opset: int = 17, domain: str = "", ir_version: int = 8) -> onnx.ModelProto:
    """Return ``y = x @ w``."""
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(W, "w")],
    )
    opsets = [helper.make_opsetid(domain, opset)]
    return helper.make_model(made, opset_imports=opsets, ir_version=ir_version)


def with_listed_weights(ir_version: int) -> onnx.ModelProto:
    """Return it with the weight among the inputs, as before version 4 it had to be."""
    made = linear(opset=9, ir_version=ir_version)
    made.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3]))
    return made


ODD = {
    "opset 7": lambda: linear(opset=7),
    "domain": lambda: linear(domain="ai.onnx"),
    "listed": lambda: with_listed_weights(3),
    "replaceable": lambda: with_listed_weights(8),
}


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
@pytest.mark.parametrize("source", ODD.values(), ids=ODD)
def test_an_odd_source_is_converted_like_any_other(
    tmp_path: Path, source: Callable[[], onnx.ModelProto], precision: str
) -> None:
    folder = model_folder(
        tmp_path, lambda path: onnx.save(source(), path), files={"rows.npz": {"x": ROWS}}
    )

    (variant,) = built(folder, precision, calibrate=folder / "rows.npz")

    report = variant.manifest["report"]
    assert (variant.state, report["converted"]) == ("built", {"MatMul": 1})
    assert report["outputs"]["y"]["cosine_mean"] > 0.99


def test_weights_in_a_folder_of_their_own_are_a_part_of_the_source(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        (path.parent / "weights").mkdir()
        onnx.save(
            linear(),
            path,
            save_as_external_data=True,
            location="weights/w.bin",
            size_threshold=0,
        )

    folder = model_folder(tmp_path, write, toml='[build]\nsource = "model.onnx"\n')

    (fp16,) = built(folder, "fp16")
    (again,) = built(folder, "fp16")

    assert set(fp16.manifest["source"]["files"]) == {"model.onnx", "weights/w.bin"}
    assert again.state == "unchanged"
    assert load_model(folder).ladder == ("fp16/2",)


def test_weights_of_a_constant_node_that_lie_in_a_file_of_their_own_are_a_part_too(
    tmp_path: Path,
) -> None:
    made = linear()
    weight = made.graph.initializer.pop()
    made.graph.node.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    path = tmp_path / "model.onnx"
    onnx.save(
        made,
        path,
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
        convert_attribute=True,
    )

    assert graph.external_files(path) == [tmp_path / "w.bin"]
    assert set(graph.digests(path)) == {"model.onnx", "w.bin"}


def test_weights_that_grow_beyond_what_a_file_can_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = linear()
    stored = np.ones((4, 300), np.int8)
    made.graph.initializer[0].CopyFrom(numpy_helper.from_array(stored, "stored"))
    made.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 300
    made.graph.node.insert(0, helper.make_node("Cast", ["stored"], ["w"], to=TensorProto.FLOAT))
    folder = model_folder(tmp_path, lambda path: onnx.save(made, path))
    monkeypatch.setattr(variants, "_LARGEST_BYTES", (folder / "model.onnx").stat().st_size)

    with pytest.raises(ConfigError, match="more than 2 GiB in fp32 cannot be built"):
        built(folder, "fp16")
